"""Which records of each partition are in flight, which are finished, and what may be committed.

Pure: no clock, no broker, one thread. Its laws, which the tests hold:

* outcomes of a partition leave in the order of its offsets, and none leaves before all of its
  predecessors have: a rejection, ready at once, waits for the events before it;
* the offset to commit is the last finished one + 1; gaps in offsets (control markers, aborted or
  compacted records) need no thought, for nothing is ever computed from a gap. Once nothing is in
  flight it is the source's position, which stands behind trailing markers: the lag that others
  see goes to 0 (spring-kafka#1587);
* an entry belongs to one lane, the life of a partition between an assignment or rewind and the
  next; the result of an entry whose lane has ended is recognised and dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType

from processor.broker.transaction import TopicPartition
from processor.core.decision import Outcome
from processor.core.event import Record
from processor.core.pipeline import Prepared
from processor.errors import ExitProcess

NOWHERE: Mapping[TopicPartition, int] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Lane:
    """One partition from an assignment or a rewind on."""

    first: int | None = None  # offset of the first record polled since the assignment
    next: int = 0  # no record below it is expected any more
    awaited: int | None = None  # after a rewind to a known record: the offset that comes next
    committed: int | None = None  # next offset of the latest commit, where we know it
    entries: deque[Entry] = field(default_factory=deque)  # in flight or finished, by offset


@dataclass(slots=True, eq=False)
class Entry:
    """A record on its way to an outcome."""

    record: Record
    lane: Lane
    polled_at: float
    prepared: Prepared | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """What one transaction publishes: entries, each with its outcome, and the next offsets."""

    entries: list[Entry]
    offsets: dict[TopicPartition, int]


class Ledger:
    def __init__(self) -> None:
        self._lanes: dict[TopicPartition, Lane] = {}

    def __len__(self) -> int:
        """Records taken and not yet published."""
        return sum(len(lane.entries) for lane in self._lanes.values())

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        return frozenset(self._lanes)

    def assign(self, partitions: Collection[TopicPartition]) -> None:
        self._lanes.update({partition: Lane() for partition in partitions})

    def revoke(self, partitions: Collection[TopicPartition]) -> None:
        for partition in partitions:
            self._lanes.pop(partition, None)

    def add(self, record: Record, polled_at: float) -> Entry | None:
        """Take a record in; None where it is none of ours (revoked meanwhile) or was taken already.

        Raises `ExitProcess` where a record that we polled before does not come again after a
        rewind: the client has lost it (confluent-kafka-python#1443), or it was deleted.
        """
        lane = self._lanes.get((record.topic, record.partition))
        if lane is None or record.offset < lane.next:
            return None
        if lane.awaited is not None and record.offset != lane.awaited:
            raise ExitProcess(
                f"{record.topic}[{record.partition}]: rewound to record {lane.awaited}, "
                f"got {record.offset}: records are missing"
            )
        entry = Entry(record, lane, polled_at)
        lane.entries.append(entry)
        lane.first = record.offset if lane.first is None else lane.first
        lane.next, lane.awaited = record.offset + 1, None
        return entry

    def is_live(self, entry: Entry) -> bool:
        return self._lanes.get((entry.record.topic, entry.record.partition)) is entry.lane

    def finish(self, entry: Entry, outcome: Outcome) -> bool:
        """Note an outcome; False where the entry's lane has ended and the outcome is dropped."""
        if not self.is_live(entry):
            return False
        entry.outcome = outcome
        return True

    def first_unpublished(self) -> dict[TopicPartition, int]:
        return {p: lane.entries[0].record.offset for p, lane in self._lanes.items() if lane.entries}

    def unfinished(self) -> Iterator[Entry]:
        lanes = self._lanes.values()
        return (entry for lane in lanes for entry in lane.entries if entry.outcome is None)

    def any_finished(self) -> bool:
        lanes = self._lanes.values()
        return any(lane.entries and lane.entries[0].outcome is not None for lane in lanes)

    def finished(self, positions: Mapping[TopicPartition, int] = NOWHERE) -> Finished:
        """What can be published now. It stays here until `published` says that it has been.

        `positions` are the source's; a partition of which all records are finished is committed
        up to there, one that has none only where that is news.
        """
        entries: list[Entry] = []
        offsets: dict[TopicPartition, int] = {}
        for partition, lane in self._lanes.items():
            done = list(takewhile(lambda entry: entry.outcome is not None, lane.entries))
            entries += done
            if done:
                offsets[partition] = done[-1].record.offset + 1
            position = positions.get(partition, -1)
            whole = len(done) == len(lane.entries) and lane.awaited is None
            if whole and position >= lane.next and (done or position != lane.committed):
                offsets[partition] = position
        return Finished(entries, offsets)

    def published(self, finished: Finished) -> None:
        for entry in finished.entries:
            if entry.lane.entries.popleft() is not entry:
                raise AssertionError("published out of order")
        for partition, offset in finished.offsets.items():
            self._lanes[partition].committed = offset

    def rewind(
        self, committed: Mapping[TopicPartition, int | None] | None = None
    ) -> dict[TopicPartition, int]:
        """End all lanes; the offsets to seek to, where a partition has anything to repeat.

        Without `committed` they are the first unpublished offsets, which is where the last commit
        left us. With it they are the committed ones; a partition without a committed offset starts
        again at the first record polled, not where the reset policy says (KAFKA-9079).
        """
        targets: dict[TopicPartition, int] = {}
        for partition, lane in list(self._lanes.items()):
            if committed is None:
                target = lane.entries[0].record.offset if lane.entries else None
            elif (target := committed.get(partition)) is None:
                target = lane.first
            fresh = Lane(lane.first, lane.next, lane.awaited, lane.committed)
            if committed is not None:
                fresh.committed = committed.get(partition)
            if target is not None:
                known = any(entry.record.offset == target for entry in lane.entries)
                fresh.next, fresh.awaited = target, target if known else None
                targets[partition] = target
            self._lanes[partition] = fresh
        return targets
