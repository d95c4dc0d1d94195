"""A worker as a process of its own, to be killed: `python -m tests.kafka.worker_process JSON`.

The argument holds the settings of the client, the policy's folder, and optionally the seconds to
drain, the worker's limits, what is wrong with the scorer, and a failpoint: the name of a call of
the sink, and how often it succeeds before the process kills itself right after.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processor.broker.kafka import KafkaSink, KafkaSource
from processor.core.batch import Budget, MicroBatch
from processor.core.decision import Scores
from processor.core.pipeline import Pipeline
from processor.core.policy import load_policy
from processor.kafka_settings import KafkaSettings
from processor.runtime.telemetry import Counters
from processor.runtime.watchdog import Watchdog
from processor.runtime.worker import Limits, Worker, install_signal_handlers
from tests.core.builders import CharTokenizer
from tests.runtime.world import SlowScorer


class SuicidalSink(KafkaSink):
    failpoint: str | None = None
    left = 0

    def _call(self, name: str, *args: Any) -> None:
        super()._call(name, *args)
        if name == self.failpoint:
            if self.left == 0:
                self._producer.poll(0.05)  # let what was produced get out
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1


@dataclass
class FaultyScorer(SlowScorer):
    """Raises for each event that holds `poison`, hangs at one that holds `hang`, and has memory
    for so many events at a time."""

    poison: str | None = None
    hang: str | None = None
    memory: int | None = None

    def score(self, batch: MicroBatch) -> list[Scores]:
        text = "".join(map(chr, (token for s in batch.suffixes for token in s.token_ids)))
        if self.memory is not None and len(batch) > self.memory:
            raise MemoryError
        if self.poison is not None and self.poison in text:
            raise RuntimeError("poisoned")
        if self.hang is not None and self.hang in text:
            time.sleep(3600)
        return super().score(batch)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    settings = KafkaSettings(**arguments["settings"])
    policy = load_policy(Path(arguments["policy"]))
    scorer = FaultyScorer(**{"seconds": 0.05} | arguments.get("scorer", {}))
    pipeline = Pipeline([policy], CharTokenizer(), scorer, Budget(200, 8))
    sink = SuicidalSink(settings)
    sink.failpoint, sink.left = arguments.get("failpoint", (None, 0))
    source = KafkaSource(settings, [policy.spec.topics.input])
    worker = Worker(
        pipeline,
        source,
        sink,
        Counters(),
        drain_s=arguments.get("drain_s", 20.0),
        publish_s=settings.publish_timeout_ms / 1000,
        limits=Limits(**arguments.get("limits", {})),
    )
    install_signal_handlers(worker)
    watchdog = Watchdog(worker.hangs)
    watchdog.start()
    worker.run()
    watchdog.stop()


if __name__ == "__main__":
    main()
