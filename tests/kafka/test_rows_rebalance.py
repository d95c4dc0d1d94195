"""Partitions that move, or should not. Names begin with the row of public failures that a test
stands for; docs/delivery.md lists them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from processor.runtime.worker import IN_FLIGHT
from tests.kafka.admin import Operator
from tests.kafka.conftest import Worlds
from tests.kafka.faults import Load
from tests.kafka.harness import KafkaHarness
from tests.kafka.members import CONSUMER, DYNAMIC, HeldScorer, WatchedSource
from tests.kafka.world import PATIENCE_S, KafkaWorld, await_
from tests.runtime.world import Running, SlowScorer, judge

pytestmark = pytest.mark.kafka


@pytest.fixture
def world(harness: KafkaHarness, tmp_path: Path) -> Iterator[KafkaWorld]:
    world = KafkaWorld(harness, tmp_path)
    yield world
    world.close()


def watched(world: KafkaWorld, replica: str, **changes: object) -> WatchedSource:
    return WatchedSource(world.settings(replica, **changes), [world.input])


def start(world: KafkaWorld, replica: str, **options: Any) -> tuple[WatchedSource, Running]:
    source = watched(world, replica, **DYNAMIC)
    return source, world.start(world.worker(replica, source=source, changes=DYNAMIC, **options))


def await_share(sources: list[WatchedSource], partitions: int) -> None:
    """Until all partitions are with them, and each of them has some."""

    def shared() -> bool:
        shares = [len(source.assignment()) for source in sources]
        return sum(shares) == partitions and min(shares) > 0

    await_(shared, lambda: f"the shares are {[len(s.assignment()) for s in sources]}")


def test_a16_a_rebalance_that_leaves_our_partitions_alone(world: KafkaWorld) -> None:
    """KAFKA-9741: metadata kept from the assignment is of an earlier generation by then."""
    scorer = HeldScorer()
    (first, held), (second, other) = start(world, "0", scorer=scorer), start(world, "1")
    await_share([first, second], world.partitions)
    world.fill(40)
    scorer.gate.await_reached()
    mine = first.assignment()
    third, idle = start(world, "2")
    # Each rebalance is told, to those who get nothing by it too.
    await_(lambda: third.given != [] and first.given[-1] == [], lambda: "no rebalance")
    scorer.gate.open()
    world.await_all()
    assert first.assignment() == mine
    for running in (held, other, idle):
        running.stop()
    world.verify()
    assert held.worker._counters.snapshot().aborts == 0


def test_assigned_and_revoked_within_one_call(world: KafkaWorld) -> None:
    """A client's call that a callback makes can spoil the next callback: the process aborts."""
    source = watched(world, "0", **DYNAMIC)
    source.open(lambda _: None, lambda _: None)
    operator = Operator(world.harness)
    await_(lambda: operator.group_state(world.group) == "STABLE", lambda: "it does not join")
    source.close()
    assert source.given == source.taken == [[(world.input, 0), (world.input, 1)]]


def test_a18_commits_while_members_join_and_leave(world: KafkaWorld) -> None:
    """librdkafka#4059: a commit that met a rebalance cost the assignment."""
    first, running = start(world, "0")
    with Load(world):
        world.await_progress()
        for _ in range(8):
            second, guest = start(world, "1")
            await_share([first, second], world.partitions)
            guest.stop()
            await_share([first], world.partitions)
        world.await_progress()
    world.await_end()
    running.stop()
    world.verify()


@pytest.mark.parametrize("protocol", [DYNAMIC, CONSUMER], ids=["a19_classic", "a31_consumer"])
def test_a19_scoring_takes_longer_than_the_poll_interval(
    world: KafkaWorld, protocol: dict[str, object]
) -> None:
    """confluent-kafka-python#552: expelled for being slow, begun again, expelled again."""
    interval = {"max_poll_interval_ms": 4000, "session_timeout_ms": 3000, "publish_timeout_ms": 900}
    changes = protocol | interval
    world.fill(1, damaged_every=0)
    source = watched(world, "0", **changes)
    scorer = SlowScorer(seconds=3 * 4)
    running = world.start(world.worker(source=source, scorer=scorer, changes=changes))
    world.await_all()
    running.stop()
    world.verify()
    assert len(source.given) == 1
    assert source.taken == [source.given[0]]  # when it left
    assert len(scorer.batches) == 1


def test_a22_one_of_three_stops(worlds: Worlds) -> None:
    """librdkafka#3306: rounds and rounds of revocations, and partitions that nobody reads."""
    world = worlds(partitions=6)
    started = [start(world, str(n)) for n in range(3)]
    sources = [source for source, _ in started]
    with Load(world):
        await_share(sources, world.partitions)
        rounds = [len(source.given) for source in sources]
        begun = time.monotonic()
        started[2][1].stop()
        await_share(sources[:2], world.partitions)
        print(f"all partitions are read again after {time.monotonic() - begun:.1f} s")
        before = world.committed()
        await_(
            lambda: all(now > then for now, then in zip(world.committed(), before, strict=True)),
            lambda: f"{world.committed()} after {before}",
        )
        assert all(len(s.given) - n <= 3 for s, n in zip(sources[:2], rounds[:2], strict=True))
    world.await_end()
    for _, running in started[:2]:
        running.stop()
    world.verify()


def test_a23_a_first_start_at_a_time(harness: KafkaHarness, worlds: Worlds) -> None:
    """confluent-kafka-python#1669: seeks in the callback of a cooperative assignment. One
    partition has records before and after, one before only, one none at all."""
    world = worlds(partitions=3)
    for partition in (0, 1):
        for n in range(10):
            harness.append_later(world.input, partition, b"early", b'{"id": %d}' % n)
    harness.flush()
    time.sleep(0.1)
    moment = datetime.now(UTC)
    for n in range(10):
        harness.append_later(world.input, 0, b"late", b'{"id": %d}' % n)
    harness.flush()
    changes = DYNAMIC | {"first_start": moment.isoformat()}
    running = world.start(world.worker(changes=changes))
    world.await_outcomes(10)
    world.await_end()
    running.stop()
    given = [record for record in harness.read(world.input) if record.key == b"late"]
    judge(given, harness.read(world.output), harness.read(world.dead))


def test_a27_a_paused_partition_moves_away_and_back(world: KafkaWorld) -> None:
    """confluent-kafka-go#193: it came back paused, or was read on although too much waited."""
    scorer = HeldScorer()
    world.fill(4 * IN_FLIGHT * 8, damaged_every=0)
    first, running = start(world, "0", scorer=scorer)
    assert first.paused.wait(PATIENCE_S)
    second, guest = start(world, "1", scorer=HeldScorer(), drain_s=0.5)
    await_share([first, second], world.partitions)
    guest.worker.stop()  # its model is held, so it has published nothing
    await_share([first], world.partitions)
    depth = running.worker._counters.snapshot().queue_depth
    assert depth <= IN_FLIGHT * 8
    scorer.gate.open()
    world.await_all()
    running.stop()
    world.verify()
