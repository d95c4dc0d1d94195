"""What the contract's tests need of a broker, and how they look at it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

from processor.broker.memory_log import Isolation
from processor.broker.transaction import RecordSource, TopicPartition, TransactionalSink
from processor.core.encode import OutputRecord
from processor.core.event import Headers, Record

CALL_S = 10.0
PATIENCE_S = 30.0


class Harness(Protocol):
    """A broker as the tests see it; topics, groups and ids are new for each test."""

    def topic(self, partitions: int = 1) -> str: ...
    def group(self) -> str: ...
    def append(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> None: ...
    def read(self, topic: str, isolation: Isolation = "read_committed") -> list[Record]: ...
    def end_offset(
        self, topic: str, partition: int, isolation: Isolation = "read_committed"
    ) -> int: ...
    def committed(self, group: str, topic: str, partition: int) -> int | None: ...
    def source(
        self, group: str, member: str, topics: Collection[str], *, static: bool = False
    ) -> RecordSource: ...
    def sink(self, name: str) -> TransactionalSink: ...


class Member:
    """An open source that remembers what its callbacks said."""

    def __init__(self, source: RecordSource) -> None:
        self.source = source
        self.assigned: list[TopicPartition] = []
        self.revoked: list[TopicPartition] = []
        self.records: list[Record] = []
        source.open(self._note, self.revoked.extend)

    def poll(self, timeout_s: float = 0.05) -> None:
        self.records += self.source.poll(100, timeout_s)

    def _note(self, partitions: Collection[TopicPartition]) -> None:
        self.assigned.extend(partitions)

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for record in self.records]


def poll_until(condition: Callable[[], bool], *members: Member) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "this does not happen"
        for member in members:
            member.poll()


def out(topic: str, value: bytes | None, key: bytes | None = b"k") -> OutputRecord:
    return OutputRecord(topic, key, value, ())


def started(sink: TransactionalSink) -> TransactionalSink:
    sink.init_transactions(CALL_S)
    return sink


def values(records: list[Record]) -> list[bytes | None]:
    return [record.value for record in records]


def flushed(harness: Harness, topic: str, end: int = 1) -> None:
    """Wait until what was produced has reached the log."""
    deadline = time.monotonic() + PATIENCE_S
    while harness.end_offset(topic, 0, "read_uncommitted") < end:
        assert time.monotonic() < deadline
        time.sleep(0.02)
