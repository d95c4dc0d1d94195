"""`processor run` as users start it: a process, a settings file, two topics of a real Kafka."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from processor.core.encode import REJECTION_HEADER
from processor.demo.damage import DAMAGES, reason
from processor.demo.orders import orders
from tests.engine.conftest import text_policy
from tests.engine.tiny import save_tiny_model
from tests.kafka.harness import KafkaHarness

pytestmark = pytest.mark.kafka
RECORDS = 200


def test_run_between_two_topics(harness: KafkaHarness, tmp_path: Path) -> None:
    topics = {name: harness.topic(2) for name in ("input", "output", "dead_letter")}
    folder = text_policy(tmp_path, "mail", ["ok", "fraud"])
    spec: dict[str, Any] = yaml.safe_load((folder / "policy.yaml").read_text())
    (folder / "policy.yaml").write_text(yaml.safe_dump(spec | {"topics": topics}))
    group = harness.group()
    settings = {
        "policies": ["mail"],
        "model": {"source": str(save_tiny_model(tmp_path / "model")), "dtype": "float32"},
        "kafka": {"bootstrap_servers": harness.address, "group": group, "replica": "0"},
    }
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    sent, damaged = fill(harness, topics["input"])

    with start(tmp_path / "settings.yaml") as worker:
        try:
            await_end(harness, worker, group, topics["input"])
            worker.send_signal(signal.SIGTERM)
            _, errors = worker.communicate(timeout=30)
        finally:
            worker.kill()
    assert worker.returncode == 0, errors

    outputs = harness.read(topics["output"])
    decisions = [json.loads(r.value or b"") for r in outputs]
    letters = harness.read(topics["dead_letter"])
    rejections = [json.loads(dict(r.headers)[REJECTION_HEADER] or b"") for r in letters]
    seen = [(o["event"]["partition"], o["event"]["offset"]) for o in [*decisions, *rejections]]
    assert sorted(seen) == sorted(sent)
    assert {(r["event"]["partition"], r["event"]["offset"]): r["reason"] for r in rejections} == {
        place: reason(name) for place, name in damaged.items()
    }
    for lane in ((i, o) for i in (0, 1) for o in (0, 1)):  # from an input to an output partition
        events = [d["event"] for d in decisions]
        both = zip(events, outputs, strict=True)
        own = [e["offset"] for e, r in both if (e["partition"], r.partition) == lane]
        assert own == sorted(own)
        assert own
    assert all(dict(r.headers)["trace"] == r.key for r in outputs)


def test_missing_topics_are_named_before_anything_starts(
    harness: KafkaHarness, tmp_path: Path
) -> None:
    text_policy(tmp_path, "mail", ["ok", "fraud"])
    settings = {"policies": ["mail"], "kafka": {"bootstrap_servers": harness.address}}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    with start(tmp_path / "settings.yaml") as worker:
        _, errors = worker.communicate(timeout=60)
    assert worker.returncode == 2
    assert "mail.dlq" in errors
    assert "create them first" in errors


def test_generate_into_a_topic(harness: KafkaHarness) -> None:
    topic = harness.topic(2)
    arguments = ["orders", "--count", "25", "--rate", "500", "--to", f"topic:{topic}"]
    subprocess.run(
        [sys.executable, "-m", "processor.cli", "generate", *arguments],
        check=True,
        env=os.environ | {"PROCESSOR_KAFKA__BOOTSTRAP_SERVERS": harness.address},
    )
    stream = orders(1)
    expected = {item.key: item.event for item in (next(stream) for _ in range(25))}
    records = harness.read(topic)
    found = {(r.key or b"").decode(): orjson.loads(r.value or b"") for r in records}
    assert found == expected
    assert len(records) == 25


def fill(
    harness: KafkaHarness, topic: str
) -> tuple[list[tuple[int, int]], dict[tuple[int, int], str]]:
    """Send records to two partitions, each kind of damage among them; their coordinates."""
    kinds = list(DAMAGES)
    damaged: dict[tuple[int, int], str] = {}
    sent = []
    for number in range(RECORDS):
        place = (number % 2, number // 2)
        value: bytes | None = orjson.dumps({"text": f"see you {number}"})
        if number % 8 == 3 and number // 8 < len(kinds):
            damaged[place] = kinds[number // 8]
            value = DAMAGES[damaged[place]](value or b"")
        headers = (("trace", str(number).encode()),)
        harness.append_later(topic, place[0], str(number).encode(), value, headers)
        sent.append(place)
    harness.flush()
    assert len(damaged) == len(kinds)
    return sent, damaged


def start(settings: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "processor.cli", "run", "--settings", str(settings)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={name: value for name, value in os.environ.items() if "PROCESSOR_" not in name},
    )


def await_end(harness: KafkaHarness, worker: subprocess.Popen[str], group: str, topic: str) -> None:
    deadline = time.monotonic() + 120
    while [harness.committed(group, topic, p) for p in (0, 1)] != [RECORDS // 2] * 2:
        assert worker.poll() is None, worker.communicate()[1]
        assert time.monotonic() < deadline, "the group does not reach the end"
        time.sleep(0.3)
