"""The loop: three threads around one `Pipeline`, a short transaction around what they finish.

    broker thread      poll -> read -> [texts] ......... [slot] ....... collect -> publish -> ...
    tokenizer thread                   [texts] -> encode
    model thread                                         [slot] -> score

The broker thread owns source, sink and ledger. It polls all the time, so the group never loses us
because the model is slow; while enough is in flight, partitions are paused and polled all the
same. No transaction is open while any of them works on a record. One transaction takes every
micro-batch that has finished since the last one: at low load one batch and no delay, under load
the cost of a transaction is shared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from processor.broker.transaction import Clock, RecordSource, TopicPartition, TransactionalSink
from processor.core.event import Record
from processor.core.pipeline import Pipeline
from processor.errors import AbortAndRewind, RebuildProducer
from processor.runtime.circuit import Circuit
from processor.runtime.ledger import Ledger
from processor.runtime.model_thread import ModelThread
from processor.runtime.patience import Patience
from processor.runtime.progress import Progress
from processor.runtime.publisher import OnOutcome, Publisher
from processor.runtime.reload import Reloading, Reloads
from processor.runtime.scoring import Scoring
from processor.runtime.signals import install_signal_handlers
from processor.runtime.telemetry import Counters

__all__ = ["Worker", "install_signal_handlers"]

IDLE_POLL_S = 0.05  # how late a stop is seen; records end the wait at once
BUSY_POLL_S = 0.002  # how late a finished micro-batch is seen, at least
BUSY_SHARE = 0.02  # ... or this share of the time that the model takes: waking up costs it cores
PAUSED_WAIT_S = 0.02  # longest time without a poll while paused
REVOKE_S = 3.0  # publishing inside the revoke callback: the others wait for it to join
MODEL_STOP_S = 1.0  # past the drain budget nothing it returns is of use
CLOSE_S = 5.0  # a client that cannot reach its broker hangs in close
IN_FLIGHT = 8  # micro-batches polled and not published at which partitions are paused
LARGEST_POLL = 1000  # records prepared between two polls: less than 0.1 s of work

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Past these a worker ends, in seconds: no round of the broker thread, no answer of the model,
    a partition that stands still; and rejections in a row, 0 for any number."""

    hang_s: float = 60.0
    score_s: float = 300.0
    stall_s: float = 120.0
    rejections_in_row: int = 0


