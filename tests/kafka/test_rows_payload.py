"""What producers may send, and what topics do not take. Names begin with the row of public failures
that a test stands for; docs/delivery.md lists them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from processor.broker.kafka import KafkaSink
from processor.broker.kafka_admin import check_cluster
from processor.core.encode import REJECTION_HEADER, TOMBSTONE_HEADER
from processor.core.event import Record
from processor.errors import ConfigError, ExitProcess
from tests.kafka.admin import Operator, memory
from tests.kafka.conftest import Worlds
from tests.kafka.harness import CALL_S, KafkaHarness
from tests.kafka.world import PATIENCE_S, KafkaWorld, await_
from tests.runtime.world import coordinates, event, in_thread, judge, judged

pytestmark = pytest.mark.kafka

BADLY_KEYED = b"\x83"


@pytest.fixture
def world(harness: KafkaHarness, tmp_path: Path) -> Iterator[KafkaWorld]:
    world = KafkaWorld(harness, tmp_path)
    yield world
    world.close()


def run_through(world: KafkaWorld, sink: KafkaSink | None = None) -> dict[str, int]:
    """To the end of the input; the rejections by reason."""
    running = world.start(world.worker(sink=sink))
    await_end(world)
    running.stop()
    return running.worker._counters.snapshot().rejections


def await_end(world: KafkaWorld) -> None:
    def ended() -> bool:
        for running in world.running:
            assert running.errors == []
        return world.committed() == world.ends()

    await_(ended, lambda: f"the group stands at {world.committed()} of {world.ends()}")


def reason(letter: Record) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dict(letter.headers)[REJECTION_HEADER] or b"")
    return found


@pytest.mark.parametrize("treatment", ["skip", "pass", "reject"])
def test_c1_values_and_keys_that_are_null(
    harness: KafkaHarness, worlds: Worlds, treatment: str
) -> None:
    """confluent-kafka-python#189: a tombstone is false as a condition."""
    world = worlds(event={"tombstones": treatment})
    for partition in (0, 1):
        for key, value in [(b"k", None), (None, None), (None, event(1)), (b"k", b"")]:
            harness.append_later(world.input, partition, key, value)
    harness.flush()
    rejections = run_through(world)
    given, output, dead = (harness.read(t) for t in (world.input, world.output, world.dead))
    tombstones = {coordinates(r) for r in given if r.value is None}
    if treatment == "reject":
        judge(given, output, dead)
        assert rejections == {"tombstone": 4, "empty_payload": 2}
        return
    passed = [r for r in output if r.value is None]
    decisions = [r for r in output if r.value is not None]
    judge([r for r in given if r.value is not None], decisions, dead)
    assert rejections == {"empty_payload": 2}
    places = [json.loads(dict(r.headers)[TOMBSTONE_HEADER] or b"")["event"] for r in passed]
    found = [(p["topic"], p["partition"], p["offset"]) for p in places]
    assert sorted(found) == (sorted(tombstones) if treatment == "pass" else [])


def test_c3_bytes_that_are_no_text(world: KafkaWorld) -> None:
    """napalm-logs#390: consumption stops at a key or value that is not UTF-8. Both are kept byte
    for byte (`judge` compares the values)."""
    for n, value in enumerate([b"\xff\xfe", event(1), b"\x80", b'"\xc3\x28"']):
        world.harness.append(world.input, n % 2, BADLY_KEYED, value)
    assert run_through(world) == {"byte_order_mark": 1, "not_utf8": 2}
    world.verify()
    published = world.harness.read(world.output) + world.harness.read(world.dead)
    assert {record.key for record in published} == {BADLY_KEYED}
    assert {reason(r)["event"]["key_encoding"] for r in world.harness.read(world.dead)} == {
        "base64"
    }


def test_c4_one_poisoned_record_among_100(world: KafkaWorld) -> None:
    """vertx-kafka#220: fetched again for ever."""
    for n in range(100):
        value = b'{"id": 1, "id": 2}' if n == 37 else event(n)
        world.harness.append_later(world.input, n % 2, b"%d" % n, value)
    world.harness.flush()
    assert run_through(world) == {"duplicate_key": 1}
    world.verify()
    assert len(world.harness.read(world.output)) == 99
    [letter] = world.harness.read(world.dead)
    assert letter.key == b"37"


def big_producer(world: KafkaWorld) -> Producer:
    """As a team has it whose records may be larger than usual."""
    return Producer({"bootstrap.servers": world.address, "message.max.bytes": 70_000_000})


def sink_of(world: KafkaWorld, known: bool) -> KafkaSink:
    topics = [world.input, world.output, world.dead]
    return KafkaSink(world.settings(), check_cluster(world.settings(), topics) if known else None)


