"""The part of the contract that says where a member stands, where partitions end, and how far a
group has come without any record."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import pytest

from processor.broker.transaction import Ends, RecordSource, TopicPartition, TransactionalSink
from processor.errors import RetryCall
from tests.broker.contract_parts import (
    CALL_S,
    Harness,
    Member,
    flushed,
    out,
    poll_until,
    started,
    values,
)


class Truthful(Member):
    """Looks at its positions after every poll and inside each assignment: what lies below has
    been handed out, or was dealt with by an earlier member (`starts`)."""

    def __init__(self, source: RecordSource, visible: dict[str, list[int]], start: int = 0) -> None:
        self.visible, self.start = visible, start
        self.looks = 0
        super().__init__(source)

    def poll(self, timeout_s: float = 0.05) -> None:
        self.records += self.source.poll(1, timeout_s)
        self.look()

    def look(self) -> None:
        self.looks += 1
        for (topic, _), position in self.source.positions().items():
            handed = {r.offset for r in self.records if r.topic == topic}
            for offset in self.visible[topic]:
                assert offset in handed or offset < self.start or offset >= position, position

    def _note(self, partitions: Collection[TopicPartition]) -> None:
        self.assigned.extend(partitions)
        self.look()


def fill(harness: Harness, topic: str, sink: TransactionalSink, plan: str) -> list[int]:
    """Transactions of one record each by letter: committed, aborted; `p`: a plain record. The
    offsets that a reader sees."""
    visible: list[int] = []
    for letter in plan:
        at = harness.end_offset(topic, 0, "read_uncommitted")
        if letter == "p":
            harness.append(topic, 0, b"k", b"plain")
        else:
            sink.begin()
            sink.produce(out(topic, b"x"))
            flushed(harness, topic, at + 1)
            (sink.abort if letter == "a" else sink.commit)(CALL_S)
        visible += [] if letter == "a" else [at]
    return visible


def at_end(member: Member, harness: Harness, *topics: str) -> bool:
    ends = {(topic, 0): harness.end_offset(topic, 0) for topic in topics}
    return member.source.positions() == ends


class PositionsContract:
    """Mixed into `BrokerContract`."""

    @pytest.mark.parametrize("plan", ["ppp", "pc", "pca", "paa", "acap", "a", "aaa"])
    def test_positions_move_behind_what_is_never_handed_out(
        self, harness: Harness, plan: str
    ) -> None:
        topic, sink = harness.topic(), started(harness.sink("s"))
        visible = fill(harness, topic, sink, plan)
        member = Truthful(harness.source(harness.group(), "m", [topic]), {topic: visible})
        assert member.source.positions() == {}
        poll_until(lambda: at_end(member, harness, topic), member)
        assert [record.offset for record in member.records] == visible
        fill(harness, topic, sink, "a")
        poll_until(lambda: at_end(member, harness, topic), member)  # again, from where it was
        assert [record.offset for record in member.records] == visible
        assert member.source.records_lost() == 0

    def test_each_partition_has_its_own_position(self, harness: Harness) -> None:
        sink = started(harness.sink("s"))
        topics = [harness.topic() for _ in range(3)]
        plans = zip(topics, ["pcaa", "aa", ""], strict=True)
        visible = {topic: fill(harness, topic, sink, plan) for topic, plan in plans}
        member = Truthful(harness.source(harness.group(), "m", topics), visible)
        poll_until(lambda: at_end(member, harness, *topics), member)

    def test_positions_stop_before_an_open_transaction(self, harness: Harness) -> None:
        topic, sink = harness.topic(), started(harness.sink("s"))
        visible = fill(harness, topic, sink, "pa")
        stable = harness.end_offset(topic, 0)
        sink.begin()
        sink.produce(out(topic, b"open"))
        flushed(harness, topic, stable + 1)
        harness.append(topic, 0, b"k", b"behind")
        visible += [stable + 1]
        member = Truthful(harness.source(harness.group(), "m", [topic]), {topic: visible})
        poll_until(lambda: member.source.positions() == {(topic, 0): stable}, member)
        for _ in range(5):
            member.poll(0.1)
        assert member.source.positions() == {(topic, 0): stable}
        sink.abort(CALL_S)
        poll_until(lambda: at_end(member, harness, topic), member)
        assert member.values == [b"plain", b"behind"]

    def test_positions_go_back_with_a_seek(self, harness: Harness) -> None:
        topic, sink = harness.topic(), started(harness.sink("s"))
        visible = fill(harness, topic, sink, "ppca")
        member = Truthful(harness.source(harness.group(), "m", [topic]), {topic: visible})
        for target in (1, 2, 0):
            poll_until(lambda: at_end(member, harness, topic), member)
            member.records = [r for r in member.records if r.offset < target]
            member.source.seek({(topic, 0): target})
            assert member.source.positions().get((topic, 0), target) == target
            member.look()
        poll_until(lambda: at_end(member, harness, topic), member)
        assert [record.offset for record in member.records] == visible

    def test_a_seek_right_after_the_assignment_shows_no_other_position(
        self, harness: Harness
    ) -> None:
        topic, sink = harness.topic(), started(harness.sink("s"))
        visible = fill(harness, topic, sink, "pppp")
        member = Truthful(harness.source(harness.group(), "m", [topic]), {topic: visible}, 2)
        poll_until(lambda: bool(member.assigned), member)
        member.records.clear()
        member.source.seek({(topic, 0): 2})
        for _ in range(3):
            assert member.source.positions().get((topic, 0), 2) >= 2
            member.poll()
        poll_until(lambda: at_end(member, harness, topic), member)
        assert [record.offset for record in member.records] == [2, 3]

    def test_a_paused_partition_keeps_its_position(self, harness: Harness) -> None:
        topic, sink = harness.topic(), started(harness.sink("s"))
        visible = fill(harness, topic, sink, "pp")
        member = Truthful(harness.source(harness.group(), "m", [topic]), {topic: visible})
        poll_until(lambda: at_end(member, harness, topic), member)
        member.source.pause([(topic, 0)])
        before = member.source.positions()
        member.visible[topic] = visible + fill(harness, topic, sink, "pa")
        for _ in range(5):
            member.poll(0.1)
        assert member.source.positions() == before
        member.source.resume([(topic, 0)])
        poll_until(lambda: at_end(member, harness, topic), member)
        assert [record.offset for record in member.records] == [0, 1, 2]

    def test_a_successor_stands_where_its_predecessor_committed(self, harness: Harness) -> None:
        """Nothing but positions is committed, in transactions without records."""
        topic, group, sink = harness.topic(), harness.group(), started(harness.sink("s"))
        visible = fill(harness, topic, sink, "ppca")
        end = harness.end_offset(topic, 0)
        for start, commit in ((0, 2), (2, end), (end, end)):
            member = Truthful(harness.source(group, "m", [topic]), {topic: visible}, start)
            poll_until(partial(at_end, member, harness, topic), member)
            assert [r.offset for r in member.records] == [o for o in visible if o >= start]
            sink.begin()
            sink.send_offsets({(topic, 0): commit}, member.source.group_metadata(), CALL_S)
            sink.commit(CALL_S)
            assert member.source.committed([(topic, 0)], CALL_S) == {(topic, 0): commit}
            member.source.close()
        assert harness.committed(group, topic, 0) == end == harness.end_offset(topic, 0)

    def test_offsets_alone_can_be_aborted(self, harness: Harness) -> None:
        topic, group, sink = harness.topic(), harness.group(), started(harness.sink("s"))
        harness.append(topic, 0, b"k", b"x")
        member = Member(harness.source(group, "m", [topic]))
        poll_until(lambda: bool(member.records), member)
        for end, expected in ((sink.abort, None), (sink.commit, 1), (sink.abort, 1)):
            sink.begin()
            offset = {(topic, 0): 1 if expected is None or end == sink.commit else 0}
            sink.send_offsets(offset, member.source.group_metadata(), CALL_S)
            end(CALL_S)
            assert member.source.committed([(topic, 0)], CALL_S) == {(topic, 0): expected}
        assert values(harness.read(topic)) == [b"x"]

    def test_committed_waits_for_offsets_of_an_open_transaction(self, harness: Harness) -> None:
        """KIP-447, for a transaction without records too."""
        topic, group, sink = harness.topic(), harness.group(), started(harness.sink("s"))
        harness.append(topic, 0, b"k", b"x")
        member = Member(harness.source(group, "m", [topic]))
        poll_until(lambda: bool(member.records), member)
        sink.begin()
        sink.send_offsets({(topic, 0): 1}, member.source.group_metadata(), CALL_S)
        with pytest.raises(RetryCall):
            member.source.committed([(topic, 0)], 1.0)
        sink.commit(CALL_S)
        assert member.source.committed([(topic, 0)], CALL_S) == {(topic, 0): 1}

    def test_a_transaction_with_nothing_in_it_leaves_nothing(self, harness: Harness) -> None:
        topic, sink = harness.topic(), started(harness.sink("s"))
        for end in (sink.commit, sink.abort, sink.commit):
            sink.begin()
            end(CALL_S)
        assert fill(harness, topic, sink, "c") == [0]
        assert harness.end_offset(topic, 0) == 2

    def test_ends_tell_open_transactions_apart(self, harness: Harness) -> None:
        topic, sink = harness.topic(), started(harness.sink("s"))
        fill(harness, topic, sink, "pca")
        where, stable = (topic, 0), harness.end_offset(topic, 0)
        member = Member(harness.source(harness.group(), "m", [topic]))
        assert member.source.ends() == {}
        poll_until(lambda: member.source.ends() == {where: Ends(stable, stable)}, member)
        sink.begin()
        sink.produce(out(topic, b"open"))
        flushed(harness, topic, stable + 1)
        poll_until(lambda: member.source.ends() == {where: Ends(stable, stable + 1)}, member)
        harness.append(topic, 0, b"k", b"behind")
        poll_until(lambda: member.source.ends() == {where: Ends(stable, stable + 2)}, member)
        sink.commit(CALL_S)
        poll_until(lambda: member.source.ends() == {where: Ends(stable + 3, stable + 3)}, member)
        assert member.source.records_lost() == 0

    def test_ends_are_those_of_the_assignment(self, harness: Harness) -> None:
        topic, group = harness.topic(2), harness.group()
        first = Member(harness.source(group, "a", [topic]))
        poll_until(lambda: len(first.source.ends()) == 2, first)
        second = Member(harness.source(group, "b", [topic]))
        poll_until(lambda: len(second.source.ends()) == 1, first, second)
        assert first.source.ends().keys() == first.source.assignment()
        assert second.source.ends().keys() == second.source.assignment()
