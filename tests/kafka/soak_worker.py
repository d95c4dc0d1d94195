"""A worker of the soak, as a process: `python -m tests.kafka.soak_worker JSON`.

It says on standard error when it begins, when its first transaction has committed, and whether
that one held records which had been waiting for it: only then is the time between the two one of
recovery.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from processor.broker.kafka import KafkaSink, KafkaSource
from processor.core.batch import Budget, MicroBatch
from processor.core.decision import Outcome, Scores
from processor.core.event import Record
from processor.core.pipeline import Pipeline
from processor.core.policy import load_policy
from processor.kafka_settings import KafkaSettings
from processor.runtime.telemetry import Counters
from processor.runtime.watchdog import Watchdog
from processor.runtime.worker import Limits, Worker, install_signal_handlers
from tests.core.builders import CharTokenizer, LengthScorer

CALLS = ("begin_transaction", "produce", "send_offsets", "commit_transaction")


class MortalSink(KafkaSink):
    """Kills its process right before or after one of its calls, of which `left` succeed."""

    def __init__(self, settings: KafkaSettings, failpoint: list[Any] | None) -> None:
        super().__init__(settings)
        self._name, self._left, self._before = failpoint or ["", 0, False]

    def _call(self, name: str, *args: Any) -> None:
        due = name == self._name and self._left <= 0
        if due and self._before:
            die()
        super()._call(name, *args)
        if due:
            self._producer.poll(0.02)  # let what was produced get out
            die()
        self._left -= name == self._name


class SteadyScorer(LengthScorer):
    """A model that takes its time for every event."""

    seconds_per_event = 0.002

    def score(self, batch: MicroBatch) -> list[Scores]:
        time.sleep(len(batch) * self.seconds_per_event)
        self.batches.clear()
        return super().score(batch)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(action: str, **values: Any) -> None:
    print(json.dumps({"action": action, **values}), file=sys.stderr, flush=True)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    settings = KafkaSettings(**arguments["settings"])
    policy = load_policy(Path(arguments["policy"]))
    pipeline = Pipeline([policy], CharTokenizer(), SteadyScorer(), Budget(1_000_000, 750))
    begun = time.time()
    first: list[float] = []

    def seen(record: Record, _outcome: Outcome) -> None:
        if not first:
            first.append(time.time())
            waited = record.timestamp_ms / 1000 < begun
            say("first_commit", seconds=round(first[0] - begun, 3), waited=waited)

    worker = Worker(
        pipeline,
        KafkaSource(settings, [policy.spec.topics.input]),
        MortalSink(settings, arguments["failpoint"]),
        Counters(),
        on_outcome=seen,
        publish_s=settings.publish_timeout_ms / 1000,
        drain_s=5.0,
        limits=Limits(hang_s=30.0, score_s=30.0, stall_s=60.0),
    )
    install_signal_handlers(worker)
    Watchdog(worker.hangs).start()
    worker.run()
    say("ended")


if __name__ == "__main__":
    main()
