"""What goes on while something breaks: a steady load, and supervisors that restart workers."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kafka.world import PATIENCE_S, KafkaWorld
from tests.runtime.world import inputs

PER_SECOND = 100
ASKS_FOR_A_RESTART = "processor.errors.ExitProcess: "
# Short, so that a fault of some seconds is longer than they are.
TIMEOUTS = {
    "publish_timeout_ms": 3000,
    "transaction_timeout_ms": 10_000,
    "session_timeout_ms": 6000,
}


class Load:
    """Appends records all the time. One that meets a fault on its way waits in the client."""

    def __init__(self, world: KafkaWorld) -> None:
        self._world = world
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self._world.harness.flush()

    def _run(self) -> None:
        number, values = 0, inputs(60)
        while not self._stop.wait(10 / PER_SECOND):
            for value in values[number % 60 :][:10]:
                partition = number % self._world.partitions
                self._world.harness.append_later(
                    self._world.input, partition, b"%d" % number, value
                )
                number += 1


class Supervisor:
    """Starts a worker process, and another at once whenever it ends by itself, as Kubernetes
    does: to exit is a worker's last answer to trouble that lasts."""

    def __init__(self, world: KafkaWorld, replica: str) -> None:
        self._world, self._replica = world, replica
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.exits: list[str] = []  # last words of those that ended by themselves
        self._log, self._process = self._start()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Each exit was one that asks for a restart, and the last worker ends when told to. One
        that has only just started has no handler for the signal yet."""
        with self._lock:
            self._stopping.set()
            self._process.terminate()
        if self._process.wait(PATIENCE_S) not in (0, -signal.SIGTERM):
            self.exits.append(self._last_words())
        assert [e for e in self.exits if ASKS_FOR_A_RESTART not in e] == []

    def log(self) -> str:
        return self._log.read_text()

    def abandon(self) -> None:
        with self._lock:
            self._stopping.set()
            self._process.kill()

    def _start(self) -> tuple[Path, subprocess.Popen[bytes]]:
        log = self._world.folder / f"worker-{self._replica}-{len(self.exits)}.log"
        changes = TIMEOUTS | {"replica": self._replica}
        with log.open("wb") as errors:
            return log, self._world.process(changes, errors)

    def _watch(self) -> None:
        while True:
            self._process.wait()
            with self._lock:
                if self._stopping.is_set():
                    return
                self.exits.append(self._last_words())
                self._log, self._process = self._start()

    def _last_words(self) -> str:
        lines = self.log().splitlines()
        reasons = [line for line in lines if ASKS_FOR_A_RESTART in line]
        return f"exit {self._process.returncode}: {(reasons or lines or ['nothing'])[-1]}"


@contextmanager
def under_load(world: KafkaWorld, workers: int = 2) -> Iterator[list[Supervisor]]:
    """Workers make progress before; they must make it again after what happens inside, and in the
    end each record has one outcome."""
    supervisors = [Supervisor(world, str(n)) for n in range(workers)]
    try:
        with Load(world):
            world.await_progress()
            yield supervisors
            world.await_progress()
        world.await_end()
        for supervisor in supervisors:
            supervisor.stop()
        world.verify()
    finally:
        for supervisor in supervisors:
            supervisor.abandon()
        for number, supervisor in enumerate(supervisors):  # shown where the test fails
            lines = [line for line in supervisor.log().splitlines() if "Connect to" not in line]
            print(f"worker {number}, exits: {supervisor.exits}", *lines[-30:], sep="\n")
