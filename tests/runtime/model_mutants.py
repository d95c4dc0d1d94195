"""The loop with one deliberate mistake each. A model test that passes on these would prove
nothing about the loop without them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any
from unittest.mock import patch

from processor.broker import transaction
from processor.broker.memory import MemoryBroker
from processor.broker.memory_group import Group
from processor.broker.memory_sink import MemorySink
from processor.broker.memory_source import MemorySource
from processor.broker.transaction import (
    Offsets,
    State,
    TopicPartition,
    Transactions,
)
from processor.core.encode import OutputRecord
from processor.errors import AbortAndRewind, RebuildProducer, RetryCall
from processor.runtime.ledger import Finished, Lane, Ledger
from processor.runtime.publisher import Publisher
from processor.runtime.worker import Worker

Patch = AbstractContextManager[object]
Targets = dict[TopicPartition, int]


def no_rewind() -> list[Patch]:
    """What was aborted is forgotten, and the source goes on behind it. The guard that notices
    missing records is taken away too, or it would end the worker first."""
    rewind = Ledger.rewind

    def forget(self: Ledger, committed: Mapping[TopicPartition, int | None] | None = None) -> Any:
        targets = rewind(self, committed)
        for lane in self._lanes.values():
            lane.awaited = None
        return targets

    def stay(self: Worker, targets: Targets) -> None:
        self._scoring.refill()

    return [patch.object(Ledger, "rewind", forget), patch.object(Worker, "_rewind", stay)]


def no_rewind_but_guarded() -> list[Patch]:
    """The same with the guard: a worker that ends is the lesser evil, and is noticed as well."""

    def stay(self: Worker, targets: Targets) -> None:
        self._scoring.refill()

    return [patch.object(Worker, "_rewind", stay)]


def no_metadata_guard() -> list[Patch]:
    """A classic group takes generation -1 and an empty member id unchecked."""
    return [patch.object(transaction, "check_member", lambda _: None)]


def no_generation_check() -> list[Patch]:
    """What a client does that sends offsets with the bare name of its group (faust#323)."""
    return [patch.object(Group, "check", lambda *_: None)]


def unstable_offsets_are_taken() -> list[Patch]:
    """A new owner that does not wait for its predecessor's open transaction (KIP-447)."""
    return [patch.object(MemoryBroker, "unstable", lambda *_: False)]


def produce_outside() -> list[Patch]:
    def produce(self: MemorySink, record: OutputRecord) -> None:
        self._broker.append(record.topic, None, record.key, record.value, record.headers)

    return [patch.object(MemorySink, "produce", produce)]


def offsets_first() -> list[Patch]:
    """Offsets in a transaction of their own, before that of the records."""
    both = Transactions._transact

    def transact(
        self: Transactions, records: Sequence[OutputRecord], offsets: Offsets, deadline: float
    ) -> None:
        both(self, [], offsets, deadline)
        both(self, records, {}, deadline)

    return [patch.object(Transactions, "_transact", transact)]


def offsets_last() -> list[Patch]:
    """Records in a transaction of their own, before that of the offsets."""
    both = Transactions._transact

    def transact(
        self: Transactions, records: Sequence[OutputRecord], offsets: Offsets, deadline: float
    ) -> None:
        both(self, records, {}, deadline)
        both(self, [], offsets, deadline)

    return [patch.object(Transactions, "_transact", transact)]


def forgotten_abort() -> list[Patch]:
    def forget(self: Transactions) -> None:
        self.state = State.READY

    return [patch.object(Transactions, "_abort", forget)]


def failed_transaction_goes_on() -> list[Patch]:
    """The abort is forgotten and the client does not mind: what was produced for the transaction
    that failed is committed with the next one."""

    def begin(self: MemorySink) -> None:
        if self._state not in ("open", "abortable"):
            true_begin(self)
        self._state, self._pending, self._applied = "open", None, False

    true_begin = MemorySink.begin
    return [*forgotten_abort(), patch.object(MemorySink, "begin", begin)]


def revoked_is_published() -> list[Patch]:
    """The broker's check is by member and generation, not by partition: it takes these."""
    return [patch.object(Ledger, "revoke", lambda *_: None)]


def commit_timed_out_is_aborted() -> list[Patch]:
    call = Transactions._call

    def impatient(self: Transactions, name: str, function: Any, deadline: float) -> None:
        if name != "commit":
            return call(self, name, function, deadline)
        try:
            return function(1.0)  # type: ignore[no-any-return]
        except RetryCall as error:
            raise AbortAndRewind(str(error)) from error

    return [patch.object(Transactions, "_call", impatient)]


def commit_is_taken_for_failed() -> list[Patch]:
    """After a loss, back to the first unpublished record instead of a look at the offsets."""
    start = Publisher.start

    def guess(self: Publisher) -> dict[TopicPartition, int | None] | None:
        if (committed := start(self)) is not None:
            committed = dict(self._ledger.rewind())
        return committed

    return [patch.object(Publisher, "start", guess)]


def commit_is_taken_for_done() -> list[Patch]:
    publish = Transactions.publish

    def hope(self: Transactions, *args: Any) -> None:
        try:
            publish(self, *args)
        except RebuildProducer:
            if self.state is not State.LOST:
                raise
            self.rebuild()

    return [patch.object(Transactions, "publish", hope)]


def position_with_records_in_flight() -> list[Patch]:
    def finished(self: Ledger, positions: Mapping[TopicPartition, int]) -> Finished:
        found = true_finished(self, positions)
        offsets = {p: o for p, o in positions.items() if p in self._lanes}
        return Finished(found.entries, found.offsets | offsets)

    true_finished = Ledger.finished
    return [patch.object(Ledger, "finished", finished)]


def nothing_committed_is_the_end() -> list[Patch]:
    """KAFKA-9079: a rewind to no committed offset does not go back at all."""
    rewind = Ledger.rewind

    def skip(self: Ledger, committed: Mapping[TopicPartition, int | None] | None = None) -> Targets:
        ends = {p: lane.next for p, lane in self._lanes.items()}
        targets = rewind(self, committed)
        for partition in list(targets):
            if committed is not None and committed.get(partition) is None:
                del targets[partition]
                lane = self._lanes[partition]
                lane.next, lane.awaited = ends[partition], None
        return targets

    return [patch.object(Ledger, "rewind", skip)]


def last_offset_for_the_next() -> list[Patch]:
    """A committed offset is that of the next record; this one is that of the last."""

    def finished(self: Ledger, positions: Mapping[TopicPartition, int]) -> Finished:
        found = true_finished(self)
        return Finished(found.entries, {p: o - 1 for p, o in found.offsets.items()})

    true_finished = Ledger.finished
    return [patch.object(Ledger, "finished", finished)]


def rejections_overtake() -> list[Patch]:
    """What needs no model leaves at once, past the events before it."""

    def finished(self: Ledger, positions: Mapping[TopicPartition, int]) -> Finished:
        lanes = self._lanes.values()
        entries = [e for lane in lanes for e in lane.entries if e.outcome is not None]
        offsets = {}
        for partition, lane in self._lanes.items():
            done = list(takewhile(lambda entry: entry.outcome is not None, lane.entries))
            if done:
                offsets[partition] = done[-1].record.offset + 1
            elif lane.entries:
                offsets[partition] = lane.entries[0].record.offset
        return Finished(entries, offsets)

    def published(self: Ledger, finished: Finished) -> None:
        for entry in finished.entries:
            entry.lane.entries.remove(entry)

    return [
        patch.object(Ledger, "finished", finished),
        patch.object(Ledger, "published", published),
    ]


def results_of_an_ended_lane() -> list[Patch]:
    """Late outcomes are put where their partition is now, whoever had it in between."""

    def assign(self: Ledger, partitions: Collection[TopicPartition]) -> None:
        self._lanes.update({p: graves.pop((id(self), p), Lane()) for p in partitions})

    def revoke(self: Ledger, partitions: Collection[TopicPartition]) -> None:
        graves.update({(id(self), p): self._lanes.pop(p) for p in partitions if p in self._lanes})

    graves: dict[tuple[int, TopicPartition], Lane] = {}
    return [patch.object(Ledger, "assign", assign), patch.object(Ledger, "revoke", revoke)]


def predecessor_is_not_ended() -> list[Patch]:
    """A new producer that fences the old one and leaves its transaction open: readers wait."""

    def init(self: MemoryBroker, transactional_id: str) -> int:
        self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
        return self._epochs[transactional_id]

    return [patch.object(MemoryBroker, "init_transactions", init)]


def never_resumed() -> list[Patch]:
    """What was paused once stays so (confluent-kafka-go#193)."""
    return [patch.object(MemorySource, "resume", lambda *_: None)]


MUTANTS = [
    no_rewind,
    no_rewind_but_guarded,
    no_metadata_guard,
    no_generation_check,
    unstable_offsets_are_taken,
    produce_outside,
    offsets_first,
    offsets_last,
    forgotten_abort,
    failed_transaction_goes_on,
    revoked_is_published,
    commit_timed_out_is_aborted,
    commit_is_taken_for_failed,
    commit_is_taken_for_done,
    position_with_records_in_flight,
    nothing_committed_is_the_end,
    last_offset_for_the_next,
    rejections_overtake,
    results_of_an_ended_lane,
    predecessor_is_not_ended,
    never_resumed,
]
