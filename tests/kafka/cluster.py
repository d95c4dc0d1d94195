"""A Kafka for the tests, found in this order: an address that is given, Docker, Java and Maven.

Nothing needs to be installed by hand for the third: the jars of Apache Kafka are resolved by
Maven into the user's cache folder, once. Only a cluster from the jars can be harmed, so fault
tests ask for one of their own.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._metadata import ClusterMetadata

from tests.kafka.node import Node, Unavailable, broker_settings, find_jars, free_port

VARIABLE = "KAFKA_TEST_ADDRESS"
IMAGE = "apache/kafka:4.3.1"
START_S = 120.0  # two cores that have other work too
STOP_S = 30.0
UNCHANGED: Mapping[str, str] = MappingProxyType({})


@contextmanager
def kafka() -> Iterator[str]:
    """The bootstrap address of a running Kafka. Raises `Unavailable`."""
    if address := os.environ.get(VARIABLE):
        probe(address)
        yield address
    elif _docker_answers():
        with _in_docker() as address:
            yield address
    elif _java():
        with Cluster() as cluster:
            yield cluster.address
    else:
        raise Unavailable(
            f"no Kafka: set {VARIABLE} to a bootstrap address, or install Docker, or Java 17 and "
            "Maven"
        )


def _java() -> bool:
    return bool(shutil.which("java") and shutil.which("mvn"))


def _docker_answers() -> bool:
    docker = shutil.which("docker")
    try:
        return (
            docker is not None
            and not subprocess.run(
                [docker, "info"], capture_output=True, timeout=5, check=False
            ).returncode
        )
    except subprocess.TimeoutExpired:
        return False


@contextmanager
def _in_docker() -> Iterator[str]:
    from testcontainers.core.container import DockerContainer

    port = free_port()
    container = DockerContainer(IMAGE).with_bind_ports(9092, port)
    settings = broker_settings(1) | {
        "node.id": "1",
        "process.roles": "broker,controller",
        "controller.quorum.voters": "1@localhost:9093",
        "controller.listener.names": "CONTROLLER",
        "listeners": "PLAINTEXT://:9092,CONTROLLER://localhost:9093",
        "advertised.listeners": f"PLAINTEXT://localhost:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }
    for key, value in settings.items():
        container.with_env("KAFKA_" + key.upper().replace(".", "_"), value)
    with container:
        address = f"localhost:{port}"
        wait_for(address, lambda metadata: None)
        probe(address)
        yield address


class Cluster:
    """Nodes from Kafka's jars, numbered from 1, which can be stopped, killed and frozen."""

    def __init__(
        self, count: int = 1, changes: Mapping[str, str] = UNCHANGED, *, transactions: bool = True
    ) -> None:
        """`changes` to the brokers' settings; without `transactions` it is not waited for them.

        Raises `Unavailable`."""
        if not _java():
            raise Unavailable(
                "a cluster that a test may harm is started from Apache Kafka's jars: install "
                f"Java 17 and Maven (neither Docker nor {VARIABLE} will do)"
            )
        find_jars()
        self._folder = Path(tempfile.mkdtemp(prefix="kafka-"))
        self.nodes = {n: Node(n, self._folder) for n in range(1, count + 1)}
        try:
            self._format(changes)
            for number in self.nodes:
                self.start(number)
            self.await_whole()
            if transactions:
                probe(self.address)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return ",".join(node.address for node in self.nodes.values())

    @property
    def proxied_address(self) -> str:
        return ",".join(f"localhost:{node.proxy_port}" for node in self.nodes.values())

    def start(self, number: int) -> None:
        """Start a node, for the first time or again; `await_whole` waits for it."""
        node = self.nodes[number]
        assert not node.running
        node.process = node.java("kafka.Kafka", f"{node.folder}/server.properties")

    def stop(self, number: int) -> None:
        """Cleanly: it hands its partitions over before it ends."""
        process = self._signal(number, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill(number)

    def kill(self, number: int) -> None:
        self._signal(number, signal.SIGKILL).wait()

    def pause(self, number: int) -> None:
        self._signal(number, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        self._signal(number, signal.SIGCONT)

    def mend(self) -> None:
        """Undo whatever was done to the nodes."""
        for number, node in self.nodes.items():
            if node.running:
                self.resume(number)
            else:
                self.start(number)
        self.await_whole()

    def await_whole(self) -> None:
        """Wait until all nodes are there, with all copies of all partitions. Each is asked: for
        some seconds the others do not know that one was killed."""
        for node in self.nodes.values():
            wait_for(node.address, self._missing, self._trouble)

    def close(self) -> None:
        for number, node in self.nodes.items():
            if node.running:
                self.kill(number)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _format(self, changes: Mapping[str, str]) -> None:
        word = str(uuid.uuid4())
        for node in self.nodes.values():
            node.configure(list(self.nodes.values()), changes)
        format_ = ["kafka.tools.StorageTool", "format", "-t", word, "-c"]
        started = [
            (node, node.java(*format_, f"{node.folder}/server.properties"))
            for node in self.nodes.values()
        ]
        for node, process in started:
            if process.wait(START_S):
                raise RuntimeError(f"Kafka's data folder cannot be formatted:\n{node.log()}")

    def _signal(self, number: int, signum: signal.Signals) -> subprocess.Popen[bytes]:
        process = self.nodes[number].process
        assert process is not None
        process.send_signal(signum)
        return process

    def _missing(self, metadata: ClusterMetadata) -> str | None:
        if len(metadata.brokers) < len(self.nodes):
            return f"{len(metadata.brokers)} of {len(self.nodes)} nodes"
        for topic in metadata.topics.values():
            for partition in topic.partitions.values():
                if partition.leader < 0 or len(partition.isrs) < len(partition.replicas):
                    return f"{topic.topic} [{partition.id}] is not whole"
        return None

    def _trouble(self) -> str | None:
        ended = [node for node in self.nodes.values() if not node.running]
        return "\n".join(f"node {n.number} has ended:\n{n.log()}" for n in ended) or None


def wait_for(
    address: str,
    missing: Callable[[ClusterMetadata], str | None],
    trouble: Callable[[], str | None] = lambda: None,
) -> None:
    """Wait until nothing is missing; raises at once where there is trouble."""
    deadline = time.monotonic() + START_S
    admin = AdminClient({"bootstrap.servers": address}, logger=logging.getLogger("kafka-start"))
    while True:
        try:
            found = missing(admin.list_topics(timeout=1))
        except KafkaException as error:
            found = str(error)
        if found is None:
            return
        if (why := trouble()) or time.monotonic() > deadline:
            raise RuntimeError(f"Kafka does not start: {found}\n{why or ''}")
        time.sleep(0.1)


def probe(address: str) -> None:
    """Have both coordinators elected before a test measures anything (DELIVERY D12)."""
    client = {"bootstrap.servers": address, "log_level": 2}
    Producer(client | {"transactional.id": "probe"}).init_transactions(START_S)
    consumer = Consumer(client | {"group.id": "probe"})
    deadline = time.monotonic() + START_S
    while True:
        try:
            consumer.committed([TopicPartition("probe", 0)], 5)
            break
        except KafkaException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    consumer.close()
