"""Where a worker gives up, and what it does not give up for. Names begin with the row of public
failures that a test stands for; docs/delivery.md lists them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from processor.broker.memory_sink import MemorySink
from processor.broker.memory_source import MemorySource
from processor.broker.transaction import TopicPartition
from processor.core.batch import MicroBatch
from processor.core.decision import Scores
from processor.core.encode import REJECTION_HEADER
from processor.core.event import Record
from processor.errors import ExitProcess
from processor.runtime import progress, publisher, watchdog
from processor.runtime.model_thread import RETRIES
from processor.runtime.telemetry import Counters
from processor.runtime.watchdog import Watchdog
from processor.runtime.worker import Limits
from tests.core.builders import LengthScorer, make_policy
from tests.runtime.world import GROUP, GatedScorer, World, await_, event


@dataclass
class BrittleScorer(LengthScorer):
    """Fails on batches that `breaks` says; counts all attempts."""

    poison: str = "boom"
    attempts: int = 0

    def breaks(self, batch: MicroBatch) -> bool:
        return any(self.poison in "".join(map(chr, s.token_ids)) for s in batch.suffixes)

    def score(self, batch: MicroBatch) -> list[Scores]:
        self.attempts += 1
        if self.breaks(batch):
            raise RuntimeError("the kernel does not like it\nand says so at length")
        return super().score(batch)


def with_poison(world: World, at: Collection[int], count: int = 40) -> None:
    for n in range(count):
        value = b'{"id": 1, "note": "boom"}' if n in at else event(n)
        world.broker.append("in", n % world.partitions, b"%d" % n, value)


@pytest.mark.parametrize("at", [{0}, {17}, {39}, {5, 6, 30}])
def test_c16_a_poisoned_event_costs_its_own_rejection_only(world: World, at: set[int]) -> None:
    scorer = BrittleScorer()
    with_poison(world, at)
    world.run(world.worker(scorer=scorer))
    world.verify()
    assert len(world.broker.read("out")) == 40 - len(at)
    letters = world.broker.read("dead")
    assert sorted(int(r.key or b"") for r in letters) == sorted(at)
    assert all(b'"scorer_failed"' in (dict(r.headers)[REJECTION_HEADER] or b"") for r in letters)
    assert all(b"at length" not in (dict(r.headers)[REJECTION_HEADER] or b"") for r in letters)
    assert world.counters.snapshot().rejections == {"scorer_failed": len(at)}
    # The events of a batch of 4, the bisection of it, the retries and one control per poison.
    assert scorer.attempts <= 40 + len(at) * (2 * math.log2(4) + RETRIES + 2)


def test_c16_a_batch_that_only_fails_whole_is_scored_in_halves(world: World) -> None:
    """Out of memory: nobody is to blame."""

    class SmallMemory(BrittleScorer):
        def breaks(self, batch: MicroBatch) -> bool:
            return len(batch) > 1

    world.fill(40, damaged_every=0)
    world.run(world.worker(scorer=SmallMemory()))
    world.verify()
    assert len(world.broker.read("out")) == 40


def test_c16_an_event_that_fails_once_is_tried_again(world: World) -> None:
    class Moody(BrittleScorer):
        def breaks(self, batch: MicroBatch) -> bool:
            return self.attempts % 2 == 1

    world.fill(40, damaged_every=0)
    world.run(world.worker(scorer=Moody()))
    world.verify()
    assert len(world.broker.read("out")) == 40


def test_c15_nothing_but_rejections_stops_the_worker(world: World) -> None:
    for n in range(200):
        world.broker.append("in", n % 2, None, b"{" if n % 3 else b"")
    with pytest.raises(ExitProcess, match=r"rejected, \d+ of them for not_json: mend the cause"):
        world.run(world.worker(limits=Limits(rejections_in_row=50)))
    assert len(world.broker.read("dead")) <= 50


def test_c15_a_decision_in_between_ends_the_row(world: World) -> None:
    world.fill(200, damaged_every=2)
    world.run(world.worker(limits=Limits(rejections_in_row=1)))
    world.verify()


@pytest.mark.parametrize("known", [True, False])
def test_c11_a_worker_goes_on_past_outputs_that_are_too_large(
    world: World, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the topics' limits were known at the start, or show themselves one by one."""
    world.broker.max_bytes |= {"out": 1000, "dead": 2000}
    if not known:
        monkeypatch.setattr(MemorySink, "max_bytes", lambda *_: 10**9)
    for n in range(60):
        key, size = (b"k" * 900 if n % 20 == 7 else b"k"), 3000 if n % 20 == 11 else 1
        value = b'{"id": 1, "note": "%s"}' % (b"x" * 50) if size == 1 else b"{" * size
        world.broker.append("in", n % 2, key, value)
    world.run()
    assert world.done()
    sizes = world.counters.snapshot().rejections
    assert sizes["output_too_large"] >= 3
    assert len(world.broker.read("out")) + len(world.broker.read("dead")) == 60
    omitted = [r for r in world.broker.read("dead") if r.value is None]
    assert len(omitted) >= 3


def test_c13_a_dead_letter_topic_that_takes_nothing_stops_the_worker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("processor.runtime.patience.Patience.LONGEST_WAIT_S", 0.01)
    world.broker.max_bytes["dead"] = 100
    world.fill(20)
    with pytest.raises(ExitProcess, match="10 times in a row, last: MSG_SIZE_TOO_LARGE"):
        world.run()


