"""One node of Apache Kafka from its jars."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

POM = Path(__file__).with_name("pom.xml")

# A group need not wait for more members to come (testcontainers-java#1816), leaders move when a
# test says so, a node or a member that is gone is missed within seconds, and so is compacted what
# can be.
BROKER = {
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
    "log.cleaner.backoff.ms": "500",
    "auto.create.topics.enable": "false",
    "auto.leader.rebalance.enable": "false",
    "broker.session.timeout.ms": "4000",
    "broker.heartbeat.interval.ms": "500",
}
LOG = """\
rootLogger.level = WARN
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n
"""
# The kernel kills the node when the thread that started it ends, however that comes about; so
# nodes are started by the main thread. In Popen's `preexec_fn` this would deadlock now and then.
DIE_WITH_US = (
    "import ctypes, os, sys;"
    f"ctypes.CDLL(None).prctl(1, {signal.SIGKILL:d});"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
FAST_START = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]


class Unavailable(Exception):
    """No Kafka can be had here; says what to install."""


def broker_settings(nodes: int) -> dict[str, str]:
    """As much as the number of nodes allows. With the defaults, which are meant for three, no
    transaction ever starts on one (testcontainers-java#1816)."""
    copies, in_sync = str(min(3, nodes)), str(max(1, min(3, nodes) - 1))
    return BROKER | {
        "default.replication.factor": copies,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "min.insync.replicas": in_sync,
        "transaction.state.log.min.isr": in_sync,
    }


class Node:
    """A broker that is a controller too. It has a second listener that tells clients to come
    through the port of a proxy: clients go where the broker says, not where they first asked."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.folder = folder / str(number)
        self.folder.mkdir()
        self.port, self.controller_port, self.behind_proxy, self.proxy_port = free_ports(4)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def configure(self, nodes: list[Node], changes: Mapping[str, str]) -> None:
        listeners = {
            "PLAINTEXT": f"localhost:{self.port}",
            "PROXIED": f"localhost:{self.behind_proxy}",
            "CONTROLLER": f"localhost:{self.controller_port}",
        }
        advertised = {"PLAINTEXT": self.address, "PROXIED": f"localhost:{self.proxy_port}"}
        settings = broker_settings(len(nodes)) | {
            "node.id": str(self.number),
            "process.roles": "broker,controller",
            "controller.quorum.voters": ",".join(
                f"{n.number}@localhost:{n.controller_port}" for n in nodes
            ),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listeners": ",".join(f"{name}://{at}" for name, at in listeners.items()),
            "advertised.listeners": ",".join(f"{name}://{at}" for name, at in advertised.items()),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in listeners),
            "log.dirs": f"{self.folder}/data",
            **changes,
        }
        text = "".join(f"{key}={value}\n" for key, value in settings.items())
        (self.folder / "server.properties").write_text(text)
        (self.folder / "log4j2.properties").write_text(LOG)

    def java(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Run something of Kafka's. In a session of its own: Ctrl-C is for the tests, which stop
        their workers before the broker."""
        log4j = f"-Dlog4j2.configurationFile={self.folder}/log4j2.properties"
        command = ["java", "-Xmx384m", *FAST_START, log4j, "-cp", f"{find_jars()}/*", *arguments]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-S", "-c", DIE_WITH_US, *command],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Below the ports that the kernel gives to clients: one of them would take the port of a node
    that is down, and a client that keeps dialling such a port may even reach itself."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one:
            try:
                one.bind(("localhost", port := random.randrange(12_000, 32_000)))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def find_jars() -> Path:
    """The folder with Kafka's jars, filled by Maven unless it is there. A folder is complete once
    it has its name, so that two runs at a time, or one that was stopped, do no harm.

    Raises `Unavailable`.
    """
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