@pytest.mark.parametrize("known", [True, False], ids=["limits_known", "limits_unknown"])
def test_c11_sizes_around_the_clients_limit(world: KafkaWorld, known: bool) -> None:
    """confluent-kafka-python#476: between what a client lets pass and what a broker takes, records
    wait for a time-out. Headers are carried over, so outputs are as large as these."""
    producer = big_producer(world)
    sizes = [*range(998_880, 1_000_080, 80), 1_048_000, 1_048_400, 1_048_500]
    for n, size in enumerate(sizes):
        pad: Any = [("pad", b"x" * (size - len(event(n)) - 100))]
        producer.produce(world.input, event(n), b"k", n % 2, headers=pad)
    assert producer.flush(CALL_S) == 0
    rejections = run_through(world, sink_of(world, known))
    assert rejections.keys() <= {"output_too_large"}
    output, dead = world.harness.read(world.output), world.harness.read(world.dead)
    assert len(output) >= 15
    judge_places(world, output, dead)


@pytest.mark.parametrize("known", [True, False], ids=["limits_known", "limits_unknown"])
def test_c11_outputs_above_what_their_topics_take(world: KafkaWorld, known: bool) -> None:
    """Dead letters say so, in short where they do not fit either."""
    operator = Operator(world.harness)
    operator.configure("topic", world.output, {"max.message.bytes": 10_000})
    operator.configure("topic", world.dead, {"max.message.bytes": 30_000})
    for n in range(60):
        size = {7: 20_000, 11: 50_000}.get(n % 20, 10)
        world.harness.append_later(world.input, n % 2, b"%d" % n, event(n), (("pad", b"x" * size),))
    world.harness.flush()
    assert run_through(world, sink_of(world, known))["output_too_large"] == 6
    output, dead = world.harness.read(world.output), world.harness.read(world.dead)
    assert (len(output), len(dead)) == (54, 6)
    judge_places(world, output, dead)
    assert Counter(r.value is None for r in dead) == {True: 3, False: 3}


def judge_places(world: KafkaWorld, output: list[Record], dead: list[Record]) -> None:
    """One outcome each; values may have been left out."""
    found = sorted(judged(record) for record in [*output, *dead])
    assert found == sorted(coordinates(record) for record in world.harness.read(world.input))
    assert world.committed() == world.ends()


def test_c12_huge_inputs(world: KafkaWorld) -> None:
    """librdkafka#1472: fetched never, or with memory that grows. The process may take three times
    the largest record above what it takes without: as the client received it, as Python's bytes,
    and one that is on its way."""
    limits = {"max.message.bytes": 64 * 2**20}
    Operator(world.harness).configure("topic", world.input, limits)
    producer = big_producer(world)
    for n, size in enumerate([5, 60, 5, 60, 5, 5]):
        value = b'{"id": 1, "hidden": "%s"}' % (b"x" * (size * 2**20))
        producer.produce(world.input, value, b"k", n % 2)
        assert producer.flush(60) == 0
    world.fill(20)
    process = world.process()
    world.await_outcomes(26)
    world.await_end()
    peak = memory(process.pid, "VmHWM")
    print(f"peak of {peak} MiB with records of 60 MiB")
    assert peak < 100 + 4 * 60
    letters = world.harness.read(world.dead)
    assert Counter(reason(r)["reason"] for r in letters)["too_large"] == 6
    judge_places(world, world.harness.read(world.output), letters)


def test_c13_the_dead_letter_topic_is_missing(world: KafkaWorld) -> None:
    """getsentry/arroyo#314: what cannot be published there was dropped."""
    operator = Operator(world.harness)
    changes = {"publish_timeout_ms": 1000, "transaction_timeout_ms": 10_000}
    running = in_thread(world.worker(changes=changes))
    world.fill(100)
    world.await_all()
    early = world.harness.read(world.dead)
    operator.delete_topic(world.dead)
    begun = time.monotonic()
    world.fill(100)
    running.thread.join(PATIENCE_S)
    print(f"it gave up after {time.monotonic() - begun:.1f} s: {running.errors}")
    with pytest.raises(ExitProcess, match="publishing failed 10 times in a row"):
        running.join()
    topics = [world.input, world.output, world.dead]
    with pytest.raises(ConfigError, match=f"{world.dead}': no such topics: create them first"):
        check_cluster(world.settings(), topics)  # what the next start says
    operator.create_topic(world.dead)
    running = world.start(world.worker(changes=changes))
    await_end(world)
    running.stop()
    given, output = world.harness.read(world.input), world.harness.read(world.output)
    letters = early + world.harness.read(world.dead)
    judge(given, output, letters)