class Worker:
    """Runs a pipeline from a source to a sink, exactly one outcome per record.

    `on_outcome` is called after the commit, once per outcome, in the broker thread: what it
    raises ends the worker. `limits` are the times and numbers past which it gives up.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        source: RecordSource,
        sink: TransactionalSink,
        counters: Counters,
        drain_s: float = 20.0,
        clock: Clock = time.monotonic,
        on_outcome: OnOutcome | None = None,
        publish_s: float = 10.0,
        reloading: Reloading[Any] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._source = source
        self._counters = counters
        self._drain_s = drain_s
        self._clock = clock
        self._publish_s = publish_s
        self._limits = limits or Limits()
        self._model = ModelThread(pipeline, clock)
        self._ledger = Ledger()
        self._scoring = Scoring(pipeline, self._model, self._ledger, counters, clock)
        circuit = Circuit(self._limits.rejections_in_row)
        self._publisher = Publisher(
            pipeline, source, sink, self._ledger, counters, on_outcome, publish_s, clock, circuit
        )
        self._progress = Progress(source, self._ledger, counters, self._limits.stall_s, clock)
        self._reloads: Reloads[Any] | None = None
        if reloading is not None:
            parts = (pipeline, self._model, self._scoring, counters, clock)
            self._reloads = Reloads(reloading, *parts)
        self._patience = Patience(clock)
        self._most = IN_FLIGHT * pipeline.budget.max_events
        self._paused = False
        self._closing = False
        self._deferred: Exception | None = None  # raised inside a callback, handled after it
        self._stop = threading.Event()
        self._last_step = clock()

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Work until `stop` is called or `until` is true, then drain and close.

        Raises `ExitProcess`, or whatever else nobody in this process can mend. Nothing is
        committed on the way out then: the next process repeats it.
        """
        self._model.start()
        try:
            self._source.open(self._assigned, self._revoked)
            while not self._stop.is_set() and not (until is not None and until()):
                self._step()
            self._drain()
        finally:
            self._close()

    def stop(self) -> None:
        """Ask `run` to drain and return; from any thread or a signal handler."""
        self._stop.set()

    def reload(self) -> None:
        """Ask `run` to read the policy folders again; from any thread or a signal handler."""
        if self._reloads is not None:
            self._reloads.ask()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def hangs(self) -> str | None:
        """Why this process should end, where one of its threads has not come back for too
        long; in any thread."""
        if (seconds := self._clock() - self._last_step) > self._limits.hang_s:
            return f"the broker thread has not come round for {seconds:.0f} s"
        return self._model.hangs(self._limits.score_s)

    # One round

    def _step(self) -> None:
        self._last_step = self._clock()
        if self._reloads is not None:
            self._reloads.step()
        try:
            self._ensure_producer()
            self._scoring.take_in(self._poll())
            self._raise_deferred()
            self._scoring.collect()
            if not self._patience.waiting:
                self._publish(self._publish_s)
        except AbortAndRewind as error:
            self._log("abort", error)
            self._counters.aborted()
            self._patience.failed(error)
            self._rewind(self._ledger.rewind())
        except RebuildProducer as error:
            self._log("rebuild", error)
            self._patience.failed(error)
        self._balance()
        self._progress.step(self._paused)

    def _ensure_producer(self) -> None:
        """A producer that can publish, unless the last failure asks us to wait."""
        if not self._publisher.ready and not self._patience.waiting:
            committed = self._publisher.start()
            if committed is not None:
                self._rewind(self._ledger.rewind(committed))

    def _poll(self) -> list[Record]:
        if self._paused:
            if not self._scoring.tokenizing:
                self._model.wait(PAUSED_WAIT_S)
            return self._source.poll(1, 0.0)
        room = max(1, min(self._most - len(self._ledger), LARGEST_POLL))
        if self._scoring.tokenizing:
            return self._source.poll(room, 0.0)
        wait = min(IDLE_POLL_S, max(BUSY_POLL_S, BUSY_SHARE * self._scoring.latest_s))
        return self._source.poll(room, wait if len(self._ledger) else IDLE_POLL_S)

    def _publish(self, budget_s: float) -> None:
        if self._publisher.publish(budget_s):
            self._patience.succeeded()

    def _balance(self) -> None:
        """Back-pressure, with a wide gap between on and off: a client drops what it has fetched
        ahead of a paused partition and fetches it again."""
        depth = len(self._ledger)
        self._counters.waiting(depth)
        if not self._paused and depth >= self._most:
            self._paused = True
            self._source.pause(self._ledger.partitions)
        elif self._paused and depth <= self._most // 2:
            self._paused = False
            self._source.resume(self._ledger.partitions)

    # Going back

    def _rewind(self, targets: dict[TopicPartition, int]) -> None:
        self._scoring.refill()
        self._source.seek(targets)

    # Callbacks of the source, inside `poll` and `close`

    def _assigned(self, partitions: Collection[TopicPartition]) -> None:
        self._ledger.assign(partitions)
        # What a client remembers of an earlier assignment is not to be trusted, in either
        # direction (confluent-kafka-go#193): the pause is ours.
        if self._paused:
            self._source.pause(partitions)
        else:
            self._source.resume(partitions)

    def _revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Publish what is finished, drop the rest before another member can have it.

        Nothing may be raised through the client. Whether the partitions were lost already does
        not matter: the broker refuses the offsets then.
        """
        try:
            if not (self._closing or self._deferred or self._patience.waiting):
                self._scoring.collect()
                self._publish(REVOKE_S)
        except Exception as error:
            self._deferred = error
        finally:
            self._ledger.revoke(partitions)
            self._counters.revoked(partitions)
            self._scoring.refill()

    def _raise_deferred(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            raise deferred

    # The end

    def _drain(self) -> None:
        """Finish and publish what the model has been given; the rest stays uncommitted.

        Polling goes on, for its callbacks, with everything paused.
        """
        deadline = self._clock() + self._drain_s
        self._paused = True
        self._scoring.close()
        if self._reloads is not None:
            self._reloads.close()
        self._source.pause(self._ledger.partitions)
        try:
            while self._clock() < deadline and self._publisher.ready:
                self._last_step = self._clock()
                for record in self._source.poll(1, 0.0):  # handed out: behind the position now
                    self._ledger.add(record, self._clock())
                self._raise_deferred()
                self._scoring.collect()
                self._publish(max(0.1, deadline - self._clock()))
                if not self._model.busy:
                    return
                self._model.wait(PAUSED_WAIT_S)
        except (AbortAndRewind, RebuildProducer) as error:
            self._log("drain", error)

    def _close(self) -> None:
        self._closing = True
        self._scoring.close()
        self._model.stop(MODEL_STOP_S)
        closing = threading.Thread(target=self._close_clients, name="processor-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            logger.warning("clients do not close, left behind", extra={"action": "close"})

    def _close_clients(self) -> None:
        for close in (self._publisher.close, self._source.close):
            try:
                close()
            except Exception as error:
                self._log("close", error)

    def _log(self, action: str, error: Exception) -> None:
        logger.warning("%s: %s", action, error, extra={"action": action})
