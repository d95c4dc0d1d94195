"""How fast records go through, on a real broker: `python -m tests.kafka.rates`.

Every rate is measured in the same run as the bare client loop, by which it can be judged: consume,
produce, send offsets, commit, 750 records a transaction, nothing in between. The rates of several
rounds are taken in turns, and the median of each counts. Records are 1 KB of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from processor.broker.kafka import KafkaSink, KafkaSource
from processor.broker.kafka_config import consumer_config, transactional_config
from processor.config import load_settings
from processor.core.batch import Budget, MicroBatch
from processor.core.decision import Outcome, Scores
from processor.core.event import Record
from processor.core.pipeline import Pipeline, Prepared, TokenIds, Tokenizer
from processor.core.policy import Policy, load_policy
from processor.errors import RejectRecord
from processor.runtime import worker as worker_module
from processor.runtime.telemetry import Counters
from processor.runtime.worker import Worker
from processor.wiring import load_engine
from tests.core.builders import PROVENANCE, write_policy
from tests.kafka.cluster import kafka
from tests.kafka.harness import KafkaHarness

PARTITIONS = 4
OWN_CONFIG = {"client": {}, "session_timeout_ms": 12_000}


class NoTokens:
    """As many tokens as an event of 1 KB has, at no cost."""

    ids = tuple(range(150))

    def encode_all(self, policy: str, texts: Sequence[str]) -> list[TokenIds | RejectRecord]:
        return [self.ids] * len(texts)

    def rows(self, policy: str, tokens: int) -> int:
        return tokens + 3


class NoModel:
    scores = Scores((-0.1, -3.0, -5.0))

    def score(self, batch: MicroBatch) -> list[Scores]:
        return [self.scores] * len(batch)

    def provenance(self, policy: str) -> Any:
        return PROVENANCE


def event(number: int) -> bytes:
    body = {
        "id": number,
        "amount": 12.5 + number % 100,
        "note": "card present, chip read, same device as the last forty orders of this buyer; "
        * 11,
        "buyer": {"name": f"buyer {number % 977}", "age": 20 + number % 60},
    }
    return json.dumps(body).encode()


class TimedSource(KafkaSource):
    """Knows when it gave out its first record: assignments take their time."""

    begun = 0.0

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        records = super().poll(max_records, timeout_s)
        self.begun = self.begun or (time.monotonic() if records else 0.0)
        return records


class Bench:
    def __init__(self, address: str, folder: Path, records: int) -> None:
        self.harness = KafkaHarness(address)
        self.records = records
        self.folder = folder
        self.input = self.harness.topic(PARTITIONS)
        self.output, self.dead = self.harness.topic(PARTITIONS), self.harness.topic()
        self.policy = self.policy_of(folder / "policy")
        for n in range(records):
            self.harness.append_later(self.input, n % PARTITIONS, b"%d" % n, event(n))
            if n % 5000 == 0:
                self.harness.flush()
        self.harness.flush()

    def policy_of(self, folder: Path, **changes: Any) -> Policy:
        topics = {"input": self.input, "output": self.output, "dead_letter": self.dead}
        return load_policy(write_policy(folder, topics=topics, **changes))

    def settings(self) -> Any:
        return self.harness.settings(self.harness.group(), "0", **OWN_CONFIG)

    def bare(self, per_transaction: int = 750) -> float:
        """Records a second of a loop that does nothing but what exactly-once needs."""
        settings = self.settings()

        consumer = Consumer(consumer_config(settings) | {"auto.offset.reset": "earliest"})
        consumer.subscribe([self.input])
        producer = Producer(transactional_config(settings))
        producer.init_transactions(20)
        done, begun, value = 0, 0.0, b"x" * 800
        while done < self.records:
            found = [m for m in consumer.consume(per_transaction, 0.05) if m.error() is None]
            begun = begun or (time.monotonic() if found else 0.0)
            if found:
                producer.begin_transaction()
                for message in found:
                    producer.produce(self.output, value, message.key())
                offsets = {
                    (str(m.topic()), m.partition() or 0): (m.offset() or 0) + 1 for m in found
                }
                producer.send_offsets_to_transaction(
                    [TopicPartition(*p, o) for p, o in offsets.items()],
                    consumer.consumer_group_metadata(),
                )
                producer.commit_transaction(20)
                done += len(found)
        seconds = time.monotonic() - begun
        consumer.close()
        return self.records / seconds

    def ours(
        self,
        tokenizer: Tokenizer | None = None,
        scorer: Any = None,
        budget: Budget | None = None,
        records: int | None = None,
    ) -> tuple[float, Counters]:
        """Records a second of the worker, from its first poll with records to its last commit."""
        settings, counters = self.settings(), Counters()
        pipeline = Pipeline(
            [self.policy],
            tokenizer or NoTokens(),
            scorer or NoModel(),
            budget or Budget(100_000, 256),
        )
        source, sink = TimedSource(settings, [self.input]), KafkaSink(settings)
        committed: list[float] = []

        def count(_record: Record, _outcome: Outcome) -> None:
            committed.append(time.monotonic())

        worker = Worker(pipeline, source, sink, counters, on_outcome=count)
        worker.run(until=lambda: len(committed) >= (records or self.records))
        return len(committed) / (committed[-1] - source.begun), counters

    def latency(self, events: int, pause_s: float) -> list[float]:
        """Milliseconds from the producer's clock to the return of the commit, one event at a
        time, with a scorer that costs nothing."""
        policy_topics = {"input": self.harness.topic(1), "output": self.output}
        policy = load_policy(
            write_policy(self.folder / "latency", topics=policy_topics | {"dead_letter": self.dead})
        )
        settings = self.settings()
        found: list[float] = []

        def seen(record: Record, _outcome: Outcome) -> None:
            found.append(1e3 * time.time() - float(dict(record.headers)["sent"] or b"0"))

        pipeline = Pipeline([policy], NoTokens(), NoModel(), Budget(100_000, 32))
        topic = policy.spec.topics.input
        worker = Worker(
            pipeline,
            KafkaSource(settings, [topic]),
            KafkaSink(settings),
            Counters(),
            on_outcome=seen,
        )
        producer = Producer({"bootstrap.servers": self.harness.address, "linger.ms": 0})
        due, given = time.monotonic() + 3.0, 0

        def feed() -> bool:
            nonlocal due, given
            if given < events and time.monotonic() >= due:
                stamp = b"%.3f" % (1e3 * time.time())
                producer.produce(topic, event(given), b"k", headers=[("sent", stamp)])
                producer.poll(0)
                given, due = given + 1, time.monotonic() + pause_s
            return len(found) >= events

        worker.run(until=feed)
        return found[5:]


def in_turns(rounds: int, **ways: Callable[[], float]) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
            print(f"{number}: {name}: {found[name][-1]:,.1f} records/s", file=sys.stderr)
    return {name: round(statistics.median(rates), 2) for name, rates in found.items()}


def small_transactions(bench: Bench) -> float:
    """At most one micro-batch of 32 in flight, so that each has a transaction of its own."""
    before = worker_module.IN_FLIGHT
    worker_module.IN_FLIGHT = 1
    try:
        return bench.ours(budget=Budget(100_000, 32))[0]
    finally:
        worker_module.IN_FLIGHT = before


def with_engine(bench: Bench, records: int, rounds: int) -> dict[str, Any]:
    """The packaged model: how many events a second it scores by itself in micro-batches of 16,
    and in the worker; and the worker with its tokenizer alone."""
    model = load_settings(None, {}).model
    tokenizer, scorer, note = load_engine(model, [bench.policy])
    pipeline = Pipeline([bench.policy], tokenizer, scorer, Budget(2**20, 16))
    values = [event(n) for n in range(records)]
    items = [pipeline.prepare(Record(bench.input, 0, n, b"k", v)) for n, v in enumerate(values)]
    ready = [item for item in items if isinstance(item, Prepared)]

    def alone() -> float:
        begun = time.monotonic()
        for batch in pipeline.pack(ready):
            pipeline.score(batch)
        return len(ready) / (time.monotonic() - begun)

    def in_worker() -> float:
        return bench.ours(tokenizer, scorer, Budget(2**20, 16), records)[0]

    tokens = in_turns(rounds, worker_tokenizer=lambda: bench.ours(tokenizer)[0])
    return tokens | in_turns(rounds, engine=alone, worker_engine=in_worker) | {"engine_note": note}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", type=int, default=0, help="also this many events by the model")
    chosen = parser.parse_args()
    with kafka() as address, tempfile.TemporaryDirectory() as folder:
        bench = Bench(address, Path(folder), chosen.records)
        ways: dict[str, Callable[[], float]] = {
            "bare_750": bench.bare,
            "worker": lambda: bench.ours()[0],
            "worker_32": lambda: bench.ours(budget=Budget(100_000, 32))[0],
            "worker_32_alone": lambda: small_transactions(bench),
        }
        found: dict[str, Any] = in_turns(chosen.rounds, **ways)
        ms = sorted(bench.latency(400, 0.05))
        found["latency_ms"] = {"p50": round(ms[len(ms) // 2], 2), "p99": round(ms[-4], 2)}
        if chosen.engine:
            found |= with_engine(bench, chosen.engine, chosen.rounds)
        print(json.dumps(found, indent=2))
        bench.harness.close()


if __name__ == "__main__":
    main()
