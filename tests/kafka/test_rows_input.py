"""Offsets that are not where one thinks: transactions, deletions and compaction of the input,
partitions that are added. Names begin with the row of public failures that a test stands for;
docs/delivery.md lists them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import orjson
import pytest
from confluent_kafka import Consumer, TopicPartition

from processor.core.event import Record
from processor.errors import ExitProcess
from processor.runtime import progress
from processor.runtime.telemetry import Lag
from tests.kafka.admin import Operator, Upstream
from tests.kafka.conftest import Worlds
from tests.kafka.harness import KafkaHarness
from tests.kafka.members import HeldScorer
from tests.kafka.world import KafkaWorld, await_
from tests.runtime.world import Running, event, in_thread, inputs, judge

pytestmark = pytest.mark.kafka
GO_ON = {"auto_offset_reset": "earliest"}


@pytest.fixture
def world(harness: KafkaHarness, tmp_path: Path) -> Iterator[KafkaWorld]:
    world = KafkaWorld(harness, tmp_path)
    yield world
    world.close()


@pytest.fixture
def single(worlds: Worlds) -> KafkaWorld:
    return worlds(partitions=1)


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lag is looked at all the time."""
    monkeypatch.setattr(progress, "EVERY_S", 0.1)


def lags(running: Running) -> list[Lag]:
    return [lag for _, lag in sorted(running.worker._counters.snapshot().lag.items())]


def await_lags(running: Running, *wanted: Lag) -> None:
    await_(lambda: lags(running) == list(wanted), lambda: f"the lag is {lags(running)}")


def send(upstream: Upstream, world: KafkaWorld, numbers: range) -> None:
    for n in numbers:
        upstream.send(world.input, n % world.partitions, b"%d" % n, event(n))


def drain(world: KafkaWorld, **changes: object) -> Running:
    """A worker from start to end, while what is committed only grows."""
    running = world.start(world.worker(changes=changes))
    seen = [world.committed()]

    def ended() -> bool:
        assert running.errors == []
        seen.append(world.committed())
        return seen[-1] == world.ends()

    await_(ended, lambda: f"the group stands at {seen[-1]} of {world.ends()}")
    running.stop()
    assert all(a <= b for then, now in pairwise(seen) for a, b in zip(then, now, strict=True))
    return running


@pytest.mark.usefixtures("_soon")
def test_b26_the_lag_of_a_drained_transactional_input_is_0(
    harness: KafkaHarness, worlds: Worlds
) -> None:
    """spring-kafka#1587: stuck at 1, for the last offset is a marker. One partition ends with a
    commit, one holds nothing but aborted records, one is empty."""
    world = worlds(partitions=3)
    upstream = Upstream(harness)
    for partition, end in ((0, upstream.commit), (1, upstream.abort)):
        upstream.begin()
        for n in range(10):
            upstream.send(world.input, partition, b"%d" % n, event(n))
        end()
    running = world.start(world.worker())
    await_lags(running, *[Lag(0, 0)] * 3)
    world.await_end()
    running.stop()
    assert world.committed() == [11, 11, 0]
    assert len(harness.read(world.output)) == 10
    world.verify()


@pytest.mark.usefixtures("_soon")
def test_b27_what_an_open_transaction_hides_is_no_lag(single: KafkaWorld) -> None:
    """klag-exporter#104."""
    upstream = Upstream(single.harness)
    single.fill(10)
    upstream.begin()
    send(upstream, single, range(6))
    upstream.flush()
    running = single.start(single.worker())
    await_lags(running, Lag(0, 6))
    assert single.outcomes() == 10
    upstream.commit()
    await_lags(running, Lag(0, 0))
    single.await_end()
    running.stop()
    single.verify()


def give_up_to_50(world: KafkaWorld) -> list[Record]:
    """150 records, of which 50 are committed and 100 deleted; those that are left."""
    world.fill(150)
    given = world.harness.read(world.input)
    consumer = Consumer({"bootstrap.servers": world.address, "group.id": world.group})
    consumer.commit(offsets=[TopicPartition(world.input, 0, 50)], asynchronous=False)
    consumer.close()
    Operator(world.harness).delete_records(world.input, 0, 100)
    return given[100:]


