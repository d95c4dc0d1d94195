"""One broker that freezes or crashes, and a network between it and the workers that is slow, cut
or silent. Faults last longer than a transaction may take, so none is waited out inside a call."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processor.broker.kafka import KafkaSink, KafkaSource
from processor.broker.transaction import TopicPartition
from processor.core.encode import OutputRecord
from processor.errors import BrokerError
from tests.kafka.cluster import Cluster
from tests.kafka.faults import TIMEOUTS, Load, under_load
from tests.kafka.harness import KafkaHarness
from tests.kafka.proxy import Proxy
from tests.kafka.world import KafkaWorld, await_

pytestmark = pytest.mark.kafka

FAULT_S = 1.5 * TIMEOUTS["publish_timeout_ms"] / 1000
DRAIN_S = 5.0


@pytest.fixture
def network(one_node: Cluster) -> Iterator[Proxy]:
    (node,) = one_node.nodes.values()
    network = Proxy(node.proxy_port, node.behind_proxy)
    yield network
    network.close()


@pytest.fixture
def world(one_node: Cluster, network: Proxy, tmp_path: Path) -> Iterator[KafkaWorld]:
    one_node.mend()
    harness = KafkaHarness(one_node.address)
    world = KafkaWorld(harness, tmp_path, address=one_node.proxied_address)
    yield world
    network.heal()
    world.close()
    harness.close()


def test_a9_broker_frozen(one_node: Cluster, world: KafkaWorld) -> None:
    """librdkafka#3041: ten minutes of hanging in a commit, then an error of no known kind. Here
    the broker is away for longer than a whole transaction may last."""
    with under_load(world):
        one_node.pause(1)
        time.sleep(1.2 * TIMEOUTS["transaction_timeout_ms"] / 1000)
        one_node.resume(1)


def test_broker_crashed(one_node: Cluster, world: KafkaWorld) -> None:
    with under_load(world):
        one_node.kill(1)
        one_node.start(1)
        one_node.await_whole()


def test_slow_network(network: Proxy, world: KafkaWorld) -> None:
    with under_load(world):
        network.delay(0.1)
        world.await_progress()
        network.heal()


def test_network_cut(network: Proxy, world: KafkaWorld) -> None:
    with under_load(world):
        network.cut()
        time.sleep(FAULT_S)
        network.heal()


def test_a8_network_silent(network: Proxy, world: KafkaWorld) -> None:
    """Requests that their sender gave up long ago arrive after all (Jepsen, Bufstream 0.1.0)."""
    with under_load(world):
        network.black_hole()
        time.sleep(FAULT_S)
        network.heal()


def test_a8_requests_lost(network: Proxy, world: KafkaWorld) -> None:
    with under_load(world):
        network.black_hole("to_broker")
        time.sleep(FAULT_S)
        network.cut()
        network.heal()


def test_a8_answers_lost(network: Proxy, world: KafkaWorld) -> None:
    """Transactions are committed, and nobody is told."""
    with under_load(world):
        network.black_hole("to_client")
        time.sleep(FAULT_S)
        network.cut()
        network.heal()


@pytest.mark.parametrize("fault", [Proxy.cut, Proxy.black_hole])
def test_d2_told_to_stop_without_a_broker(
    fault: Callable[[Proxy], None], network: Proxy, world: KafkaWorld
) -> None:
    """confluent-kafka-python#1667: a client that cannot reach its broker hangs in close."""
    with Load(world):
        process = world.process(TIMEOUTS, drain_s=DRAIN_S)
        world.await_progress()
        fault(network)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DRAIN_S + 10) in (0, 1)
    network.heal()
    world.process(TIMEOUTS)
    world.await_end()
    world.verify()


@pytest.mark.parametrize("call", ["send_offsets", "commit", "abort"])
def test_a9_no_call_outlasts_its_time(call: str, network: Proxy, world: KafkaWorld) -> None:
    """The client's own `send_offsets_to_transaction` does: it comes back after the transaction's
    time-out, whatever time it was given."""
    world.fill(10)
    source = KafkaSource(world.settings("reader"), [world.input])
    sink = KafkaSink(world.settings(transaction_timeout_ms=20_000))
    joined: list[TopicPartition] = []
    source.open(joined.extend, lambda partitions: None)
    await_(lambda: bool(source.poll(10, 0.1) or joined), lambda: "no place in the group")
    group, offsets = source.group_metadata(), {(world.input, 0): 1}
    sink.init_transactions(10)
    sink.begin()
    sink.produce(OutputRecord(world.output, None, b"x", ()))
    if call != "send_offsets":
        sink.send_offsets(offsets, group, 10)
    network.black_hole()
    begun = time.monotonic()
    with pytest.raises(BrokerError):
        sink.send_offsets(offsets, group, 1) if call == "send_offsets" else getattr(sink, call)(1)
    assert time.monotonic() - begun < 10
    sink.close()
    network.heal()
    source.close()
