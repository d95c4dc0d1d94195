"""Parts of the model test: a clock, workers that move when they are told to, and an observer."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

from processor.broker import transaction
from processor.broker.memory import Call, MemoryBroker
from processor.broker.memory_log import PartitionLog
from processor.broker.transaction import TopicPartition
from processor.core.batch import Budget, MicroBatch
from processor.core.decision import Outcome, Scores
from processor.core.event import Record
from processor.core.pipeline import Pipeline
from processor.core.policy import Policy
from processor.errors import AbortAndRewind, ExitProcess, RebuildProducer, RetryCall, ShrinkOutput
from processor.runtime import publisher
from processor.runtime import worker as worker_module
from processor.runtime.model_thread import ModelThread
from processor.runtime.telemetry import Counters
from processor.runtime.worker import Limits, Worker
from tests.core.builders import CharTokenizer, LengthScorer, make_policy
from tests.runtime.world import DAMAGED, GROUP, coordinates, event, judged

INJECTED = "ordered by the test"
SINK_CALLS: list[Call] = ["init_transactions", "begin", "produce", "send_offsets", "commit"]
POISON = b'{"id": 1, "note": "boom"}'  # the model fails on it, and on nothing else
VALUES: list[bytes | None] = [event(1), event(2), event(3), POISON, None, DAMAGED[4][0]]

# Why a worker may end though nothing is wrong with the loop: the test has ordered it, another
# process has its place, or an open transaction holds what it needs. An illegal call or a record
# that does not come again is none of these.
LEGITIMATE = re.compile(
    rf"{INJECTED}"
    r"|FENCED_INSTANCE_ID"
    r"|publishing failed \d+ times in a row, last: "
    rf"({INJECTED}|not a member|UNKNOWN_MEMBER|ILLEGAL_GENERATION|PRODUCER_FENCED|\w+ did not end)"
    r"|cannot start transactions"
    r"|cannot read the committed offsets"
)


class Killed(BaseException):
    """Ends a worker where it stands, as kill -9 does."""


@dataclass
class Foreign:
    """A transaction of whoever writes the input."""

    id: str
    epoch: int


def faults() -> dict[str, tuple[list[Call], Callable[[], BaseException]]]:
    """By kind: the calls that can fail in this way, and the error."""
    every: list[Call] = [*SINK_CALLS, "abort"]
    return {
        "retry": ([*every, "committed"], lambda: RetryCall(INJECTED)),
        "abort": (every[1:], lambda: AbortAndRewind(INJECTED)),
        "rebuild": (every, lambda: RebuildProducer(INJECTED)),
        "shrink": (["produce", "commit"], lambda: ShrinkOutput(INJECTED, "out")),
        "kill": ([*every, "poll", "committed", "seek"], Killed),
        "exit": ([*every, "poll", "committed", "seek"], lambda: ExitProcess(INJECTED)),
    }


FAULTS = faults()


class Tick:
    """A clock that moves a little with every look: loops that wait for a deadline end."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Scorer(LengthScorer):
    def score(self, batch: MicroBatch) -> list[Scores]:
        if any("boom" in "".join(map(chr, s.token_ids)) for s in batch.suffixes):
            raise RuntimeError("poison")
        return super().score(batch)


class ManualModel(ModelThread):
    """The model's thread without the thread: taking a batch and scoring it are moves of their
    own, so that whatever the other thread does can happen in between."""

    helps = False  # whether it works while the other thread waits for it

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> None:
        self._slot.clear()

    def wait(self, timeout_s: float) -> None:
        if isinstance(self._clock, Tick):
            self._clock.advance(timeout_s)
        if self.helps:
            self.move()

    def move(self) -> None:
        if self._running:
            self._score(self._running)
        else:
            self._take()


def by_hand() -> ExitStack:
    """The loop without threads, waits and its log, until this is closed."""
    patches = ExitStack()
    settings = {"ModelThread": ManualModel, "IDLE_POLL_S": 0.0, "BUSY_POLL_S": 0.0}
    settings |= {"IN_FLIGHT": 4, "LARGEST_POLL": 500}
    for name, value in settings.items():
        patches.enter_context(patch.object(worker_module, name, value))
    for module in (transaction, publisher):
        patches.enter_context(patch.object(module, "RETRY_PAUSE_S", 0.0))
    for name in ("runtime.worker", "runtime.model_thread", "broker.start"):
        logger = logging.getLogger(f"processor.{name}")
        patches.enter_context(patch.object(logger, "disabled", True))
    return patches


@cache
def policy() -> Policy:
    with tempfile.TemporaryDirectory() as folder:
        return make_policy(Path(folder) / "policy")