def test_c1_skipped_tombstones_are_counted_and_committed(tmp_path: Path) -> None:
    world = World(tmp_path / "world")
    schema = {"schema": "event.json", "fields": ["id"], "tombstones": "skip"}
    world.policy = make_policy(tmp_path / "policy", event=schema)
    for n in range(20):
        world.broker.append("in", n % 2, b"k", None if n % 4 else event(n))
    world.run()
    assert world.done()
    assert (len(world.broker.read("out")), len(world.broker.read("dead"))) == (5, 0)
    assert world.counters.snapshot().tombstones == 15


def test_a11_a_call_that_never_returns_ends_the_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka#4420: the watchdog sees it, whichever call it is."""
    monkeypatch.setattr(watchdog, "EVERY_S", 0.01)
    stuck, released = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        released.wait(20)

    world.broker.faults.hook("begin", hang, skip=1)
    world.fill(40)
    worker = world.worker(limits=Limits(hang_s=0.3))
    reasons: list[str] = []
    dog = Watchdog(worker.hangs, reasons.append)
    world.start(worker, world.done)
    dog.start()
    assert stuck.wait(10)
    await_(lambda: bool(reasons))
    released.set()
    assert reasons[0].startswith("the broker thread has not come round for 0 s")
    await_(world.done)


def test_a11_a_model_that_hangs_is_named_with_its_records(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "EVERY_S", 0.01)
    scorer, reasons = GatedScorer(), list[str]()
    world.fill(2, damaged_every=0)
    worker = world.worker(scorer=scorer, limits=Limits(score_s=0.2))
    dog = Watchdog(worker.hangs, reasons.append)
    world.start(worker, world.done)
    dog.start()
    await_(lambda: bool(reasons))
    scorer.gate.set()
    assert "the model has not returned for" in reasons[0]
    assert "in[0]@0" in reasons[0]
    await_(world.done)


def test_a_worker_that_works_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "EVERY_S", 0.01)
    worker, reasons = world.worker(limits=Limits(hang_s=5, score_s=5)), list[str]()
    dog = Watchdog(worker.hangs, reasons.append)
    dog.start()
    world.fill(100)
    world.run(worker)
    dog.stop()
    assert reasons == []


class FrozenSource(MemorySource):
    """Stops fetching one partition in silence."""

    def _fetch(self, limit: int) -> list[Record]:
        frozen: TopicPartition = ("in", 1)
        self._paused.add(frozen)
        try:
            return super()._fetch(limit)
        finally:
            self._paused.discard(frozen)


def test_a29_a_partition_that_stands_still_ends_the_worker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """quix-streams#1124: one partition is fetched no more, and the process looks healthy."""
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    world.fill(20, damaged_every=0)
    source = FrozenSource(world.broker, GROUP, "a", frozenset(["in"]), True)
    monkeypatch.setattr(
        FrozenSource,
        "positions",
        lambda self: {p: at or 0 for p, at in self._positions.items()},
    )
    with pytest.raises(ExitProcess, match=r"in\[1\]: no record since offset 0 .* though 10 wait"):
        world.run(world.worker(source=source, limits=Limits(stall_s=0.2)))
    lag = world.counters.snapshot().lag
    assert lag["in", 1].records == 10


def test_b26_the_lag_of_a_drained_input_is_0_behind_markers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    monkeypatch.setattr(publisher, "IDLE_COMMIT_S", 0.01)
    world.broker.init_transactions("upstream")
    for n in range(5):
        world.broker.produce("upstream", 0, "in", b"%d" % n, event(n), ())
    world.broker.end_transaction("upstream", 0, "aborted")
    running = world.start(world.worker())
    await_(world.done)
    await_(lambda: {lag.records for lag in world.counters.snapshot().lag.values()} == {0})
    running.stop()
    assert world.broker.read("out") == []


def test_b27_what_an_open_transaction_hides_is_no_lag(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    world.fill(10, damaged_every=0)
    world.broker.init_transactions("upstream")
    for n in range(6):
        world.broker.produce("upstream", 0, "in", b"%d" % n, event(n), ())
    running = world.start(world.worker())
    await_(lambda: len(world.broker.read("out")) == 10)
    await_(lambda: sum(lag.unstable for lag in world.counters.snapshot().lag.values()) == 6)
    await_(lambda: all(lag.records == 0 for lag in world.counters.snapshot().lag.values()))
    running.stop()


def test_d3_each_partition_has_its_lag_at_one_worker_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    others = Counters()
    first = world.start(world.worker("a"))
    await_(lambda: len(world.counters.snapshot().lag) == 2)
    second = world.start(world.worker("b", counters=others))
    await_(lambda: len(others.snapshot().lag) == 1)
    mine, theirs = world.counters.snapshot().lag, others.snapshot().lag
    assert len(mine) == 1
    assert mine.keys() | theirs.keys() == {("in", 0), ("in", 1)}
    first.stop()
    second.stop()


def test_an_idle_worker_commits_once_and_then_rests(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "IDLE_COMMIT_S", 0.01)
    running = world.start(world.worker())
    await_(lambda: world.committed() == [0, 0])
    before = world.counters.snapshot().transactions
    time.sleep(0.2)
    running.stop()
    assert world.counters.snapshot().transactions == before == 1
