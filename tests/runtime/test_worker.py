"""The loop over the in-process broker, without trouble: order, load, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from processor.broker.memory_source import MemorySource
from processor.core.batch import MicroBatch
from processor.core.decision import Decision, Scores
from processor.core.event import Record
from processor.errors import ExitProcess
from processor.runtime.telemetry import Counters
from processor.runtime.worker import install_signal_handlers
from tests.core.builders import LengthScorer
from tests.runtime.world import (
    ALL_IN_SLOT,
    DAMAGED,
    GROUP,
    GatedScorer,
    SlowScorer,
    World,
    await_,
    event,
    finish_two,
    judged,
)


def test_every_record_gets_one_outcome(world: World) -> None:
    world.fill(100)
    world.run()
    world.verify()
    world.verify_observed()
    snapshot = world.counters.snapshot()
    assert snapshot.records == 100
    assert (snapshot.aborts, snapshot.rebuilds) == (0, 0)
    assert set(snapshot.rejections) == {reason for _, reason in DAMAGED}
    assert snapshot.decisions_by_policy == {"orders": snapshot.decisions}
    assert sum(snapshot.decisions_by_label.values()) == snapshot.decisions
    assert snapshot.tokens_saved == 7 * snapshot.decisions
    assert snapshot.tokens_computed == sum(
        o.suffix_tokens for _, o in world.seen if isinstance(o, Decision)
    )


def test_only_damaged_records_need_no_model(world: World) -> None:
    for value, _ in DAMAGED:
        world.broker.append("in", 0, None, value)
    world.broker.append("in", 1, None, None)
    world.run()
    world.verify()
    assert world.counters.snapshot().micro_batches == 0


def test_a_rejection_waits_for_the_events_before_it(world: World) -> None:
    scorer = GatedScorer()
    world.broker.append("in", 0, None, event(1))
    world.broker.append("in", 0, None, None)
    world.broker.append("in", 1, None, None)
    running = world.start(world.worker(scorer=scorer), world.done)
    assert scorer.waiting.wait(5)
    await_(lambda: world.committed() == [None, 1])  # the other partition goes on
    assert [judged(r)[1] for r in world.broker.read("dead")] == [1]
    scorer.gate.set()
    running.join()
    world.verify()


def test_b33_control_markers_in_the_input_are_stepped_over(world: World) -> None:
    sink = world.broker.sink("upstream")
    sink.init_transactions(1)
    for n, end in enumerate([sink.commit, sink.abort] * 6):
        sink.begin()
        for partition in (0, 1):
            world.broker.produce("upstream", 0, "in", b"%d" % (n + partition), event(n), ())
        end(1)
    given = world.broker.read("in")
    assert len(given) == 12
    running = world.start(world.worker())
    await_(world.done)  # committed up to the ends, though these are markers
    running.stop()
    assert len(world.broker.read("out")) == len(given)


def test_batches_fill_up_under_load_and_go_at_once_without(world: World) -> None:
    scorer = GatedScorer()
    world.broker.append("in", 0, None, event(0))
    running = world.start(world.worker(scorer=scorer), world.done)
    assert scorer.waiting.wait(5)  # the first goes alone, nobody waits for company
    for n in range(9):
        world.broker.append("in", n % 2, None, event(n))
        time.sleep(0.005)
    await_(lambda: world.counters.snapshot().records == 10)
    scorer.gate.set()
    running.join()
    world.verify()
    assert [len(batch) for batch in scorer.batches] == [1, 4, 4, 1]


def test_one_transaction_takes_all_that_has_finished(world: World) -> None:
    scorer = GatedScorer()
    world.fill(8, damaged_every=0)
    world.broker.faults.hook("poll", lambda: finish_two(scorer), skip=ALL_IN_SLOT)
    world.run(world.worker(scorer=scorer))
    world.verify()
    snapshot = world.counters.snapshot()
    assert snapshot.micro_batches == 2
    assert snapshot.transactions == 1


class CountingSource(MemorySource):
    polls = 0

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        self.polls += 1
        return super().poll(max_records, timeout_s)


def test_back_pressure_pauses_and_polls_on(world: World) -> None:
    scorer = GatedScorer()
    world.fill(400, damaged_every=0)
    source = CountingSource(world.broker, GROUP, "a", frozenset(["in"]), True, "earliest")
    running = world.start(world.worker(scorer=scorer, source=source), world.done)
    await_(lambda: world.counters.snapshot().queue_depth >= 32)
    polls = source.polls
    await_(lambda: source.polls > polls + 5)
    assert world.counters.snapshot().queue_depth == 32
    assert world.counters.snapshot().records == 32
    scorer.gate.set()
    running.join()
    world.verify()


def test_a27_a_partition_that_comes_while_paused_is_paused_and_goes_on_later(world: World) -> None:
    """confluent-kafka-go#193: pause, revoke, assign must not stay paused for ever."""
    scorer = GatedScorer()
    world.fill(400)
    running = world.start(world.worker("a", scorer), world.done)
    await_(lambda: world.counters.snapshot().queue_depth >= 32)
    other = world.start(world.worker("b", GatedScorer(), counters=Counters(), drain_s=0.1))
    await_(lambda: len({*world.broker.group(GROUP).owners.values()}) == 2)
    other.stop()
    world.broker.expel(GROUP, "b")
    await_(lambda: len({*world.broker.group(GROUP).owners.values()}) == 1)
    time.sleep(0.05)
    assert world.counters.snapshot().queue_depth <= 32
    scorer.gate.set()
    running.join()
    world.verify()


