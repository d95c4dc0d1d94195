"""Settings as librdkafka properties, and what the client hands out as our own values."""

from __future__ import annotations

import struct
from typing import Any

from processor.broker.transaction import GroupMetadata
from processor.config import KafkaSettings
from processor.core.event import Record
from processor.errors import ExitProcess

_MAGIC = b"CGMDv2:"


def client_config(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "topic.metadata.refresh.interval.ms": 30_000,  # new partitions are seen within it
        **settings.client,
        "bootstrap.servers": settings.bootstrap_servers,
        "retry.backoff.ms": settings.retry_backoff_ms,
    }


def consumer_config(settings: KafkaSettings) -> dict[str, Any]:
    instance = settings.group_instance_id
    return {
        # Bounded by bytes: with the default, memory grows with the lag up to 64 MiB of values.
        "queued.max.messages.kbytes": 16_384,
        "queued.min.messages": 1_000,
        "check.crcs": True,
        # How long a partition that was rewound waits to be fetched: for the request that is with
        # the broker, and for the back-off of a queue that was full. By default 0.5 s and 1 s;
        # measured with these, 0.01 s.
        "fetch.wait.max.ms": 50,
        "fetch.queue.backoff.ms": 10,
        **client_config(settings),
        "group.id": settings.group,
        **({"group.instance.id": instance} if instance else {}),
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": settings.session_timeout_ms,
        "max.poll.interval.ms": settings.max_poll_interval_ms,
        "auto.offset.reset": settings.auto_offset_reset,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": False,
        "allow.auto.create.topics": False,
    }


def producer_config(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "partitioner": "murmur2_random",  # a key goes where a Java producer would send it
        "linger.ms": 0,  # commit flushes, and nothing else comes in while it waits
        **client_config(settings),
    }


def transactional_config(settings: KafkaSettings) -> dict[str, Any]:
    return {
        **producer_config(settings),
        "transactional.id": settings.transactional_id,
        "transaction.timeout.ms": settings.transaction_timeout_ms,
        "message.timeout.ms": settings.transaction_timeout_ms,  # the largest that is allowed
    }


def parse_metadata(handle: Any) -> GroupMetadata:
    """Read the client's group metadata: magic, int32 generation in native order, then group and
    member id, each ended by a zero byte.

    Raises `ExitProcess` for any other form: without the generation we cannot tell a member from
    a stranger (`check_member`).
    """
    data = bytes(handle) if isinstance(handle, bytes | bytearray | memoryview) else b""
    fields = data[len(_MAGIC) + 4 :].split(b"\0")
    if not data.startswith(_MAGIC) or len(fields) < 3:
        raise ExitProcess("the client's group metadata has a form that is not known here")
    (generation,) = struct.unpack_from("=i", data, len(_MAGIC))
    return GroupMetadata(fields[0].decode(), generation, fields[1].decode(), handle)


def to_record(message: Any) -> Record:
    headers: Any = message.headers() or ()
    kind, timestamp = message.timestamp()
    return Record(
        topic=str(message.topic()),
        partition=_number(message.partition()),
        offset=_number(message.offset()),
        key=message.key(),
        value=message.value(),
        headers=tuple(headers),
        timestamp_ms=timestamp if kind else -1,
    )


def _number(value: int | None) -> int:
    if value is None:
        raise ExitProcess("a message without partition or offset")
    return value
