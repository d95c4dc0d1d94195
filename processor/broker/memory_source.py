"""The consumer of the in-process broker: `RecordSource` on its state."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from processor.broker.memory_group import Member
from processor.broker.start import reset
from processor.broker.transaction import (
    Ends,
    GroupMetadata,
    Offsets,
    OnPartitions,
    TopicPartition,
)
from processor.core.event import Record
from processor.errors import ExitProcess, RetryCall

if TYPE_CHECKING:
    from processor.broker.memory import MemoryBroker


class MemorySource:
    """One member. Like a real client it learns of a rebalance only when it polls."""

    def __init__(
        self,
        broker: MemoryBroker,
        group: str,
        name: str,
        topics: frozenset[str],
        static: bool,
        first_start: Literal["earliest", "latest"] = "earliest",
        auto_offset_reset: Literal["error", "earliest", "latest"] = "error",
    ) -> None:
        self._broker = broker
        self._group = broker.group(group)
        self._name, self._topics, self._static = name, topics, static
        self._first_start, self._reset = first_start, auto_offset_reset
        self._lost = 0
        self._member: str = ""
        self._generation = -1
        self._positions: dict[TopicPartition, int | None] = {}  # of what is assigned
        self._paused: set[TopicPartition] = set()
        self._on_assign: OnPartitions | None = None
        self._on_revoke: OnPartitions | None = None
        self._closed = False

    def open(self, on_assign: OnPartitions, on_revoke: OnPartitions) -> None:
        self._check(self._on_assign is None, "open twice")
        self._on_assign, self._on_revoke = on_assign, on_revoke

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        self._check(self._on_assign is not None and not self._closed, "poll while not open")
        self._check(max_records > 0, "poll for no records")
        self._broker.faults.around("poll")
        deadline = time.monotonic() + timeout_s
        while True:
            version = self._broker.version
            self._serve_rebalance()
            with self._broker.changed:
                records = self._fetch(max_records)
                left = deadline - time.monotonic()
                if records or left <= 0:
                    return records
                if version == self._broker.version:
                    self._broker.changed.wait(left)

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._positions)

    def group_metadata(self) -> GroupMetadata:
        instance = self._name if self._static else None
        if self._broker.lax and self._member not in self._group.members:
            return GroupMetadata(self._group.name, -1, "", instance)
        return GroupMetadata(self._group.name, self._generation, self._member, instance)

    def positions(self) -> dict[TopicPartition, int]:
        return {p: at for p, at in self._positions.items() if at is not None}

    def ends(self) -> dict[TopicPartition, Ends]:
        with self._broker.changed:
            logs = [self._broker.log(*partition) for partition in self._positions]
            return {(log.topic, log.partition): Ends(log.last_stable, log.end) for log in logs}

    def records_lost(self) -> int:
        return self._lost

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, int | None]:
        self._broker.faults.around("committed")
        with self._broker.changed:
            if any(self._broker.unstable(self._group.name, p) for p in partitions):
                raise RetryCall("UNSTABLE_OFFSET_COMMIT")
            return {p: self._group.committed.get(p) for p in partitions}

    def seek(self, offsets: Offsets) -> None:
        self._check(offsets.keys() <= self._positions.keys(), "seek of a foreign partition")
        self._broker.faults.around("seek", lambda: self._positions.update(offsets))

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._check(set(partitions) <= self._positions.keys(), "pause of a foreign partition")
        self._paused |= set(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self._check(set(partitions) <= self._positions.keys(), "resume of a foreign partition")
        self._paused -= set(partitions)

    def close(self) -> None:
        """A static member keeps its partitions: it may be back within its session."""
        if self._closed or self._on_assign is None:
            return
        self._closed = True
        if self._member in self._group.members and not self._static:
            self._revoke(frozenset(self._positions))
            with self._broker.changed:
                self._group.leave(self._member, self._broker.partitions(self._topics))
                self._broker.notify()

    def _serve_rebalance(self) -> None:
        """Callbacks run without the broker's lock: they publish, and others go on meanwhile."""
        group, broker = self._group, self._broker
        with broker.changed:
            if self._member in group.fenced:
                raise ExitProcess("FENCED_INSTANCE_ID: another process took our place")
            expelled = self._member != "" and self._member not in group.members
        if expelled:
            # Metadata of the old member stays in force during the callback: joining first would
            # let the offsets of lost partitions through.
            self._revoke(frozenset(self._positions))
            self._member, self._generation = "", -1
        with broker.changed:
            if not self._member:
                self._join()
            self._generation = group.generation
            surplus = group.surplus(self._member) & self._positions.keys()
        if surplus:
            self._revoke(surplus)
        with broker.changed:
            # Nothing else: what became surplus since then has had no callback yet.
            for partition in group.surplus(self._member):
                if partition in surplus or partition not in self._positions:
                    del group.owners[partition]
                    broker.notify()
            added = sorted(group.claim(self._member) - self._positions.keys())
        if added:
            self._positions.update(dict.fromkeys(added))
            if self._on_assign is not None:
                self._on_assign(added)

    def _join(self) -> None:
        self._member = self._broker.member_id(self._name)
        instance = self._name if self._static else None
        everything = self._broker.partitions(self._topics)
        self._group.join(Member(self._member, instance, self._topics), everything)
        self._broker.notify()

    def _revoke(self, partitions: frozenset[TopicPartition]) -> None:
        try:
            if self._on_revoke is not None and partitions:
                self._on_revoke(partitions)
        finally:
            for partition in partitions:
                del self._positions[partition]
            self._paused -= partitions

    def _fetch(self, limit: int) -> list[Record]:
        records: list[Record] = []
        for partition in [p for p in self._positions if p not in self._paused]:
            position = self._position(partition)
            if position is None or len(records) == limit:
                continue
            log = self._broker.log(*partition)
            found, position = log.read(position, limit - len(records), "read_committed")
            records += found
            del self._positions[partition]  # to the end of the line: all get their turn
            self._positions[partition] = position
        return records

    def _position(self, partition: TopicPartition) -> int | None:
        log = self._broker.log(*partition)
        position = self._positions[partition]
        if position is None and not self._broker.unstable(self._group.name, partition):
            position = self._group.committed.get(partition)
            if position is None:
                position = log.start if self._first_start == "earliest" else log.last_stable
        if position is not None and position < log.start:
            self._lost += reset(self._reset, partition, position, log.start)
            position = log.start if self._reset == "earliest" else log.last_stable
        self._positions[partition] = position
        return position

    def _check(self, legal: bool, what: str) -> None:
        if not legal:
            raise ExitProcess(f"illegal call: {what}")
