"""The loop in trouble: every record still has exactly one outcome, in order."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from processor.broker.memory import Call
from processor.broker.memory_source import MemorySource
from processor.broker.transaction import Offsets
from processor.errors import AbortAndRewind, ExitProcess, RebuildProducer, RetryCall
from processor.runtime.patience import Patience
from processor.runtime.telemetry import Counters
from tests.core.builders import LengthScorer
from tests.runtime.world import (
    ALL_IN_SLOT,
    GROUP,
    GatedScorer,
    Running,
    SlowScorer,
    World,
    await_,
    finish_two,
)

CALLS: list[Call] = ["init_transactions", "begin", "produce", "send_offsets", "commit"]
PUBLISH_CALLS = CALLS[1:]


class Killed(BaseException):
    """Ends a worker where it stands, as kill -9 does: a static member's close tells nobody."""


@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("call", [*CALLS, "abort", "committed"])
def test_a6_a_time_out_is_called_again(world: World, call: Call, applied: bool, skip: int) -> None:
    skip = 0 if call in ("init_transactions", "abort", "committed") else skip
    faults = world.broker.faults
    if call == "abort":
        faults.push("send_offsets", AbortAndRewind("for an abort"))
    elif call == "committed":
        faults.push("commit", RebuildProducer("for a look at the offsets"))
    for n in range(3):
        faults.push(call, RetryCall("timed out"), applied=applied, skip=0 if n else skip)
    world.fill()
    world.run()
    world.verify()
    world.verify_observed()
    assert faults.pending() == 0
    assert world.counters.snapshot().aborts == (1 if call == "abort" else 0)


@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize("call", PUBLISH_CALLS)
def test_an_abortable_error_aborts_and_repeats(world: World, call: Call, skip: int) -> None:
    world.broker.faults.push(call, AbortAndRewind("no"), skip=skip)
    world.fill()
    world.run()
    world.verify()
    world.verify_observed()
    snapshot = world.counters.snapshot()
    assert (snapshot.aborts, snapshot.rebuilds) == (1, 0)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize("call", CALLS)
def test_a5_a_lost_producer_is_rebuilt(world: World, call: Call, skip: int, applied: bool) -> None:
    skip = 0 if call == "init_transactions" else skip
    world.broker.faults.push(call, RebuildProducer("lost"), skip=skip, applied=applied)
    world.fill()
    world.run()
    world.verify()
    world.verify_observed()
    snapshot = world.counters.snapshot()
    assert (snapshot.aborts, snapshot.rebuilds) == (0, 1)


@pytest.mark.parametrize("error", [AbortAndRewind("no"), RebuildProducer("lost")])
def test_an_abort_that_fails_rebuilds(world: World, error: Exception) -> None:
    world.broker.faults.push("commit", AbortAndRewind("no"))
    world.broker.faults.push("abort", error)
    world.fill()
    world.run()
    world.verify()
    world.verify_observed()
    assert world.counters.snapshot().rebuilds == 1


@pytest.mark.parametrize("applied", [True, False])
def test_a7_a_commit_that_never_answers_is_looked_up(world: World, applied: bool) -> None:
    """librdkafka#4558: the first commit took effect, or not; nobody may guess."""
    for _ in range(200):
        world.broker.faults.push("commit", RetryCall("timed out"), applied=applied)
    world.fill()
    running = world.start(world.worker(publish_s=0.05), world.done)
    await_(lambda: world.counters.snapshot().rebuilds > 0)
    world.broker.faults.clear()
    running.join()
    world.verify()
    world.verify_observed()


@pytest.mark.parametrize("error", [ExitProcess("denied"), ValueError("of no known kind")])
@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("call", [*CALLS, "poll"])
def test_other_errors_exit_and_the_next_process_goes_on(
    world: World, call: Call, applied: bool, error: Exception
) -> None:
    skip = 0 if call == "init_transactions" else 2
    world.broker.faults.push(call, error, applied=applied, skip=skip)
    world.fill()
    with pytest.raises(type(error), match=str(error)):
        world.run()
    world.run(world.worker())
    world.verify()


@pytest.mark.parametrize("skip", [0, 4])
@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("call", [*CALLS, "poll"])
def test_a_killed_worker_is_succeeded(world: World, call: Call, applied: bool, skip: int) -> None:
    skip = 0 if call == "init_transactions" else skip
    world.broker.faults.push(call, Killed(), applied=applied, skip=skip)
    world.fill()
    with pytest.raises(Killed):
        world.run()
    world.run(world.worker())  # the same transactional id and instance id
    world.verify()


