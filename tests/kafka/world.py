"""Topics, a policy and workers on a real broker, and what became of the records."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from processor.broker.kafka import KafkaSink, KafkaSource
from processor.core.batch import Budget
from processor.core.pipeline import Pipeline, Scorer
from processor.core.policy import load_policy
from processor.kafka_settings import KafkaSettings
from processor.runtime.telemetry import Counters
from processor.runtime.worker import Worker
from tests.core.builders import CharTokenizer, write_policy
from tests.kafka.harness import KafkaHarness
from tests.runtime.world import Running, SlowScorer, in_thread, inputs, judge

PATIENCE_S = 90.0


class KafkaWorld:
    """Its workers reach the broker by `address`; it looks on by the harness's own."""

    def __init__(
        self,
        harness: KafkaHarness,
        folder: Path,
        partitions: int = 2,
        address: str | None = None,
        source: str | None = None,
        **policy: Any,
    ) -> None:
        """`source`: an input topic that is there already; `policy`: changes to the usual one."""
        self.harness, self.folder, self.partitions = harness, folder, partitions
        self.address = address or harness.address
        self.input = source or harness.topic(partitions)
        self.output, self.dead = harness.topic(), harness.topic()
        self.group = harness.group()
        topics = {"input": self.input, "output": self.output, "dead_letter": self.dead}
        write_policy(folder, topics=topics, **policy)
        self.policy = load_policy(folder)
        self.given = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self.running: list[Running] = []

    def fill(self, count: int, damaged_every: int = 5) -> None:
        for n, value in enumerate(inputs(count, damaged_every)):
            self.harness.append_later(self.input, n % self.partitions, b"%d" % n, value)
        self.harness.flush()
        self.given += count

    def settings(self, replica: str = "0", **changes: Any) -> KafkaSettings:
        values = {"bootstrap_servers": self.address} | changes
        return self.harness.settings(self.group, replica, **values)

    def worker(
        self,
        replica: str = "0",
        sink: KafkaSink | None = None,
        source: KafkaSource | None = None,
        scorer: Scorer | None = None,
        changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> Worker:
        """With `changes` to the settings, and `options` of the worker."""
        pipeline = Pipeline([self.policy], CharTokenizer(), scorer or SlowScorer(), Budget(200, 8))
        settings = self.settings(replica, **changes or {})
        source = source or KafkaSource(settings, [self.input])
        options.setdefault("counters", Counters())
        options.setdefault("publish_s", settings.publish_timeout_ms / 1000)
        return Worker(pipeline, source, sink or KafkaSink(settings), **options)

    def start(self, worker: Worker) -> Running:
        running = in_thread(worker)
        self.running.append(running)
        return running

    def process(
        self,
        changes: dict[str, Any] | None = None,
        errors: IO[bytes] | None = None,
        **arguments: Any,
    ) -> subprocess.Popen[bytes]:
        settings = self.settings(**changes or {}).model_dump(mode="json")
        text = json.dumps({"settings": settings, "policy": str(self.folder), **arguments})
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kafka.worker_process", text],
            cwd=Path(__file__).parents[2],
            stderr=errors,
        )
        self.processes.append(process)
        return process

    def outcomes(self) -> int:
        return sum(len(self.harness.read(topic)) for topic in (self.output, self.dead))

    def await_outcomes(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (seen := self.outcomes()) < count:
            assert time.monotonic() < deadline, f"{seen} of {count} outcomes"
            for running in self.running:
                assert running.errors == []
            time.sleep(0.1)

    def await_all(self) -> None:
        self.await_outcomes(self.given)

    def committed(self) -> list[int]:
        """How far the group has come in each partition."""
        found = self.harness.committed_offsets(self.group, self.input, range(self.partitions))
        return [offset or 0 for offset in found]

    def ends(self) -> list[int]:
        return [self.harness.end_offset(self.input, p) for p in range(self.partitions)]

    def await_progress(self, records: int = 100) -> None:
        """Until so many more have been committed: somebody is at work."""
        wanted = sum(self.committed()) + records
        await_(lambda: sum(self.committed()) >= wanted, self._position)

    def await_end(self) -> None:
        await_(lambda: self.committed() == self.ends(), self._position)

    def _position(self) -> str:
        return f"the group stands at {self.committed()} of {self.ends()}"

    def verify(self) -> None:
        read = self.harness.read
        judge(read(self.input), read(self.output), read(self.dead))
        assert self.committed() == self.ends()

    def close(self) -> None:
        for running in self.running:
            running.worker.stop()
        for process in self.processes:
            process.kill()
            process.wait()
        for running in self.running:
            running.thread.join(PATIENCE_S)


def await_(condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.2)
