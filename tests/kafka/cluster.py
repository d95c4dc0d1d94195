"""A Kafka for the tests, found in this order: an address that is given, Docker, Java and Maven.

Nothing needs to be installed by hand for the third: the jars of Apache Kafka are resolved by
Maven into the user's cache folder, once.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

VARIABLE = "PROCESSOR_TEST_KAFKA"
IMAGE = "apache/kafka:4.3.1"
POM = Path(__file__).with_name("pom.xml")
START_S = 60.0

# One node must be enough for the offsets and the transactions, and a group need not wait for more
# members to come (testcontainers-java#1816).
BROKER = {
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "auto.create.topics.enable": "false",
}


class Unavailable(Exception):
    """No Kafka can be had here; says what to install."""


@contextmanager
def kafka() -> Iterator[str]:
    """The bootstrap address of a running Kafka. Raises `Unavailable`."""
    if address := os.environ.get(VARIABLE):
        yield address
    elif _docker_answers():
        with _in_docker() as address:
            yield address
    elif shutil.which("java") and shutil.which("mvn"):
        with _from_jars() as address:
            yield address
    else:
        raise Unavailable(
            f"no Kafka: set {VARIABLE} to a bootstrap address, or install Docker, or Java 17 and "
            "Maven"
        )


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

    port = _free_port()
    container = DockerContainer(IMAGE).with_bind_ports(9092, port)
    for key, value in _node(9092, 9093, f"localhost:{port}").items():
        container.with_env("KAFKA_" + key.upper().replace(".", "_"), value)
    with container:
        address = f"localhost:{port}"
        _wait(address, lambda: True)
        yield address


@contextmanager
def _from_jars() -> Iterator[str]:
    jars = _jars()
    port = _free_port()
    java = ["java", "-cp", f"{jars}/*"]
    folder = Path(tempfile.mkdtemp(prefix="kafka-"))
    properties = folder / "server.properties"
    settings = _node(port, _free_port(), f"localhost:{port}") | {"log.dirs": f"{folder}/data"}
    properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    format_ = ["kafka.tools.StorageTool", "format", "-t", str(uuid.uuid4()), "-c", str(properties)]
    subprocess.run([*java, *format_], check=True, capture_output=True, timeout=60)
    memory = ["-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*java[:1], *memory, *java[1:], "kafka.Kafka", str(properties)],
            stdout=log,
            stderr=log,
        )
    try:
        address = f"localhost:{port}"
        _wait(address, lambda: server.poll() is None, folder / "log")
        yield address
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _node(port: int, controller: int, advertised: str) -> dict[str, str]:
    return BROKER | {
        "node.id": "1",
        "process.roles": "broker,controller",
        "controller.quorum.voters": f"1@localhost:{controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://:{port},CONTROLLER://localhost:{controller}",
        "advertised.listeners": f"PLAINTEXT://{advertised}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }


def _jars() -> Path:
    """The folder with Kafka's jars, filled by Maven unless it is there. A folder is complete once
    it has its name, so that two runs at a time, or one that was stopped, do no harm."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jars = Path(cache) / "processor" / "kafka" / _version()
    if jars.exists():
        return jars
    jars.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=jars.parent))
    copy = ["dependency:copy-dependencies", f"-DoutputDirectory={fresh}"]
    done = subprocess.run(
        ["mvn", "-q", "-B", "-f", str(POM), *copy], capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(fresh)
        raise Unavailable(f"Maven cannot resolve Kafka's jars: {done.stdout[-500:]}")
    try:
        fresh.rename(jars)
    except OSError:
        shutil.rmtree(fresh)
    return jars


def _version() -> str:
    text = POM.read_text()
    return text[text.index("<kafka.version>") + 15 : text.index("</kafka.version>")]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(address: str, alive: Callable[[], bool], log: Path | None = None) -> None:
    deadline = time.monotonic() + START_S
    admin = AdminClient({"bootstrap.servers": address}, logger=logging.getLogger("kafka-start"))
    while True:
        try:
            admin.list_topics(timeout=1)
            return
        except KafkaException as error:
            if not alive() or time.monotonic() > deadline:
                tail = log.read_text()[-2000:] if log else ""
                raise RuntimeError(f"Kafka does not start: {error}\n{tail}") from error
