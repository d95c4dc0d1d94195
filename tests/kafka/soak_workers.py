"""The workers of the soak: processes that are killed, stopped and frozen, and start again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
END_S = 60.0

# How a worker's log says that somebody else was taken to be the rightful one.
FENCED = re.compile(
    r"_FENCED|PRODUCER_FENCED|FENCED_INSTANCE_ID|ILLEGAL_GENERATION|UNKNOWN_MEMBER_ID"
    r"|INVALID_PRODUCER_EPOCH|not a member of group"
)


@dataclass
class Life:
    """From a start of a process to its end."""

    log: Path
    began: float
    after_kill: bool
    ended: float = 0.0
    status: int | None = None

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines() if line.startswith('{"action"')]

    def actions(self, name: str) -> int:
        return sum(f"processor.runtime.worker:{name}:" in line for line in self.lines())

    def fencings(self) -> int:
        wanted = ("processor.runtime.worker:", "ExitProcess: ")
        lines = [line for line in self.lines() if any(word in line for word in wanted)]
        return sum(FENCED.search(line) is not None for line in lines)

    def recovery_s(self) -> float | None:
        """From the start of the loop to the first commit, where records waited for it."""
        first = [what for what in self.said() if what["action"] == "first_commit"]
        return float(first[0]["seconds"]) if first and first[0]["waited"] else None


@dataclass
class Keeper:
    """Keeps one worker running, whatever it dies of, as a supervisor does."""

    name: str
    folder: Path
    arguments: dict[str, Any]
    lives: list[Life] = field(default_factory=list)
    failpoint: list[Any] | None = None  # for the next start

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def send(self, signum: signal.Signals) -> None:
        with self._lock:
            if self._process.poll() is None:
                self._process.send_signal(signum)

    def freeze(self, seconds: float) -> None:
        process = self._process
        process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(seconds, process.send_signal, [signal.SIGCONT])
        timer.daemon = True
        timer.start()

    def stop(self) -> None:
        self._stopping.set()
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join(END_S)

    @property
    def kills(self) -> int:
        return sum(life.status == -signal.SIGKILL for life in self.lives)

    def _start(self) -> subprocess.Popen[bytes]:
        log = self.folder / f"worker-{self.name}-{len(self.lives)}.log"
        killed = bool(self.lives) and self.lives[-1].status == -signal.SIGKILL
        arguments = json.dumps(self.arguments | {"failpoint": self.failpoint})
        self.failpoint = None
        command = [sys.executable, "-m", "tests.kafka.soak_worker", arguments]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, cwd=ROOT, stderr=errors, stdout=errors)
        self.lives.append(Life(log, time.time(), killed))
        return process

    def _watch(self) -> None:
        while True:
            status = self._process.wait()
            with self._lock:
                self.lives[-1].ended, self.lives[-1].status = time.time(), status
                if self._stopping.is_set():
                    return
                self._process = self._start()