def test_b30_deleted_records_stop_the_worker(single: KafkaWorld) -> None:
    """librdkafka#3745: passed over in silence, or read again from the beginning."""
    give_up_to_50(single)
    running = in_thread(single.worker())
    expected = rf"{single.input}\[0\]: next offset is 50, but records below 100 were deleted"
    with pytest.raises(ExitProcess, match=expected):
        running.join()
    assert single.committed() == [50]
    assert single.outcomes() == 0


def test_b30_deleted_records_are_counted_where_that_is_allowed(single: KafkaWorld) -> None:
    given = give_up_to_50(single)
    running = drain(single, **GO_ON)
    assert running.worker._counters.snapshot().records_lost == 50
    judge(given, single.harness.read(single.output), single.harness.read(single.dead))


def test_b30_records_deleted_under_a_worker(single: KafkaWorld) -> None:
    """Those that it waits for to be fetched once it is not paused any more."""
    scorer = HeldScorer()
    single.fill(300, damaged_every=0)
    given = single.harness.read(single.input)
    first = in_thread(single.worker(scorer=scorer))
    scorer.gate.await_reached()
    await_(lambda: first.worker._counters.snapshot().queue_depth >= 64, lambda: "not paused")
    Operator(single.harness).delete_records(single.input, 0, 250)
    scorer.gate.open()
    with pytest.raises(ExitProcess, match="but records below 250 were deleted"):
        first.join()
    [done] = single.committed()
    drain(single, **GO_ON)
    outputs = single.harness.read(single.output)
    judge([r for r in given if r.offset < done or r.offset >= 250], outputs, [])


def test_b33_three_producers_with_transactions_that_interleave(world: KafkaWorld) -> None:
    """parallel-consumer#329: the next offset is not the last one + 1."""
    producers = [Upstream(world.harness, name) for name in "abc"]
    for round_ in range(5):
        for producer in producers:
            producer.begin()
        for n in range(10 * round_, 10 * round_ + 10):
            for producer in producers:
                send(producer, world, range(n, n + 1))
                producer.flush()
        producers[round_ % 3].commit()
        producers[(round_ + 1) % 3].abort()
        producers[(round_ + 2) % 3].commit()
    drain(world)
    assert len(world.harness.read(world.output)) == 2 * 5 * 10
    world.verify()


def test_b34_aborted_records_get_no_outcome(world: KafkaWorld) -> None:
    """librdkafka#3020: handed out all the same. Each third transaction is aborted, while the
    worker is at it."""
    upstream = Upstream(world.harness)
    running = world.start(world.worker())
    for number in range(30):
        upstream.begin()
        send(upstream, world, range(10 * number, 10 * number + 10))
        if number % 3 == 1:
            upstream.abort()
        else:
            upstream.commit()
    world.await_end()
    running.stop()
    world.verify()
    ids = {int(record.key or b"") for record in world.harness.read(world.output)}
    assert ids == {n for n in range(300) if n // 10 % 3 != 1}
    assert world.harness.read(world.dead) == []


def test_a_compacted_input(single: KafkaWorld) -> None:
    """Offsets have gaps where later records of the same key replaced earlier ones."""
    changes = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": 0.001,
        "segment.bytes": 1_048_576,
    }
    Operator(single.harness).configure("topic", single.input, changes)
    big = orjson.dumps({"id": 1, "hidden": "x" * 30_000})
    for n in range(100):
        single.harness.append_later(single.input, 0, b"%d" % (n % 10), big)
    single.harness.flush()
    given: list[Record] = []

    def compacted() -> bool:
        before, given[:] = len(given), single.harness.read(single.input)
        return len(given) == before < 100

    await_(compacted, lambda: f"{len(given)} records are left")
    drain(single)
    judge(given, single.harness.read(single.output), [])
    assert len({record.offset for record in given}) < given[-1].offset + 1


def test_partitions_added_to_the_input(single: KafkaWorld) -> None:
    """Read from their beginning, though the group started at the end."""
    client = {"topic.metadata.refresh.interval.ms": "1000"}
    running = single.start(single.worker(changes={"first_start": "latest", "client": client}))
    await_(lambda: single.harness.committed(single.group, single.input, 0) == 0, lambda: "no start")
    single.fill(10)
    Operator(single.harness).add_partitions(single.input, 3)
    harness = KafkaHarness(single.address)  # whose producer knows the partitions
    for n, value in enumerate(inputs(20)):
        harness.append(single.input, 1 + n % 2, b"%d" % n, value)
    harness.close()
    single.partitions = 3
    single.await_outcomes(30)
    single.await_end()
    running.stop()
    single.verify()
