"""The in-process broker keeps the contract, and takes faults on order."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Any

import pytest

from processor.broker.memory import Faults, MemoryBroker
from processor.broker.memory_log import Isolation
from processor.broker.memory_source import MemorySource
from processor.broker.transaction import TransactionalSink
from processor.core.event import Headers, Record
from processor.errors import AbortAndRewind, ExitProcess, RebuildProducer, RetryCall
from tests.broker.contract import BrokerContract, Member, out, poll_until, started, values


class MemoryHarness:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self._names = count()

    def topic(self, partitions: int = 1) -> str:
        name = f"t{next(self._names)}"
        self.broker.create_topic(name, partitions)
        return name

    def group(self) -> str:
        return f"g{next(self._names)}"

    def append(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> None:
        self.broker.append(topic, partition, key, value, headers)

    def read(self, topic: str, isolation: Isolation = "read_committed") -> list[Record]:
        return self.broker.read(topic, isolation)

    def end_offset(
        self, topic: str, partition: int, isolation: Isolation = "read_committed"
    ) -> int:
        return self.broker.end_offset(topic, partition, isolation)

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        return self.broker.committed(group, topic, partition)

    def source(
        self, group: str, member: str, topics: Collection[str], *, static: bool = False
    ) -> MemorySource:
        return self.broker.source(group, member, topics, static=static)

    def sink(self, name: str) -> TransactionalSink:
        return self.broker.sink(name)


@pytest.fixture
def harness() -> MemoryHarness:
    return MemoryHarness()


class TestMemoryBroker(BrokerContract):
    pass


def open_transaction(harness: MemoryHarness, topic: str) -> TransactionalSink:
    sink = started(harness.sink("s"))
    sink.begin()
    sink.produce(out(topic, b"x"))
    return sink


@pytest.mark.parametrize("applied", [True, False])
def test_a_commit_without_answer_is_called_again(harness: MemoryHarness, applied: bool) -> None:
    topic = harness.topic()
    sink = open_transaction(harness, topic)
    harness.broker.faults.push("commit", RetryCall("timed out"), applied=applied)
    with pytest.raises(RetryCall):
        sink.commit(1)
    assert values(harness.read(topic)) == ([b"x"] if applied else [])
    with pytest.raises(ExitProcess, match="pending commit"):
        sink.abort(1)
    sink.commit(1)
    assert values(harness.read(topic)) == [b"x"]
    assert harness.end_offset(topic, 0) == 2


def test_a_failed_transaction_can_only_be_aborted(harness: MemoryHarness) -> None:
    topic = harness.topic()
    sink = open_transaction(harness, topic)
    harness.broker.faults.push("produce", AbortAndRewind("too large"))
    with pytest.raises(AbortAndRewind):
        sink.produce(out(topic, b"y"))
    with pytest.raises(AbortAndRewind):
        sink.commit(1)
    sink.abort(1)
    sink.begin()
    sink.commit(1)
    assert harness.read(topic) == []


def test_a_lost_producer_can_only_be_rebuilt(harness: MemoryHarness) -> None:
    topic = harness.topic()
    sink = open_transaction(harness, topic)
    harness.broker.faults.push("commit", RebuildProducer("fatal"))
    for _ in range(2):
        with pytest.raises(RebuildProducer):
            sink.commit(1)
    with pytest.raises(RebuildProducer):
        sink.abort(1)
    sink.rebuild()
    started(sink).begin()
    assert harness.end_offset(topic, 0) == 2  # init_transactions wrote the marker of the abort


def test_a_transaction_that_timed_out_is_aborted(harness: MemoryHarness) -> None:
    topic = harness.topic()
    sink = open_transaction(harness, topic)
    harness.broker.time_out(sink.transactional_id)
    assert harness.end_offset(topic, 0) == 2
    with pytest.raises(RebuildProducer):
        sink.commit(1)


def test_offsets_of_an_open_transaction_are_waited_for(harness: MemoryHarness) -> None:
    """KIP-447: or the new owner of a partition would start before its predecessor's commit."""
    topic, group = harness.topic(), harness.group()
    harness.append(topic, 0, b"k", b"0")
    harness.append(topic, 0, b"k", b"1")
    old = Member(harness.source(group, "old", [topic]))
    poll_until(lambda: len(old.records) == 2, old)
    sink = started(harness.sink("s"))
    sink.begin()
    sink.send_offsets({(topic, 0): 1}, old.source.group_metadata(), 1)
    harness.broker.expel(group, "old")
    new = Member(harness.source(group, "new", [topic]))
    for _ in range(3):
        new.poll(0)
    assert new.source.assignment()
    assert new.records == []
    with pytest.raises(RetryCall):
        new.source.committed([(topic, 0)], 1)
    sink.commit(1)
    new.poll()
    assert values(new.records) == [b"1"]


