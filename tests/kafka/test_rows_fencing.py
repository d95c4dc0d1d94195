"""Transactions and who may commit them, while members come, go, stand still and die. Names begin
with the row of public failures that a test stands for; docs/delivery.md lists them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from processor.errors import AbortAndRewind, BrokerError, RebuildProducer
from tests.kafka.admin import Operator
from tests.kafka.conftest import Worlds
from tests.kafka.harness import KafkaHarness
from tests.kafka.members import (
    CONSUMER,
    DYNAMIC,
    EXPELLED_SOON,
    AbortingSink,
    FailingSink,
    Gate,
    HeldScorer,
    HeldSink,
    coordinates_of,
)
from tests.kafka.world import PATIENCE_S, KafkaWorld
from tests.runtime.world import SlowScorer

pytestmark = pytest.mark.kafka


@pytest.fixture
def world(harness: KafkaHarness, tmp_path: Path) -> Iterator[KafkaWorld]:
    world = KafkaWorld(harness, tmp_path)
    yield world
    world.close()


def test_a2_a_restart_waits_for_no_time_out(world: KafkaWorld) -> None:
    """redpanda#6423: a new transactional id each start, and the dead one's transaction hides
    offsets and outputs until it times out. Ours is stable."""
    changes = {"transaction_timeout_ms": 60_000}
    world.fill(200)
    first = world.process(changes, failpoint=("send_offsets", 2))
    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    before = world.outcomes()
    begun = time.monotonic()
    second = world.process(changes)
    world.await_outcomes(before + 1)
    took = time.monotonic() - begun
    print(f"first output {took:.1f} s after the restart")
    assert took < 15
    world.await_all()
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_S) == 0
    world.verify()


@pytest.mark.parametrize("changes", [DYNAMIC, CONSUMER], ids=["a14_classic", "a31_consumer"])
def test_a14_a_second_worker_joins_while_the_first_scores(
    world: KafkaWorld, changes: dict[str, object]
) -> None:
    """faust#323: what the first has begun of a partition that goes away is published by nobody
    but its new owner."""
    scorer = HeldScorer()
    world.fill(60)
    first = world.start(world.worker("0", scorer=scorer, changes=changes))
    scorer.gate.await_reached()
    second = world.start(world.worker("1", changes=changes))
    world.await_outcomes(30)
    scorer.gate.open()
    world.await_all()
    first.stop()
    second.stop()
    world.verify()
    mine = first.worker._counters.snapshot()
    assert mine.records > mine.decisions + sum(mine.rejections.values())


@pytest.mark.parametrize("changes", [{}, CONSUMER], ids=["a14_classic", "a31_consumer"])
def test_a14_offsets_of_a_member_that_was_replaced_are_refused(
    world: KafkaWorld, changes: dict[str, object]
) -> None:
    """Held between produce and its offsets until it is expelled, with metadata from before."""
    world.fill(60)
    sink = HeldSink(world.settings(**EXPELLED_SOON | changes))
    first = world.start(world.worker("0", sink=sink, changes=EXPELLED_SOON | changes))
    sink.gate.await_reached()
    second = world.start(world.worker("1", changes=DYNAMIC | changes))
    world.await_end()  # committed: the transaction that is open hides outputs
    sink.gate.open()
    world.await_all()
    first.stop()
    second.stop()
    world.verify()
    assert any(code in sink.refusals[0] for code in ("UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION"))
    assert first.worker._counters.snapshot().aborts >= 1


def test_a17_results_that_wait_while_their_member_is_expelled(world: KafkaWorld) -> None:
    """librdkafka PR#5604: partitions that were lost are reported as revoked. Results are finished
    and wait for the thread that is held."""
    gate = Gate()
    world.fill(100)
    worker = world.worker("0", changes=EXPELLED_SOON, on_outcome=gate.hold)
    first = world.start(worker)
    gate.await_reached()
    second = world.start(world.worker("1", changes=DYNAMIC))
    world.await_end()
    gate.open()
    world.fill(20)
    world.await_all()
    first.stop()
    second.stop()
    world.verify()
    mine, others = worker._counters.snapshot(), second.worker._counters.snapshot()
    assert mine.records + others.records > world.given  # some were begun by both


@pytest.mark.parametrize("error", [AbortAndRewind, RebuildProducer])
def test_a26_the_first_batch_of_a_new_group_fails(
    world: KafkaWorld, error: type[BrokerError]
) -> None:
    """KAFKA-9079: rewound to a committed offset that does not exist."""
    world.fill(50)
    sink = FailingSink(world.settings(), error, times=3)
    running = world.start(world.worker(sink=sink))
    world.await_all()
    running.stop()
    world.verify()
    assert sink.calls > 3


def test_a30_the_older_of_two_with_one_identity_ends(world: KafkaWorld) -> None:
    """PostHog#65809: fenced, and still running for ever without doing anything."""
    world.fill(300)
    first = world.process()
    world.await_outcomes(20)
    second = world.process()
    assert first.wait(PATIENCE_S) == 1
    world.await_all()
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_S) == 0
    world.verify()


def test_a31_killed_under_the_other_protocol(world: KafkaWorld) -> None:
    """A dynamic member: its partitions come back once its session has ended."""
    Operator(world.harness).configure("group", world.group, {"consumer.session.timeout.ms": 6000})
    world.fill(200)
    first = world.process(CONSUMER, failpoint=("send_offsets", 2))
    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    before = world.outcomes()
    begun = time.monotonic()
    second = world.process(CONSUMER)
    world.await_outcomes(before + 1)
    print(f"first output {time.monotonic() - begun:.1f} s after the restart, session of 6 s")
    world.await_all()
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_S) == 0
    world.verify()


def test_a35_two_groups_on_one_topic_do_not_fence_each_other(
    world: KafkaWorld, worlds: Worlds
) -> None:
    """faust#367: two releases with default values share an id and end each other for ever."""
    other = worlds(source=world.input)
    world.fill(300)
    both = [one.start(one.worker()) for one in (world, other)]
    world.await_all()
    other.await_outcomes(world.given)
    for running in both:
        running.stop()
        assert running.worker._counters.snapshot().rebuilds == 0
    world.verify()
    other.verify()


def test_a36_nothing_is_written_outside_of_transactions(world: KafkaWorld) -> None:
    """faust#177. What was seen of the first transaction while it was open is never to be had
    once it is aborted, neither decisions nor dead letters."""
    world.fill(40)
    sink = AbortingSink(world.settings())
    running = world.start(world.worker(sink=sink, scorer=SlowScorer(seconds=0)))
    sink.gate.await_reached()
    topics = world.output, world.dead
    early = [record for topic in topics for record in world.harness.read(topic, "read_uncommitted")]
    assert early
    assert [record for topic in topics for record in world.harness.read(topic)] == []
    sink.gate.open()
    world.await_all()
    running.stop()
    world.verify()
    final = [record for topic in topics for record in world.harness.read(topic)]
    assert not coordinates_of(early) & coordinates_of(final)
