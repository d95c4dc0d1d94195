"""Workers as processes: told to stop, killed for good, with a model that fails or hangs, with more
waiting than fits into memory, and with a broker that is set up wrongly. Names begin with the row of
public failures that a test stands for; docs/delivery.md lists them."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from processor.broker.kafka_admin import check_cluster
from processor.errors import ConfigError
from tests.kafka.admin import Operator, Upstream, memory
from tests.kafka.cluster import Cluster
from tests.kafka.harness import KafkaHarness
from tests.kafka.members import DYNAMIC
from tests.kafka.world import PATIENCE_S, KafkaWorld, await_
from tests.runtime.world import SlowScorer, event

pytestmark = pytest.mark.kafka

SESSION_S = 6


@pytest.fixture
def world(harness: KafkaHarness, tmp_path: Path) -> Iterator[KafkaWorld]:
    world = KafkaWorld(harness, tmp_path)
    yield world
    world.close()


def finish(world: KafkaWorld, process: subprocess.Popen[bytes]) -> None:
    world.await_all()
    world.await_end()
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    world.verify()


def test_d1_sigterm_during_a_rebalance(world: KafkaWorld) -> None:
    """The rebalance lasts until the first has heard of it, which is at its next heartbeat."""
    changes = DYNAMIC | {"client": {"heartbeat.interval.ms": "2000"}}
    operator = Operator(world.harness)
    world.fill(400)
    first = world.process(changes)
    world.await_outcomes(20)
    second = world.process(changes | {"replica": "1"})
    begun = time.monotonic()
    while "REBALANCING" not in operator.group_state(world.group):
        if time.monotonic() - begun > 10:  # it was over between two looks
            break
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE_S) == 0
    finish(world, second)


def test_d1_sigterm_twice_ends_the_process_at_once(world: KafkaWorld) -> None:
    world.fill(60)
    first = world.process(scorer={"seconds": 15})
    operator = Operator(world.harness)
    await_(lambda: operator.group_state(world.group) == "STABLE", lambda: "it does not join")
    time.sleep(1)
    first.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert first.poll() is None  # it waits for the model
    first.send_signal(signal.SIGTERM)
    assert first.wait(5) == 128 + signal.SIGTERM
    finish(world, world.process())


def test_d1_sigterm_during_the_start(world: KafkaWorld) -> None:
    world.fill(100)
    for delay in (0.2, 0.6, 1.0, 1.4):
        process = world.process()
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
    world.fill(100)
    finish(world, world.process())


def test_takeover_from_a_worker_that_is_gone_for_good(world: KafkaWorld) -> None:
    """Static members do not leave: the others wait for its session to end, and no longer."""
    world.fill(100)
    first, second = world.process(), world.process({"replica": "1"})
    operator = Operator(world.harness)
    await_(lambda: operator.members(world.group) == 2, lambda: "they do not join")
    world.await_all()
    begun = time.monotonic()
    first.kill()
    first.wait()
    world.fill(40)
    world.await_all()
    took = time.monotonic() - begun
    print(f"taken over after {took:.1f} s, with a session of {SESSION_S} s")
    assert took < SESSION_S + 20
    finish(world, second)


def test_c16_an_event_that_the_model_fails_for(world: KafkaWorld) -> None:
    """parallel-consumer#887: one record that spoils the batch, again and again."""
    world.fill(100, damaged_every=0)
    world.harness.append(world.input, 0, b"k", b'{"id": 1, "note": "boom"}')
    world.given += 1
    finish(world, world.process(scorer={"poison": "boom"}))
    assert len(world.harness.read(world.dead)) == 1


def test_c16_a_model_with_memory_for_half_a_batch(world: KafkaWorld) -> None:
    world.fill(100, damaged_every=0)
    finish(world, world.process(scorer={"memory": 4}))
    assert world.harness.read(world.dead) == []


def test_d6_a_model_that_hangs_ends_the_process(world: KafkaWorld, tmp_path: Path) -> None:
    world.fill(100)
    world.harness.append(world.input, 0, b"k", b'{"id": 1, "note": "endless"}')
    world.given += 1
    with (tmp_path / "log").open("wb") as log:
        first = world.process(errors=log, scorer={"hang": "endless"}, limits={"score_s": 2})
    assert first.wait(PATIENCE_S) == 1
    assert "the model has not returned for" in (tmp_path / "log").read_text()
    assert world.outcomes() < world.given
    finish(world, world.process())


def test_d7_memory_does_not_grow_with_the_backlog(world: KafkaWorld) -> None:
    """rust-rdkafka#650. 200 MB wait, of which the client may fetch 16 MiB ahead."""
    pad = b"x" * 50_000
    for n in range(4000):
        value = b'{"id": %d, "hidden": "%s"}' % (n, pad)
        world.harness.append_later(world.input, n % 2, b"k", value)
    world.harness.flush()
    world.given = 4000
    first = world.process()
    world.await_progress(200)
    sizes = []
    for _ in range(12):
        time.sleep(0.5)
        sizes.append(memory(first.pid, "VmRSS"))
    print(f"MiB over time: {sizes}, peak {memory(first.pid, 'VmHWM')}")
    assert max(sizes) < 200
    assert sum(sizes[6:]) < 1.2 * sum(sizes[:6])
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE_S) == 0
    assert sum(world.committed()) < 4000  # it was a backlog all the time
    second = world.start(world.worker(scorer=SlowScorer(seconds=0)))
    world.await_end()
    second.stop()
    world.verify()


def test_d12_transactions_start_at_once(world: KafkaWorld) -> None:
    """testcontainers-java#1816: with the defaults, which are meant for three brokers, none does."""
    begun = time.monotonic()
    upstream = Upstream(world.harness)
    upstream.begin()
    upstream.send(world.input, 0, b"k", event(1))
    upstream.commit()
    world.given = 1
    running = world.start(world.worker())
    world.await_all()
    assert time.monotonic() - begun < 15
    world.await_end()
    running.stop()
    world.verify()


def test_a34_a_time_out_that_the_broker_refuses_is_named(unready_node: Cluster) -> None:
    """flink-kickstarter#787."""
    harness = KafkaHarness(unready_node.address)
    topic = harness.topic()
    settings = harness.settings("g", "0", transaction_timeout_ms=61_000)
    remedy = "lower it to 60000, the broker's transaction.max.timeout.ms"
    with pytest.raises(ConfigError, match=f"kafka: transaction_timeout_ms = 61000: {remedy}"):
        check_cluster(settings, [topic])
    harness.close()


def test_a34_a_broker_without_transactions(unready_node: Cluster, tmp_path: Path) -> None:
    """ksql#4486: a replication factor of three on one broker, and a start that takes for ever."""
    harness = KafkaHarness(unready_node.address)
    world = KafkaWorld(harness, tmp_path / "policy")
    world.fill(10)
    begun = time.monotonic()
    with (tmp_path / "log").open("wb") as log:
        process = world.process(errors=log)
    status = process.wait(PATIENCE_S)
    print(f"ended after {time.monotonic() - begun:.1f} s\n{(tmp_path / 'log').read_text()}")
    assert status == 1
    assert time.monotonic() - begun < 10 + 15  # publish_timeout_ms, and the interpreter's start
    assert "cannot start transactions" in (tmp_path / "log").read_text()
    world.close()
    harness.close()