def test_an_expelled_member_hears_it_before_it_joins_again(harness: MemoryHarness) -> None:
    topic, group = harness.topic(), harness.group()
    member = Member(harness.source(group, "m", [topic]))
    poll_until(lambda: bool(member.assigned), member)
    before = member.source.group_metadata()
    harness.broker.expel(group, "m")
    assert member.source.group_metadata() == before  # it has not polled yet
    poll_until(lambda: len(member.assigned) == 2, member)
    assert member.revoked == [(topic, 0)]
    assert member.source.group_metadata().member != before.member


@pytest.mark.parametrize("committed", [None, 1])
def test_deleted_records_are_not_passed_over(harness: MemoryHarness, committed: int | None) -> None:
    topic = harness.topic()
    for n in range(4):
        harness.append(topic, 0, b"k", b"%d" % n)
    harness.broker.delete_records(topic, 0, 3)
    if committed is not None:
        harness.broker.group("g").committed[topic, 0] = committed
    member = Member(harness.broker.source("g", "m", [topic]))
    if committed is None:  # what was deleted before the group's first start is not its loss
        member.poll(0)
        assert values(member.records) == [b"3"]
        assert member.source.records_lost() == 0
    else:
        with pytest.raises(ExitProcess, match="next offset is 1, but records below 3 were deleted"):
            member.poll(0)


@pytest.mark.parametrize(("policy", "left"), [("earliest", [b"3"]), ("latest", [])])
def test_going_on_without_deleted_records_counts_them(
    harness: MemoryHarness, policy: Any, left: list[bytes]
) -> None:
    topic = harness.topic()
    for n in range(4):
        harness.append(topic, 0, b"k", b"%d" % n)
    harness.broker.delete_records(topic, 0, 3)
    harness.broker.group("g").committed[topic, 0] = 1
    member = Member(harness.broker.source("g", "m", [topic], auto_offset_reset=policy))
    member.poll(0)
    assert values(member.records) == left
    assert member.source.records_lost() == 2


def test_latest_starts_at_the_end(harness: MemoryHarness) -> None:
    topic = harness.topic()
    harness.append(topic, 0, b"k", b"old")
    member = Member(harness.broker.source("g", "m", [topic], first_start="latest"))
    member.poll(0)
    harness.append(topic, 0, b"k", b"new")
    member.poll(0)
    assert values(member.records) == [b"new"]


def test_faults_are_used_in_order_and_once() -> None:
    faults, calls = Faults(), list[str]()
    faults.push("commit", RetryCall("a"), skip=1)
    faults.push("commit", RetryCall("b"), applied=True)
    faults.hook("commit", lambda: calls.append("hook"))
    assert faults.pending() == 3
    faults.around("commit", lambda: calls.append("1"))
    with pytest.raises(RetryCall, match="a"):
        faults.around("commit", lambda: calls.append("2"))
    with pytest.raises(RetryCall, match="b"):
        faults.around("commit", lambda: calls.append("3"))
    faults.around("commit", lambda: calls.append("4"))
    assert calls == ["1", "3", "hook", "4"]
    assert faults.pending() == 0
