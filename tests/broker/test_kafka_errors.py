"""What the client reports, and what we do about it: the rows were measured on librdkafka."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError

from processor.broker import kafka_errors
from processor.broker.kafka_config import (
    consumer_config,
    parse_metadata,
    producer_config,
    transactional_config,
)
from processor.broker.kafka_errors import classify, consumer_error, of_several
from processor.config import KafkaSettings
from processor.errors import (
    AbortAndRewind,
    ExitProcess,
    RebuildProducer,
    RetryCall,
    ShrinkOutput,
)

FATAL: dict[str, Any] = {"fatal": True}
ABORT: dict[str, Any] = {"txn_requires_abort": True}
RETRY: dict[str, Any] = {"retriable": True}


def error(name: str, **flags: Any) -> KafkaError:
    return KafkaError(getattr(KafkaError, name), "why", **flags)


@pytest.mark.parametrize(
    ("name", "flags", "kind"),
    [
        ("_FENCED", FATAL, RebuildProducer),
        ("OUT_OF_ORDER_SEQUENCE_NUMBER", FATAL, RebuildProducer),
        ("OUT_OF_ORDER_SEQUENCE_NUMBER", ABORT, RebuildProducer),
        ("PRODUCER_FENCED", ABORT, RebuildProducer),
        ("INVALID_TXN_STATE", FATAL, RebuildProducer),
        ("_FATAL", {}, RebuildProducer),
        ("UNKNOWN", FATAL, RebuildProducer),
        ("MSG_SIZE_TOO_LARGE", ABORT, ShrinkOutput),
        ("MSG_SIZE_TOO_LARGE", {}, ShrinkOutput),
        ("RECORD_LIST_TOO_LARGE", ABORT, ShrinkOutput),
        ("ILLEGAL_GENERATION", ABORT, AbortAndRewind),
        ("UNKNOWN_MEMBER_ID", ABORT, AbortAndRewind),
        ("FENCED_INSTANCE_ID", ABORT, AbortAndRewind),
        ("INVALID_PRINCIPAL_TYPE", ABORT, AbortAndRewind),
        ("_TIMED_OUT", RETRY, RetryCall),
        ("_TIMED_OUT", {}, RetryCall),
        ("UNSTABLE_OFFSET_COMMIT", {}, RetryCall),
        ("GROUP_AUTHORIZATION_FAILED", ABORT, ExitProcess),
        ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", FATAL, ExitProcess),
        ("INVALID_TRANSACTION_TIMEOUT", FATAL, ExitProcess),
        ("_STATE", ABORT, RetryCall),
        ("_STATE", FATAL, RebuildProducer),
        ("_STATE", {}, ExitProcess),
        ("UNKNOWN", {}, ExitProcess),
    ],
)
def test_producer_errors(name: str, flags: dict[str, Any], kind: type[Exception]) -> None:
    found = classify(error(name, **flags), "commit")
    assert type(found) is kind
    assert str(found) == f"commit: {name}: why"


@pytest.mark.parametrize(("count", "several"), [(1, False), (2, True), (10, True), (123, True)])
def test_c11_a_batch_that_is_too_large_says_of_how_many(count: int, several: bool) -> None:
    text = f"ProduceRequest for out [0] with {count} message(s) failed: Broker: too large"
    assert of_several(ShrinkOutput(f"commit_transaction: MSG_SIZE_TOO_LARGE: {text}")) is several
    assert not of_several(ShrinkOutput("produce: MSG_SIZE_TOO_LARGE: Unable to produce message"))


@pytest.mark.parametrize(
    ("name", "flags", "exits"),
    [
        ("FENCED_INSTANCE_ID", FATAL, True),
        ("UNKNOWN_MEMBER_ID", FATAL, True),
        ("_AUTO_OFFSET_RESET", {}, True),
        ("TOPIC_AUTHORIZATION_FAILED", {}, True),
        ("UNKNOWN_TOPIC_OR_PART", {}, True),
        ("UNKNOWN", {}, True),
        ("_MAX_POLL_EXCEEDED", {}, False),
        ("ILLEGAL_GENERATION", {}, False),
        ("_TRANSPORT", {}, False),
        ("_ALL_BROKERS_DOWN", {}, False),
        ("NOT_COORDINATOR", {}, False),
    ],
)
def test_consumer_errors(name: str, flags: dict[str, Any], exits: bool) -> None:
    assert (consumer_error(error(name, **flags), "poll") is not None) == exits


def test_every_name_exists_in_the_client() -> None:
    known = kafka_errors
    sets = (known.EXIT, known.REBUILD, known.TOO_LARGE, known.PASSING, known.REJOINS)
    for name in {known.HIDES_CAUSE}.union(*sets):
        assert error(name).name() == name


@pytest.mark.parametrize(
    ("handle", "generation", "member"),
    [
        (b"CGMDv2:\xff\xff\xff\xffg\0\0\x01", -1, ""),
        (b"CGMDv2:" + (7).to_bytes(4, "little") + b"g\0m-1\0\0i\0", 7, "m-1"),
    ],
)
def test_group_metadata(handle: bytes, generation: int, member: str) -> None:
    found = parse_metadata(handle)
    assert (found.group, found.generation, found.member) == ("g", generation, member)
    assert found.handle is handle


@pytest.mark.parametrize("handle", [b"", b"CGMDv3:1234g\0m\0", b"CGMDv2:12", object()])
def test_unknown_group_metadata_exits(handle: object) -> None:
    with pytest.raises(ExitProcess, match="not known"):
        parse_metadata(handle)


def test_settings_reach_the_client() -> None:
    settings = KafkaSettings(
        bootstrap_servers="b:1", group="g", replica="3", client={"check.crcs": "false"}
    )
    consumer, producer = consumer_config(settings), transactional_config(settings)
    assert consumer["group.instance.id"] == producer["transactional.id"] == "processor-g-3"
    assert consumer["isolation.level"] == "read_committed"
    assert (consumer["enable.auto.commit"], consumer["enable.auto.offset.store"]) == (False, False)
    assert consumer["check.crcs"] == "false"
    assert consumer["retry.backoff.ms"] == producer["retry.backoff.ms"] == 5
    assert "transactional.id" not in producer_config(settings)
    dynamic = settings.model_copy(update={"static_membership": False})
    assert "group.instance.id" not in consumer_config(dynamic)