def test_a3_a_twin_with_our_id_fences_us_and_we_take_it_back(world: World) -> None:
    for call in PUBLISH_CALLS:
        world.broker.faults.hook(call, lambda: world.broker.time_out("id-a"), skip=1)
    world.fill(120)
    world.run()
    world.verify()
    world.verify_observed()
    assert world.counters.snapshot().rebuilds == len(PUBLISH_CALLS)


@pytest.mark.parametrize("call", [*PUBLISH_CALLS, "poll"])
def test_expelled_in_the_middle(world: World, call: Call) -> None:
    """A session that ends while we publish: the offsets are refused, all is done again."""
    world.broker.faults.hook(call, lambda: world.broker.expel(GROUP, "a"), skip=3)
    world.fill(120)
    world.run()
    world.verify()
    world.verify_observed()


def test_a14_expelled_while_the_model_works_and_another_takes_over(world: World) -> None:
    """The late results of an eviction must not be published (faust#323)."""
    gated = GatedScorer()
    world.fill()
    first = world.start(world.worker("a", gated))
    assert gated.waiting.wait(5)
    world.broker.faults.hook("poll", lambda: world.broker.expel(GROUP, "a"))
    others = Counters()
    second = world.start(world.worker("b", counters=others))
    await_(lambda: len(set(world.broker.group(GROUP).owners.values())) == 2)
    gated.gate.set()
    await_(world.done)
    first.stop()
    second.stop()
    world.verify()
    world.verify_observed(others)


def test_two_workers_share_the_group_and_one_leaves(world: World) -> None:
    world.fill(400)
    slow = SlowScorer(seconds=0.02)  # its share lasts until the other has joined
    first = world.start(world.worker("a", slow, static=False))
    await_(lambda: len(world.broker.read("out")) > 10)
    second_counters = Counters()
    second = world.start(world.worker("b", SlowScorer(), static=False, counters=second_counters))
    await_(lambda: second_counters.snapshot().decisions > 10)
    slow.seconds = 0.002
    world.fill(200)
    first.stop()
    await_(world.done)
    second.stop()
    world.verify()
    assert second_counters.snapshot().decisions < len(world.broker.read("out"))


@pytest.mark.parametrize("error", [AbortAndRewind("no"), RebuildProducer("lost")])
def test_publishing_that_fails_inside_a_revocation(world: World, error: Exception) -> None:
    gated = GatedScorer()
    world.fill(40)
    others = Counters()
    first = world.start(world.worker("a", gated))
    assert gated.waiting.wait(5)
    world.broker.faults.push("commit", error)
    second = world.start(world.worker("b", counters=others))
    await_(lambda: len(set(world.broker.group(GROUP).owners.values())) == 2)
    gated.gate.set()
    await_(world.done)
    first.stop()
    second.stop()
    world.verify()
    world.verify_observed(others)


@pytest.mark.parametrize("error", [None, AbortAndRewind("no"), RebuildProducer("lost")])
def test_what_is_finished_is_published_before_it_is_given_away(
    world: World, error: Exception | None
) -> None:
    mine, others, theirs = GatedScorer(), Counters(), LengthScorer()
    world.fill(8, damaged_every=0)
    started: list[Running] = []

    def rebalance() -> None:
        finish_two(mine)
        assert world.broker.read("out") == []
        if error is not None:
            world.broker.faults.push("commit", error)
        started.append(world.start(world.worker("b", theirs, counters=others)))
        await_(lambda: len(world.broker.group(GROUP).members) == 2)

    world.broker.faults.hook("poll", rebalance, skip=ALL_IN_SLOT)
    first = world.start(world.worker("a", mine))
    await_(lambda: world.done() and bool(started))
    await_(lambda: len(set(world.broker.group(GROUP).owners.values())) == 2)
    first.stop()
    started[0].stop()
    world.verify()
    world.verify_observed(others)
    assert sum(map(len, theirs.batches)) == (0 if error is None else 4)


def test_a17_expelled_with_results_in_hand(world: World) -> None:
    """One poll says that all is lost, joins again and brings the first records of the new
    assignment; the refused publication of the old one must not cost them."""
    scorer = GatedScorer()
    world.fill(8, damaged_every=0)

    def expel() -> None:
        finish_two(scorer)
        world.broker.expel(GROUP, "a")

    world.broker.faults.hook("poll", expel, skip=ALL_IN_SLOT)
    world.run(world.worker(scorer=scorer))
    world.verify()
    world.verify_observed()
    assert world.counters.snapshot().aborts == 1


