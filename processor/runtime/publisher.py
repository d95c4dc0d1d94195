"""Finished outcomes into transactions, and the account of what was published."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence

from processor.broker.transaction import (
    RETRY_PAUSE_S,
    Clock,
    RecordSource,
    State,
    TopicPartition,
    TransactionalSink,
    Transactions,
)
from processor.core.decision import Outcome
from processor.core.encode import OutputRecord
from processor.core.event import Record
from processor.core.pipeline import Pipeline
from processor.errors import ExitProcess, RebuildProducer, RetryCall, ShrinkOutput
from processor.runtime.circuit import Circuit
from processor.runtime.ledger import Finished, Ledger
from processor.runtime.telemetry import Counters

IDLE_COMMIT_S = 1.0

OnOutcome = Callable[[Record, Outcome], None]
Committed = dict[TopicPartition, int | None]


class Publisher:
    """Publishes what the ledger says is finished; each outcome is accounted for once, when it is
    known to be committed."""

    def __init__(
        self,
        pipeline: Pipeline,
        source: RecordSource,
        sink: TransactionalSink,
        ledger: Ledger,
        counters: Counters,
        on_outcome: OnOutcome | None,
        budget_s: float,
        clock: Clock,
        circuit: Circuit,
    ) -> None:
        self._pipeline = pipeline
        self._source = source
        self._ledger = ledger
        self._counters = counters
        self._on_outcome = on_outcome
        self._budget_s = budget_s
        self._clock = clock
        self._circuit = circuit
        self._sink = sink
        self._limits: dict[str, int] = {}  # of topics that took less than they said
        self._idle_at = clock() + IDLE_COMMIT_S
        self._transactions = Transactions(sink, source.group_metadata, budget_s, clock)
        self._uncertain: Finished | None = None  # published, or not: the commit did not say

    @property
    def ready(self) -> bool:
        return self._transactions.state is State.READY

    def start(self) -> Committed | None:
        """Make it ready: the first producer, or a new one for one that was lost. After a loss the
        committed offsets are returned: all lanes have to go back to them."""
        if self._transactions.state is State.NEW:
            self._transactions.start()
            return None
        self._counters.rebuilt()
        self._transactions.rebuild()
        # Only now are the committed offsets final: the new producer has ended what the old left.
        uncertain, self._uncertain = self._uncertain, None
        asked = self._ledger.partitions | (uncertain.offsets.keys() if uncertain else set())
        committed = self._committed(asked)
        # A commit that never answered, and turns out to have happened, is accounted for here.
        if uncertain and all(committed.get(p) == o for p, o in uncertain.offsets.items()):
            self._account(uncertain)
        return committed

    def publish(self, budget_s: float) -> bool:
        """One transaction with all that is finished; False where nothing is.

        Where nothing but positions has changed, at most one a second.
        """
        idle = not self._ledger.any_finished()
        if not self.ready or (idle and self._clock() < self._idle_at):
            return False
        self._idle_at = self._clock() + IDLE_COMMIT_S
        finished = self._ledger.finished(self._source.positions())
        if not finished.offsets:
            return False
        records = self._encode(finished)
        try:
            self._transactions.publish(records, finished.offsets, min(budget_s, self._budget_s))
        except ShrinkOutput as error:
            self._shrink(records, error.topic)
            raise
        except RebuildProducer:
            if self._transactions.in_doubt:
                self._uncertain = finished
            raise
        self._ledger.published(finished)
        self._account(finished)
        return True

    def close(self) -> None:
        self._transactions.close()

    def _encode(self, finished: Finished) -> list[OutputRecord]:
        records: list[OutputRecord] = []
        for entry in finished.entries:
            if entry.outcome is not None:
                entry.outcome, record = self._pipeline.encode(
                    entry.outcome, entry.record, self._max_bytes
                )
                if record is not None:
                    records.append(record)
        self._circuit.check(outcomes_of(finished))
        return records

    def _max_bytes(self, topic: str) -> int:
        return min(self._sink.max_bytes(topic), self._limits.get(topic, sys.maxsize))

    def _shrink(self, records: Sequence[OutputRecord], topic: str | None) -> None:
        """A topic takes less than we knew: less than the largest record that it was given. By how
        much, nobody says; a quarter less each time finds it soon, and what cannot be made shorter
        runs out of `Patience`."""
        given = [record for record in records if topic in (None, record.topic)]
        if given:
            largest = max(given, key=lambda record: record.size)
            self._limits[largest.topic] = largest.size * 3 // 4

    def _committed(self, partitions: Collection[TopicPartition]) -> Committed:
        deadline = self._clock() + self._budget_s
        while partitions:
            try:
                return self._source.committed(partitions, max(0.1, deadline - self._clock()))
            except RetryCall as error:
                if self._clock() >= deadline:
                    raise ExitProcess(f"cannot read the committed offsets: {error}") from error
                time.sleep(RETRY_PAUSE_S)
        return {}

    def _account(self, finished: Finished) -> None:
        outcomes = outcomes_of(finished)
        self._circuit.published(outcomes)
        self._counters.published(outcomes)
        if self._on_outcome is not None:
            for entry, outcome in zip(finished.entries, outcomes, strict=True):
                self._on_outcome(entry.record, outcome)


def outcomes_of(finished: Finished) -> list[Outcome]:
    return [entry.outcome for entry in finished.entries if entry.outcome is not None]
