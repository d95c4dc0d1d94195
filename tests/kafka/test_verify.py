"""`processor verify` on a real Kafka: a transactional producer plants what must be found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from processor.broker.kafka import KafkaSink, KafkaSource
from processor.broker.kafka_reader import KafkaReader
from processor.core.batch import Budget
from processor.core.decision import Outcome
from processor.core.event import Record
from processor.core.pipeline import Pipeline
from processor.core.policy import load_policy
from processor.runtime.telemetry import Counters
from processor.runtime.worker import Worker
from tests.core.builders import CharTokenizer, LengthScorer, any_size, write_policy
from tests.kafka.harness import CALL_S, KafkaHarness
from tests.runtime.world import SlowScorer, in_thread, inputs

pytestmark = pytest.mark.kafka
PARTITIONS = 2
Found = dict[str, Any]


@dataclass
class Stand:
    """A policy over topics of its own, and a producer that does what a worker never would."""

    harness: KafkaHarness
    folder: Path
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.input = self.harness.topic(PARTITIONS)
        self.output, self.dead = self.harness.topic(2), self.harness.topic(1)
        self.group = self.harness.group()
        topics = {"input": self.input, "output": self.output, "dead_letter": self.dead}
        self.policy = load_policy(write_policy(self.folder / "p", topics=topics, **self.changes))
        self.pipeline = Pipeline([self.policy], CharTokenizer(), LengthScorer(), Budget(200, 4))
        kafka = {"bootstrap_servers": self.harness.address, "group": self.group, "replica": "0"}
        self.settings = self.folder / "settings.yaml"
        self.settings.write_text(yaml.safe_dump({"policies": ["p"], "kafka": kafka}))
        self.producer = self.transactional("scorer")

    def transactional(self, name: str) -> Producer:
        client = {"bootstrap.servers": self.harness.address, "retry.backoff.ms": "5"}
        producer = Producer(client | {"transactional.id": f"{self.group}-{name}"})
        producer.init_transactions(CALL_S)
        return producer

    def fill(self, count: int = 40) -> list[Record]:
        """In transactions of ten, so that markers stand between the records and behind them; one
        more is aborted."""
        producer = self.transactional("sender")
        values = inputs(count)
        for begin in range(0, count + 1, 10):
            producer.begin_transaction()
            for n, value in enumerate(values[begin : begin + 10] or [b"aborted"], begin):
                producer.produce(self.input, value, b"%d" % n, n % PARTITIONS)
            if begin < count:
                producer.commit_transaction(CALL_S)
            else:
                producer.flush(CALL_S)
                producer.abort_transaction(CALL_S)
        return self.harness.read(self.input)

    def outcomes(self, records: Sequence[Record]) -> list[tuple[Record, Outcome]]:
        return list(zip(records, self.pipeline.run(records, time.monotonic), strict=True))

    def publish(
        self,
        outcomes: Sequence[tuple[Record, Outcome]],
        offsets: dict[int, int],
        producer: Producer | None = None,
        commit: bool = True,
    ) -> None:
        """One transaction: outcomes and offsets as they are told, whether or not they agree."""
        producer = producer or self.producer
        producer.begin_transaction()
        for record, outcome in outcomes:
            _, made = self.pipeline.encode(outcome, record, any_size)
            if made is not None:
                headers: Any = list(made.headers)
                producer.produce(made.topic, made.value, made.key, headers=headers)
        if offsets:
            consumer = Consumer({"bootstrap.servers": self.harness.address, "group.id": self.group})
            positions = [TopicPartition(self.input, p, offset) for p, offset in offsets.items()]
            metadata = consumer.consumer_group_metadata()
            producer.send_offsets_to_transaction(positions, metadata, CALL_S)
            consumer.close()
        assert producer.flush(CALL_S) == 0
        if commit:
            producer.commit_transaction(CALL_S)

    def ends(self) -> dict[int, int]:
        return {p: self.harness.end_offset(self.input, p) for p in range(PARTITIONS)}

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "processor.cli", "verify", str(self.settings), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={name: value for name, value in os.environ.items() if "PROCESSOR_" not in name},
        )

    def verify(self, status: int, *arguments: str) -> tuple[Found, str]:
        done = self.command("--json", *arguments)
        assert done.returncode == status, done.stderr
        found: Found = json.loads(done.stdout)
        keys = ["input", "decided", "rejected", "lost", "doubled", "reordered", "committed"]
        assert list(found) == keys
        return found, done.stderr


MakeStand = Callable[..., Stand]


@pytest.fixture
def make_stand(harness: KafkaHarness, tmp_path: Path) -> MakeStand:
    return lambda **changes: Stand(harness, tmp_path, changes)


def faults(found: Found) -> tuple[int, int, int]:
    return found["lost"], found["doubled"], found["reordered"]


def test_a_clean_run_behind_markers(make_stand: MakeStand) -> None:
    stand = make_stand()
    made = stand.outcomes(stand.fill())
    before, _ = stand.verify(0)
    assert before == {**dict.fromkeys(before, 0), "input": 40, "committed": False}
    for begin in range(0, 40, 8):
        stand.publish(made[begin : begin + 8], {})
    torn, errors = stand.verify(1)
    assert faults(torn) == (0, 40, 0)
    assert "torn transaction" in errors
    stand.publish([], stand.ends())
    found, errors = stand.verify(0)
    rejected = found["rejected"]
    assert rejected > 0
    counts = {"input": 40, "decided": 40 - rejected, "rejected": rejected}
    assert found == {**dict.fromkeys(found, 0), **counts, "committed": True}
    assert errors == ""
    table = stand.command()
    assert table.returncode == 0
    assert "orders" in table.stdout
    assert "waiting" in table.stdout


def test_a_loss_a_duplicate_and_an_exchange(make_stand: MakeStand) -> None:
    stand = make_stand()
    made = stand.outcomes(stand.fill())
    lost, doubled = made[3][0], made[7][0]
    kept = [item for item in made if item[0] is not lost]
    stand.publish(kept, stand.ends())
    stand.publish([item for item in made if item[0] is doubled], {})
    found, errors = stand.verify(1)
    assert faults(found) == (1, 1, 0)
    assert found["committed"]
    assert f"lost: {stand.input}[{lost.partition}]@{lost.offset}: no outcome" in errors
    assert f"one more outcome of {stand.input}[{doubled.partition}]@{doubled.offset}" in errors


def test_outcomes_out_of_order(make_stand: MakeStand) -> None:
    stand = make_stand()
    made = stand.outcomes(stand.fill(10))
    backwards = [(record, outcome) for record, outcome in reversed(made)]
    stand.publish([(_with_key(record), outcome) for record, outcome in backwards], stand.ends())
    found, errors = stand.verify(1)
    assert faults(found)[:2] == (0, 0)
    assert found["reordered"] >= 4
    assert "comes after" in errors


def test_a_transaction_that_stays_open_is_an_error(make_stand: MakeStand) -> None:
    stand = make_stand()
    made = stand.outcomes(stand.fill(10))
    stand.publish(made, stand.ends())
    other = stand.transactional("other")
    other.begin_transaction()
    other.produce(stand.dead, b"unfinished", partition=0)
    assert other.flush(CALL_S) == 0
    done = stand.command("--json", "--timeout", "1.5")
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.strip().splitlines()
    assert line.startswith(f"{stand.dead}[0]: a transaction has been open at offset ")
    assert "--timeout" in line
    threading.Timer(2.0, lambda: other.abort_transaction(CALL_S)).start()
    found, _ = stand.verify(0)  # waits
    assert faults(found) == (0, 0, 0)


def test_offsets_that_are_being_committed_are_waited_for(make_stand: MakeStand) -> None:
    stand = make_stand()
    made = stand.outcomes(stand.fill(10))
    stand.publish(made, stand.ends(), commit=False)
    done = stand.command("--json", "--timeout", "1.5")
    assert done.returncode == 1
    [line] = done.stderr.strip().splitlines()
    assert line.startswith(f"offsets of group {stand.group}: not known after")
    threading.Timer(2.0, lambda: stand.producer.commit_transaction(CALL_S)).start()
    found, _ = stand.verify(0)
    assert found["committed"]
    assert found["input"] == 10


def test_a_group_at_work_and_a_manifest(make_stand: MakeStand, tmp_path: Path) -> None:
    """Audited again and again while a worker runs, and at the end against what was sent."""
    stand = make_stand()
    given = stand.fill(400)
    settings = stand.harness.settings(stand.group, "0")
    pipeline = Pipeline([stand.policy], CharTokenizer(), SlowScorer(seconds=0.02), Budget(200, 4))
    worker = Worker(pipeline, KafkaSource(settings, [stand.input]), KafkaSink(settings), Counters())
    running = in_thread(worker)
    moments = []
    while not (found := stand.verify(0)[0])["committed"]:
        moments.append(found["decided"])
        assert len(moments) < 60, "the group does not reach the end"
    running.stop()
    assert found["input"] == found["decided"] + found["rejected"] == 400
    assert moments == sorted(moments)
    lines = [{"topic": r.topic, "partition": r.partition, "offset": r.offset} for r in given]
    file = tmp_path / "sent.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert stand.verify(0, "--manifest", str(file))[0] == found
    never = {"topic": stand.input, "partition": 0, "offset": 23}  # a marker: nothing can be there
    assert never not in lines
    file.write_text("\n".join(map(json.dumps, [*lines, never])))
    found, errors = stand.verify(1, "--manifest", str(file))
    assert faults(found) == (1, 0, 0)
    assert f"lost: {stand.input}[0]@23" in errors


@pytest.mark.parametrize("treatment", ["pass", "skip"])
def test_tombstones_and_foreign_records(make_stand: MakeStand, treatment: str) -> None:
    stand = make_stand(event={"tombstones": treatment})
    records = stand.fill(40)
    tombstones = sum(record.value is None for record in records)
    assert tombstones > 0
    stand.publish(stand.outcomes(records), stand.ends())
    found, _ = stand.verify(0)
    assert found["decided"] + found["rejected"] == 40 - tombstones
    stand.harness.append(stand.output, 1, b"k", b"hello")
    found, errors = stand.verify(1)
    assert faults(found) == (0, 1, 0)
    assert f"{stand.output}[1]@" in errors
    assert "an outcome of nothing: not ours" in errors


def test_what_was_deleted_is_no_alarm(make_stand: MakeStand) -> None:
    stand = make_stand()
    made = stand.outcomes(stand.fill())
    stand.publish(made, stand.ends())
    delete(stand.harness.address, stand.input, 0, 10)
    found, errors = stand.verify(0)
    assert found["input"] == 40 - sum(r.partition == 0 and r.offset < 10 for r, _ in made)
    assert "nothing is known" not in errors
    delete(stand.harness.address, stand.output, 0, 5)
    found, errors = stand.verify(0)
    assert "nothing is known" in errors


def test_records_deleted_while_they_are_read(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start that was looked up is gone by the time of the first fetch."""
    stand = make_stand()
    given = stand.fill()
    delete(stand.harness.address, stand.input, 0, 10)
    asked = KafkaReader.offsets
    stale = [{(stand.input, 0): 0, (stand.input, 1): 0}]
    monkeypatch.setattr(KafkaReader, "offsets", lambda *a: stale.pop() if stale else asked(*a))
    with closing(KafkaReader(stand.harness.settings(stand.group, "0"), CALL_S)) as reader:
        ends = {(stand.input, p): end for p, end in stand.ends().items()}
        found = [(r.partition, r.offset) for r in reader.read(ends)]
    assert stale == []
    kept = [(r.partition, r.offset) for r in given if r.partition == 1 or r.offset >= 10]
    assert sorted(found) == kept


def test_mistakes_are_named(make_stand: MakeStand, tmp_path: Path) -> None:
    stand = make_stand()
    done = stand.command("--policy", "weather")
    assert (done.returncode, "use one of: orders" in done.stderr) == (2, True)
    for line in ('{"topic": "x"}', '{"topic": "x", "partition": 0, "offset": 1.5}', "[]"):
        (tmp_path / "bad.jsonl").write_text(f"\n{line}\n")
        done = stand.command("--manifest", str(tmp_path / "bad.jsonl"))
        assert (done.returncode, "line 2" in done.stderr) == (2, True)
    file = stand.folder / "p" / "policy.yaml"
    text = file.read_text()
    file.write_text(text.replace(stand.dead, f"{stand.dead}-none"))
    done = stand.command()
    assert done.returncode == 2
    assert f"{stand.dead}-none" in done.stderr
    assert "no such topics" in done.stderr


def delete(address: str, topic: str, partition: int, below: int) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    for future in admin.delete_records([TopicPartition(topic, partition, below)]).values():
        future.result(CALL_S)


def _with_key(record: Record) -> Record:
    """All outcomes to one output partition."""
    return Record(record.topic, record.partition, record.offset, b"same", record.value)