@pytest.mark.parametrize("error", [ExitProcess("denied"), ValueError("of no known kind")])
def test_other_errors_inside_a_revocation_exit_too(world: World, error: Exception) -> None:
    scorer = GatedScorer()
    world.fill(8, damaged_every=0)

    def rebalance() -> None:
        finish_two(scorer)
        world.broker.faults.push("begin", error)
        # The rebalance comes from the other's join, so that this member may still publish.
        other = world.broker.source(GROUP, "b", ["in"])
        other.open(lambda _: None, lambda _: None)
        other.poll(1, 0)

    world.broker.faults.hook("poll", rebalance, skip=ALL_IN_SLOT)
    with pytest.raises(type(error), match=str(error)):
        world.run(world.worker(scorer=scorer))
    assert world.broker.read("out") == []


def test_trouble_that_stays_ends_the_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(Patience, "LONGEST_WAIT_S", 0.01)
    for _ in range(Patience.LIMIT):
        world.broker.faults.push("produce", AbortAndRewind("too large"))
    world.fill()
    with pytest.raises(ExitProcess, match="10 times in a row, last: too large"):
        world.run()
    assert world.broker.read("out") == []


def test_a_start_without_an_answer_ends_the_process(world: World) -> None:
    for _ in range(100):
        world.broker.faults.push("init_transactions", RetryCall("timed out"))
    with pytest.raises(ExitProcess, match="cannot start transactions"):
        world.start(world.worker(publish_s=0.05)).join()


class ForgetfulSource(MemorySource):
    """Goes back to the record after the one that it is told."""

    def seek(self, offsets: Offsets) -> None:
        super().seek({partition: offset + 1 for partition, offset in offsets.items()})


def test_a25_a_rewind_that_loses_records_is_noticed(world: World) -> None:
    """confluent-kafka-python#1443: the client skips what it was told to fetch again."""
    source = ForgetfulSource(world.broker, GROUP, "a", frozenset(["in"]), True, "earliest")
    world.broker.faults.push("commit", AbortAndRewind("no"))
    world.fill(damaged_every=0)
    with pytest.raises(ExitProcess, match="records are missing"):
        world.run(world.worker(source=source))


@pytest.mark.parametrize("seed", range(20))
def test_soak(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trouble at random moments, two workers, restarts. Seeded."""
    monkeypatch.setattr(Patience, "FIRST_WAIT_S", 0.001)
    world, chance = World(tmp_path, partitions=3), random.Random(seed)
    calls: list[Call] = [*PUBLISH_CALLS, "poll", "abort", "init_transactions"]
    kinds = [RetryCall, RetryCall, AbortAndRewind, RebuildProducer, Killed]
    for _ in range(25):
        call = chance.choice(calls)
        kind = Killed if call == "poll" else chance.choice(kinds)
        kind = RebuildProducer if kind is AbortAndRewind and call == "init_transactions" else kind
        applied = chance.random() < 0.5 and kind is not AbortAndRewind
        world.broker.faults.push(call, kind("soak"), applied=applied, skip=chance.randrange(6))
        expelled = partial(world.broker.expel, GROUP, chance.choice("ab"))
        world.broker.faults.hook("poll", expelled, skip=5)
    world.fill(150)
    workers = {name: world.start(world.worker(name, SlowScorer(seconds=0.001))) for name in "ab"}
    while not world.done():
        for name, running in workers.items():
            running.thread.join(0.005)
            if not running.thread.is_alive():
                assert all(isinstance(e, Killed | ExitProcess) for e in running.errors)
                workers[name] = world.start(world.worker(name, SlowScorer(seconds=0.001)))
        if chance.random() < 0.02:
            world.broker.time_out(f"id-{chance.choice('ab')}")
    world.close()
    for name in "ab":  # a worker that stops without a producer leaves its transaction open
        world.broker.time_out(f"id-{name}")
    world.verify()


def test_what_another_process_published_is_not_accounted_for_here(world: World) -> None:
    """A producer that is lost before its commit has published nothing, wherever the group is."""

    def overtaken() -> None:
        world.broker.group(GROUP).committed |= {
            ("in", p): end for p, end in enumerate(world.ends())
        }

    world.fill(8, damaged_every=0)
    world.broker.faults.push("send_offsets", RebuildProducer("fenced"), hook=overtaken)
    world.run()
    assert world.broker.read("out") == []
    assert world.seen == []
    assert world.counters.snapshot().decisions == 0
