"""The worker on Apache Kafka: end to end, killed, fenced, rebalanced, rewound. Some names begin
with the row of public failures that a test stands for; docs/delivery.md lists them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from processor.broker.kafka import KafkaSink
from processor.broker.kafka_admin import check_cluster
from processor.broker.kafka_load import produce_all
from processor.broker.transaction import GroupMetadata, Offsets
from processor.errors import AbortAndRewind, ConfigError
from processor.kafka_settings import KafkaSettings
from tests.kafka.harness import KafkaHarness
from tests.kafka.world import PATIENCE_S, KafkaWorld
from tests.runtime.world import inputs

pytestmark = pytest.mark.kafka

REWINDS = 200


@pytest.fixture
def world(harness: KafkaHarness, tmp_path: Path) -> Iterator[KafkaWorld]:
    world = KafkaWorld(harness, tmp_path)
    yield world
    world.close()


def test_every_record_gets_one_outcome(world: KafkaWorld) -> None:
    world.fill(500)
    running = world.start(world.worker())
    world.await_all()
    running.stop()
    world.verify()
    assert len(world.harness.read(world.dead)) == 100


def test_little_load_is_not_kept_waiting(world: KafkaWorld) -> None:
    running = world.start(world.worker())
    world.fill(1, damaged_every=0)
    world.await_all()
    for n in range(20):
        world.fill(1, damaged_every=0)
        world.await_outcomes(n + 2)
    running.stop()
    world.verify()
    latencies = [
        record.timestamp_ms - json.loads(record.value or b"")["event"]["timestamp_ms"]
        for record in world.harness.read(world.output)
    ]
    assert sorted(latencies)[10] < 100


@pytest.mark.parametrize(
    "failpoint",
    [
        ("begin_transaction", 2),
        ("produce", 30),
        ("send_offsets", 2),
        ("commit_transaction", 2),
    ],
)
def test_a1_killed_and_restarted(world: KafkaWorld, failpoint: tuple[str, int]) -> None:
    """confluent-kafka-go#1093: killed between sending offsets and the commit, above all."""
    world.fill(200)
    first = world.process(failpoint=failpoint)
    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    before = world.outcomes()
    assert before < 200
    second = world.process()
    begun = time.monotonic()
    world.await_outcomes(before + 1)
    assert time.monotonic() - begun < 15  # no time-out of session or transaction is waited out
    world.await_all()
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_S) == 0
    world.verify()


def test_a1_killed_from_outside_again_and_again(world: KafkaWorld) -> None:
    world.fill(1000)
    for least in (50, 250, 450):
        process = world.process()
        world.await_outcomes(least)
        process.kill()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    process = world.process()
    world.await_all()
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    world.verify()


def test_d1_sigterm_in_the_middle(world: KafkaWorld) -> None:
    world.fill(600)
    first = world.process()
    world.await_outcomes(50)
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE_S) == 0
    assert world.outcomes() < 600
    world.process()
    world.await_all()
    world.verify()


def test_a4_stopped_longer_than_its_transaction_may_take(world: KafkaWorld) -> None:
    """SIGSTOP past the time-outs of session and transaction: another member takes over, and the
    sleeper that wakes up publishes nothing of what it held (librdkafka#3297; A5, KAFKA-20785)."""
    world.fill(600)
    first = world.process({"transaction_timeout_ms": 6000, "publish_timeout_ms": 3000})
    world.await_outcomes(50)
    first.send_signal(signal.SIGSTOP)
    second = world.start(world.worker("1"))
    world.await_all()
    first.send_signal(signal.SIGCONT)
    world.fill(50)
    world.await_all()
    second.stop()
    world.verify()


def test_a3_a_twin_with_our_id_fences_us_and_we_take_it_back(world: KafkaWorld) -> None:
    world.fill(300)
    worker = world.worker()
    running = world.start(worker)
    world.await_outcomes(30)
    twin = KafkaSink(world.settings())
    twin.init_transactions(10)
    world.fill(100)
    world.await_all()
    running.stop()
    world.verify()
    assert worker._counters.snapshot().rebuilds >= 1


def test_members_come_and_go(harness: KafkaHarness, tmp_path: Path) -> None:
    """faust#323, librdkafka#4059: rebalances under load, with static members that time out."""
    world = KafkaWorld(harness, tmp_path, partitions=4)
    world.fill(800)
    first = world.start(world.worker("0"))
    world.await_outcomes(40)
    second = world.start(world.worker("1"))
    world.fill(400)
    world.await_outcomes(600)
    first.stop()  # static: its partitions wait for its session to end
    world.fill(100)
    world.await_all()
    second.stop()
    world.verify()
    assert second.worker._counters.snapshot().decisions > 0


class FickleSink(KafkaSink):
    """Asks for an abort every other time, right before the commit."""

    calls = 0

    def send_offsets(self, offsets: Offsets, group: GroupMetadata, timeout_s: float) -> None:
        super().send_offsets(offsets, group, timeout_s)
        self.calls += 1
        if self.calls < 2 * REWINDS and self.calls % 2:
            raise AbortAndRewind("for the rewind")


def test_a25_two_hundred_rewinds_lose_nothing(harness: KafkaHarness, tmp_path: Path) -> None:
    """confluent-kafka-python#1443: records lost after a seek."""
    world = KafkaWorld(harness, tmp_path, partitions=4)
    sink = FickleSink(world.settings())
    running = world.start(world.worker(sink=sink))
    while sink.calls < 2 * REWINDS:
        world.fill(200)
        world.await_outcomes(world.given - 100)
    world.await_all()
    running.stop()
    world.verify()
    assert running.worker._counters.snapshot().aborts == REWINDS


def test_generate_and_check(world: KafkaWorld) -> None:
    settings = world.settings()
    records = [(b"%d" % n, value, (("n", b"%d" % n),)) for n, value in enumerate(inputs(50))]
    assert produce_all(settings, world.input, records) == 50
    read = world.harness.read(world.input)
    assert sorted(r.headers for r in read) == sorted(headers for _, _, headers in records)
    check_cluster(settings, [world.input, world.output])
    with pytest.raises(ConfigError, match="none-1, none-2"):
        check_cluster(settings, ["none-2", world.input, "none-1"])


def test_no_broker_is_a_setting_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("processor.broker.kafka_admin.CONNECT_S", 0.5)
    with pytest.raises(ConfigError, match="bootstrap_servers = 'localhost:1'"):
        check_cluster(KafkaSettings(bootstrap_servers="localhost:1"), ["t"])
