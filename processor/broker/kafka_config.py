"""Settings as librdkafka properties, and what the client hands out as our own values."""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Any

from processor.broker.transaction import GroupMetadata
from processor.core.event import Record
from processor.errors import ExitProcess
from processor.kafka_settings import KafkaSettings

_MAGIC = b"CGMDv2:"
DEFAULT_MAX_BYTES = 1_048_588  # of a record with its overhead, unless broker or topic say otherwise
BATCH_BYTES = 1_000_000


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
        **_membership(settings),
        "max.poll.interval.ms": settings.max_poll_interval_ms,
        "auto.offset.reset": "error",  # the client asks us (`start.py`)
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        # Tells in its place among the records that a partition is read to its end, markers and
        # aborted records included, which no record of ours would show.
        "enable.partition.eof": True,
        "allow.auto.create.topics": False,
    }


def _membership(settings: KafkaSettings) -> dict[str, Any]:
    if settings.group_protocol == "consumer":  # KIP-848: the broker assigns and has the time-outs
        return {"group.protocol": "consumer"}
    return {
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": settings.session_timeout_ms,
    }


def reader_config(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "fetch.wait.max.ms": 50,
        **client_config(settings),
        "group.id": settings.group,  # to look its offsets up: it does not join
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }


def producer_config(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "partitioner": "murmur2_random",  # a key goes where a Java producer would send it
        "linger.ms": 0,  # commit flushes, and nothing else comes in while it waits
        **client_config(settings),
    }


def transactional_config(
    settings: KafkaSettings, limits: Collection[int] = (), alone: bool = False
) -> dict[str, Any]:
    """`limits`: what the topics take. The client must let the largest record through, and its
    batches must fit the topic that takes the least: it does not split a batch that is refused.
    `alone`: no record shares a batch, for limits that are not known."""
    least, most = min(limits, default=BATCH_BYTES), max(limits, default=DEFAULT_MAX_BYTES)
    return {
        "batch.size": 1 if alone else min(least, BATCH_BYTES),
        "message.max.bytes": min(most + 65_536, 1_000_000_000),
        # A call that waits for a request does so for this time, whatever limit it was given: by
        # default about the transaction's own time-out (measured: 30 s with a limit of 1 s).
        "socket.timeout.ms": max(10, settings.publish_timeout_ms),
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
    kind, timestamp = message.timestamp()
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.key(),
        message.value(),
        tuple(message.headers() or ()),
        timestamp if kind else -1,
    )
