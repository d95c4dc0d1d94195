"""Partition logs of the in-process broker: data, control markers, and what a reader may see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from processor.broker.transaction import TopicPartition
from processor.core.event import Headers, Record

Isolation = Literal["read_committed", "read_uncommitted"]


@dataclass(slots=True, eq=False)
class Transaction:
    """Everything that one commit or abort decides together."""

    transactional_id: str
    state: Literal["open", "committed", "aborted"] = "open"
    logs: dict[PartitionLog, int] = field(default_factory=dict)  # with the first offset in each
    offsets: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)  # by group


@dataclass(frozen=True, slots=True)
class Entry:
    """One offset. `record` is None for a control marker."""

    record: Record | None
    transaction: Transaction | None


class PartitionLog:
    """An append-only log. Aborted records stay in it and markers take offsets, as in Kafka: who
    takes the last record's offset for the end of the log is wrong here too."""

    def __init__(self, topic: str, partition: int) -> None:
        self.topic, self.partition = topic, partition
        self.start = 0  # what is below has been deleted
        self.entries: list[Entry] = []
        self.open: dict[Transaction, int] = {}

    @property
    def end(self) -> int:
        return len(self.entries)

    @property
    def last_stable(self) -> int:
        """Where read_committed readers stop: the first offset of the oldest open transaction."""
        return min(self.open.values(), default=self.end)

    def append(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int,
        transaction: Transaction | None = None,
    ) -> Record:
        record = Record(
            self.topic, self.partition, self.end, key, value, tuple(headers), timestamp_ms
        )
        if transaction is not None and self not in transaction.logs:
            transaction.logs[self] = self.open[transaction] = record.offset
        self.entries.append(Entry(record, transaction))
        return record

    def end_transaction(self, transaction: Transaction) -> None:
        del self.open[transaction]
        self.entries.append(Entry(None, transaction))

    def read(self, position: int, limit: int, isolation: Isolation) -> tuple[list[Record], int]:
        """Up to `limit` visible records from `position` on, and the position after them; it moves
        over markers and aborted records even where nothing is returned."""
        end = self.last_stable if isolation == "read_committed" else self.end
        records: list[Record] = []
        position = max(position, self.start)
        while position < end and len(records) < limit:
            entry = self.entries[position]
            position += 1
            committed = entry.transaction is None or entry.transaction.state == "committed"
            if entry.record is not None and (committed or isolation == "read_uncommitted"):
                records.append(entry.record)
        return records, position