def test_stop_finishes_what_the_model_has_and_leaves_the_rest(world: World) -> None:
    scorer = GatedScorer()
    world.fill(200, damaged_every=0)
    running = world.start(world.worker(scorer=scorer))
    await_(lambda: world.counters.snapshot().queue_depth >= 32)
    running.worker.stop()
    time.sleep(0.1)
    scorer.gate.set()
    running.join()
    done = len(world.broker.read("out"))
    assert done == 12  # one micro-batch in the model, two in the slot
    assert sum(c or 0 for c in world.committed()) == done
    world.run(world.worker())
    world.verify()


def test_stop_ends_when_its_budget_is_spent(world: World) -> None:
    scorer = GatedScorer()
    world.fill(8, damaged_every=0)
    running = world.start(world.worker(scorer=scorer, drain_s=0.1))
    assert scorer.waiting.wait(5)
    begun = time.monotonic()
    running.worker.stop()
    await_(lambda: world.broker.group(GROUP).members != {} and running.worker.stopping)
    time.sleep(0.2)
    scorer.gate.set()  # too late to be published
    running.join()
    assert time.monotonic() - begun < 2
    assert world.broker.read("out") == []
    assert world.committed() == [None, None]


def test_a_stop_before_anything_came_is_quick(world: World) -> None:
    running = world.start(world.worker())
    await_(lambda: bool(world.broker.group(GROUP).owners))
    begun = time.monotonic()
    running.stop()
    assert time.monotonic() - begun < 1


class FailingScorer(LengthScorer):
    def score(self, batch: MicroBatch) -> list[Scores]:
        raise RuntimeError("out of memory")


class ShortScorer(LengthScorer):
    def score(self, batch: MicroBatch) -> list[Scores]:
        return super().score(batch)[1:]


@pytest.mark.parametrize(
    ("scorer", "message"),
    [(FailingScorer(), "out of memory"), (ShortScorer(), "0 scores for 1 events")],
)
def test_a_scorer_that_fails_ends_the_worker_at_once(
    world: World, scorer: LengthScorer, message: str
) -> None:
    world.fill(100, damaged_every=0)
    begun = time.monotonic()
    with pytest.raises(ExitProcess, match=message):
        world.start(world.worker(scorer=scorer)).join()
    assert time.monotonic() - begun < 2
    assert world.broker.read("out") == []
    assert world.committed() == [None, None]
    world.run()
    world.verify()


def test_an_observer_that_raises_ends_the_worker(world: World) -> None:
    def observe(*_: Any) -> None:
        raise KeyError("observer")

    world.fill(10)
    with pytest.raises(KeyError, match="observer"):
        world.start(world.worker(on_outcome=observe)).join()
    world.run()
    world.verify()


def test_sigterm_drains(world: World) -> None:
    """In the main thread, as the command line runs it."""
    world.fill(400, damaged_every=0)
    worker = world.worker(scorer=SlowScorer())
    restore = install_signal_handlers(worker)
    sent = False

    def until() -> bool:
        nonlocal sent
        if not sent and world.counters.snapshot().decisions > 20:
            sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    try:
        worker.run(until)
    finally:
        restore()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    published = len(world.broker.read("out"))
    assert 20 < published < 400
    assert sum(c or 0 for c in world.committed()) == published
    world.run(world.worker())
    world.verify()


STUBBORN = """
import os, signal, sys, time
from processor.runtime.worker import install_signal_handlers
class Worker:
    stopping = False
    def stop(self): self.stopping = True
install_signal_handlers(Worker())
os.kill(os.getpid(), signal.SIGINT)
print("still here", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(10)
"""


def test_a_second_signal_exits_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "still here\n")
