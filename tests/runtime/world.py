"""A worker, a broker and a policy put together, and the judge of what came out."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processor.broker.memory import MemoryBroker
from processor.broker.transaction import RecordSource
from processor.core.batch import Budget, MicroBatch
from processor.core.decision import Outcome, Scores
from processor.core.event import Record
from processor.core.pipeline import Pipeline
from processor.core.policy import Policy
from processor.core.verify import Given, outcome_of, verify
from processor.runtime.telemetry import Counters
from processor.runtime.worker import Worker
from tests.core.builders import CharTokenizer, LengthScorer, make_policy

PATIENCE_S = 20.0
GROUP = "group"
ALL_IN_SLOT = 3  # polls: one brings eight records, and after each of two more four are tokenized

# What a producer may send, and the reason why it gets no decision.
DAMAGED: list[tuple[bytes | None, str]] = [
    (None, "tombstone"),
    (b"", "empty_payload"),
    (b"\xff\xfe", "byte_order_mark"),
    (b"\x80", "not_utf8"),
    (b"{", "not_json"),
    (b'{"id": "x"}', "schema"),
]


def event(n: int) -> bytes:
    return json.dumps({"id": n, "note": "x" * (n % 7)}).encode()


def inputs(count: int, damaged_every: int = 5) -> list[bytes | None]:
    """Events, with every so many a damaged one; 0: none."""
    return [
        DAMAGED[n // damaged_every % len(DAMAGED)][0]
        if damaged_every and n % damaged_every == 3
        else event(n)
        for n in range(count)
    ]


@dataclass
class GatedScorer(LengthScorer):
    """Scores only while its gate is open; says when it stands before it."""

    gate: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)

    def score(self, batch: MicroBatch) -> list[Scores]:
        self.waiting.set()
        assert self.gate.wait(PATIENCE_S)
        return super().score(batch)


@dataclass
class SlowScorer(LengthScorer):
    seconds: float = 0.002

    def score(self, batch: MicroBatch) -> list[Scores]:
        time.sleep(self.seconds)
        return super().score(batch)


@dataclass
class Running:
    """A worker in a thread of its own."""

    worker: Worker
    thread: threading.Thread
    errors: list[BaseException]

    def join(self) -> None:
        """Wait for its end; raises what `run` raised."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the worker does not end"
        if self.errors:
            raise self.errors[0]

    def stop(self) -> None:
        self.worker.stop()
        self.join()


def in_thread(worker: Worker, until: Callable[[], bool] | None = None) -> Running:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            worker.run(until)
        except BaseException as error:
            errors.append(error)

    running = Running(worker, threading.Thread(target=run, daemon=True), errors)
    running.thread.start()
    return running


def coordinates(record: Record) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset


def judged(record: Record) -> tuple[str, int, int]:
    """Which input record an output record is about."""
    found = outcome_of(record)
    return found.input_topic, found.input_partition, found.input_offset


def judge(given: list[Record], decisions: list[Record], dead: list[Record]) -> None:
    """Each input record has exactly one outcome, and outcomes keep their inputs' order."""
    outcomes = [outcome_of(record) for record in [*decisions, *dead]]
    for topic in {r.topic for r in given} | {o.input_topic for o in outcomes}:
        inputs = [Given(r.partition, r.offset) for r in given if r.topic == topic]
        ends = {item.partition: (0, item.offset + 1) for item in inputs}
        committed = {partition: end for partition, (_, end) in ends.items()}
        found = verify(topic, inputs, outcomes, committed, ends)
        assert found.clean, "\n".join(found.findings)
    values = {coordinates(record): record.value for record in given}
    assert all(record.value == values[judged(record)] for record in dead)


class World:
    def __init__(self, folder: Path, partitions: int = 2) -> None:
        self.policy: Policy = make_policy(folder)
        self.broker = MemoryBroker()
        self.partitions = partitions
        for topic, count in (("in", partitions), ("out", 1), ("dead", 1)):
            self.broker.create_topic(topic, count)
        self.seen: list[tuple[Record, Outcome]] = []
        self.counters = Counters()
        self._workers: list[Running] = []

    def fill(self, count: int = 60, damaged_every: int = 5) -> None:
        for n, value in enumerate(inputs(count, damaged_every)):
            self.broker.append("in", n % self.partitions, b"%d" % n, value)

    def worker(
        self,
        name: str = "a",
        scorer: LengthScorer | None = None,
        static: bool = True,
        **options: Any,
    ) -> Worker:
        tokenizer = options.pop("tokenizer", CharTokenizer())
        pipeline = Pipeline([self.policy], tokenizer, scorer or LengthScorer(), Budget(200, 4))
        default = self.broker.source(GROUP, name, ["in"], static=static)
        source: RecordSource = options.pop("source", default)
        sink = self.broker.sink(f"id-{name}")
        counters = options.pop("counters", self.counters)
        on_outcome = options.pop("on_outcome", lambda r, o: self.seen.append((r, o)))
        options.setdefault("publish_s", 5.0)
        return Worker(pipeline, source, sink, counters, on_outcome=on_outcome, **options)

    def start(self, worker: Worker, until: Callable[[], bool] | None = None) -> Running:
        running = in_thread(worker, until)
        self._workers.append(running)
        return running

    def run(self, worker: Worker | None = None) -> None:
        """Run until everything is committed."""
        self.start(worker or self.worker(), self.done).join()

    def done(self) -> bool:
        return self.committed() == self.ends()

    def committed(self) -> list[int | None]:
        return [self.broker.committed(GROUP, "in", p) for p in range(self.partitions)]

    def ends(self) -> list[int]:
        return [self.broker.end_offset("in", p) for p in range(self.partitions)]

    def verify(self) -> None:
        assert self.committed() == self.ends()
        judge(self.broker.read("in"), self.broker.read("out"), self.broker.read("dead"))

    def verify_observed(self, *others: Counters) -> None:
        """Each outcome was observed once, and the counters of all workers say the same."""
        seen = Counter(coordinates(record) for record, _ in self.seen)
        assert seen == Counter(coordinates(record) for record in self.broker.read("in"))
        snapshots = [counters.snapshot() for counters in (self.counters, *others)]
        assert sum(s.decisions for s in snapshots) == len(self.broker.read("out"))
        rejections = sum(sum(s.rejections.values()) for s in snapshots)
        assert rejections == len(self.broker.read("dead"))
        assert all(s.queue_depth == 0 for s in snapshots)

    def close(self) -> None:
        for running in self._workers:
            running.worker.stop()
        for running in self._workers:
            running.thread.join(PATIENCE_S)


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "this does not happen"
        time.sleep(0.002)


def finish_two(scorer: GatedScorer) -> None:
    """Inside a poll: two micro-batches finish, and nobody has collected them yet."""
    scorer.gate.set()
    await_(lambda: len(scorer.batches) == 2)
    time.sleep(0.05)  # the second one is on its way into the hands of the other thread
