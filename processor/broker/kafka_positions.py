"""Where each assigned partition stands, as far as we know it by ourselves."""

from __future__ import annotations

from collections.abc import Collection

from processor.broker.transaction import Offsets, TopicPartition
from processor.core.event import Record


class Positions:
    """A partition is `known` while every record below its next offset has been handed out. While
    a seek is due nothing of it is handed out, and what the client gives us of it is dropped."""

    def __init__(self) -> None:
        self._assigned: dict[TopicPartition, int] = {}  # with the number of the assignment
        self._count = 0
        self._next: dict[TopicPartition, int] = {}
        self.seeks: dict[TopicPartition, int] = {}

    def assigned(self) -> frozenset[TopicPartition]:
        return frozenset(self._assigned)

    def assign(self, partitions: Collection[TopicPartition], starts: Offsets) -> None:
        self._count += 1
        self._next.update(starts)
        self._assigned.update(dict.fromkeys(partitions, self._count))

    def revoke(self, partitions: Collection[TopicPartition]) -> None:
        for partition in partitions:
            self._assigned.pop(partition, None)
            self._next.pop(partition, None)
            self.seeks.pop(partition, None)

    def numbers(self) -> dict[TopicPartition, int]:
        return dict(self._assigned)

    def reassigned(self, before: dict[TopicPartition, int]) -> set[TopicPartition]:
        """What was revoked and assigned again since `before`."""
        return {p for p, n in self._assigned.items() if before.get(p, n) != n}

    def seek(self, offsets: Offsets) -> None:
        for partition, offset in offsets.items():
            if partition in self._assigned:
                self._next[partition] = self.seeks[partition] = offset

    def hand_out(self, record: Record) -> bool:
        """Whether a record that the client gave us goes on; if so, we stand behind it."""
        return self._move((record.topic, record.partition), record.offset + 1)

    def reach_end(self, partition: TopicPartition, offset: int) -> None:
        """The client stands at the end of a partition, behind markers and aborted records."""
        self._move(partition, offset)

    def known(self) -> dict[TopicPartition, int]:
        return {p: o for p, o in self._next.items() if p not in self.seeks}

    def next(self, partition: TopicPartition) -> int | None:
        return self._next.get(partition)

    def _move(self, partition: TopicPartition, offset: int) -> bool:
        if partition not in self._assigned or partition in self.seeks:
            return False
        self._next[partition] = offset
        return True