class Runner:
    """A worker in the hands of the test. One that has ended takes no more steps."""

    def __init__(self, broker: MemoryBroker, name: str, static: bool, clock: Tick) -> None:
        self.name = name
        self.accounted: list[Record] = []
        self.alive, self.inside = True, False
        pipeline = Pipeline([policy()], CharTokenizer(), Scorer(), Budget(200, 2))
        self.worker = Worker(
            pipeline,
            broker.source(GROUP, name, ["in"], static=static),
            broker.sink(f"id-{name}"),
            Counters(),
            clock=clock,
            publish_s=5.0,
            on_outcome=self._account,
            limits=Limits(stall_s=1e9),
        )
        self.worker._source.open(self.worker._assigned, self.worker._revoked)

    @property
    def model(self) -> ManualModel:
        model = self.worker._model
        assert isinstance(model, ManualModel)
        return model

    def step(self, most: int = 500) -> None:
        """One round of the broker thread, or none where this worker is inside of a call already:
        another's call may be the moment at which this one moves."""
        if not self.alive or self.inside:
            return
        worker_module.LARGEST_POLL = most
        self._guard(self.worker._step)

    def round(self) -> None:
        """A step with the model at work: what is in flight comes nearer to its end."""
        self.step()
        if self.alive:
            for _ in range(4):
                self.model.move()

    def stop(self, in_time: bool) -> None:
        if self.alive and not self.inside:
            self.model.helps = in_time
            self._guard(self.worker._drain)
            self._close()

    def kill(self) -> None:
        if not self.inside:
            self.alive = False

    def _guard(self, move: Callable[[], None]) -> None:
        self.inside = True
        try:
            move()
        except Killed:
            self.alive = False
        except AssertionError:
            raise
        except Exception as error:
            if not (isinstance(error, ExitProcess) and LEGITIMATE.search(str(error))):
                raise AssertionError(f"model: ended by {error!r}") from error
            self._close()
        finally:
            self.inside = False

    def _close(self) -> None:
        """What `Worker._close` does, without its thread."""
        if self.alive:
            self.alive = False
            self.worker._closing = True
            self.model.stop(0)
            self.worker._publisher.close()
            self.worker._source.close()

    def _account(self, record: Record, outcome: Outcome) -> None:
        self.accounted.append(record)


class Observer:
    """Holds the laws while the run goes on, on everything that is committed: what an older open
    transaction still hides from read_committed readers will be seen as it stands now."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._version = -1
        self._about: dict[tuple[str, int, int], tuple[str, int, int]] = {}
        self._committed: dict[TopicPartition, int] = {}

    def check(self) -> None:
        if self._version == self._broker.version:
            return
        self._version = self._broker.version
        given = {coordinates(record) for record in self.records("in")}
        found: set[tuple[str, int, int]] = set()
        last: dict[tuple[TopicPartition, int], int] = {}
        for record in [*self.records("out"), *self.records("dead")]:
            about = self._outcome_of(record)
            assert about in given, f"model: an outcome for nothing, {about}"
            assert about not in found, f"model: two outcomes for {about}"
            found.add(about)
            lane = ((record.topic, record.partition), about[1])
            assert last.get(lane, -1) < about[2], f"model: out of order, {about}"
            last[lane] = about[2]
        self._check_offsets(given - found)

    def _check_offsets(self, missing: set[tuple[str, int, int]]) -> None:
        committed = self._broker.group(GROUP).committed
        for (topic, partition), offset in committed.items():
            lost = [m for m in missing if m[:2] == (topic, partition) and m[2] < offset]
            assert not lost, f"model: committed {offset}, no outcome for {min(lost)}"
            before = self._committed.get((topic, partition), 0)
            assert offset >= before, f"model: offsets went back from {before} to {offset}"
        self._committed = dict(committed)

    def _outcome_of(self, record: Record) -> tuple[str, int, int]:
        where = coordinates(record)
        if where not in self._about:
            self._about[where] = judged(record)
        return self._about[where]

    def drained(self) -> bool:
        partitions = self._broker.partitions(["in"])
        return all(
            (self._broker.committed(GROUP, *p) or 0) == self._broker.end_offset(*p)
            for p in partitions
        ) and not any(self._broker.unstable(GROUP, p) for p in partitions)

    def records(self, topic: str) -> Iterator[Record]:
        """All that are committed, deleted ones too."""
        for _, partition in self._broker.partitions([topic]):
            yield from committed_records(self._broker.log(topic, partition))


def committed_records(log: PartitionLog) -> Iterator[Record]:
    for entry in log.entries:
        final = entry.transaction is None or entry.transaction.state == "committed"
        if entry.record is not None and final:
            yield entry.record
