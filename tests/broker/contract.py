"""What the worker relies on, as tests that run over every broker we have."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from processor.broker.transaction import Transactions, check_member
from processor.errors import AbortAndRewind, ExitProcess, RebuildProducer
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
from tests.broker.contract_positions import PositionsContract

__all__ = ["BrokerContract", "Harness", "Member", "flushed", "out", "poll_until", "started"]
__all__ += ["values"]


class BrokerContract(PositionsContract):
    """Subclass and give the fixture `harness`."""

    def test_a_record_comes_back_as_it_was_sent(self, harness: Harness) -> None:
        topic = harness.topic()
        headers = (("a", b"1"), ("a", None), ("b", b""))
        harness.append(topic, 0, None, None)
        harness.append(topic, 0, b"", b"")
        harness.append(topic, 0, b"\xff", b"v", headers)
        member = Member(harness.source(harness.group(), "m", [topic]))
        poll_until(lambda: len(member.records) == 3, member)
        assert [r.value for r in member.records] == [None, b"", b"v"]
        assert [r.key for r in member.records] == [None, b"", b"\xff"]
        assert [r.headers for r in member.records] == [(), (), headers]
        assert [(r.topic, r.partition, r.offset) for r in member.records] == [
            (topic, 0, offset) for offset in range(3)
        ]
        assert all(abs(r.timestamp_ms / 1000 - time.time()) < 3600 for r in member.records)

    def test_records_and_offsets_commit_together(self, harness: Harness) -> None:
        source, target, group = harness.topic(), harness.topic(), harness.group()
        harness.append(source, 0, b"k", b"in")
        member = Member(harness.source(group, "m", [source]))
        poll_until(lambda: bool(member.records), member)
        sink = started(harness.sink("s"))
        sink.begin()
        sink.produce(out(target, b"out"))
        sink.send_offsets({(source, 0): 1}, member.source.group_metadata(), CALL_S)
        assert harness.read(target) == []
        assert harness.committed(group, source, 0) is None
        sink.commit(CALL_S)
        assert values(harness.read(target)) == [b"out"]
        assert harness.committed(group, source, 0) == 1
        assert member.source.committed([(source, 0)], CALL_S) == {(source, 0): 1}

    def test_no_committed_offset_is_none(self, harness: Harness) -> None:
        topic = harness.topic()
        member = Member(harness.source(harness.group(), "m", [topic]))
        poll_until(lambda: bool(member.assigned), member)
        assert member.source.committed([(topic, 0)], CALL_S) == {(topic, 0): None}

    def test_an_aborted_transaction_leaves_only_traces(self, harness: Harness) -> None:
        source, target, group = harness.topic(), harness.topic(), harness.group()
        member = Member(harness.source(group, "m", [source]))
        poll_until(lambda: bool(member.assigned), member)
        sink = started(harness.sink("s"))
        sink.begin()
        sink.produce(out(target, b"never"))
        sink.send_offsets({(source, 0): 5}, member.source.group_metadata(), CALL_S)
        sink.abort(CALL_S)
        sink.begin()
        sink.produce(out(target, b"out"))
        sink.commit(CALL_S)
        assert values(harness.read(target)) == [b"out"]
        assert harness.committed(group, source, 0) is None

    def test_markers_and_aborted_records_take_offsets(self, harness: Harness) -> None:
        target = harness.topic()
        sink = started(harness.sink("s"))
        ends = (sink.commit, sink.abort, sink.commit)
        for n, (value, end) in enumerate(zip((b"a", b"b", b"c"), ends, strict=True)):
            sink.begin()
            sink.produce(out(target, value))
            flushed(harness, target, 2 * n + 1)  # an abort purges what has not left the client
            end(CALL_S)
        member = Member(harness.source(harness.group(), "m", [target]))
        poll_until(lambda: len(member.records) == 2, member)
        assert [(r.offset, r.value) for r in member.records] == [(0, b"a"), (4, b"c")]
        assert harness.end_offset(target, 0) == 6

    def test_an_open_transaction_holds_readers_back(self, harness: Harness) -> None:
        target = harness.topic()
        sink = started(harness.sink("s"))
        sink.begin()
        sink.produce(out(target, b"open"))
        flushed(harness, target)
        harness.append(target, 0, b"k", b"plain")
        assert harness.read(target) == []
        assert harness.end_offset(target, 0) == 0
        assert values(harness.read(target, "read_uncommitted")) == [b"open", b"plain"]
        sink.commit(CALL_S)
        assert values(harness.read(target)) == [b"open", b"plain"]

    def test_a_second_producer_fences_the_first(self, harness: Harness) -> None:
        target = harness.topic()
        first = started(harness.sink("s"))
        first.begin()
        first.produce(out(target, b"lost"))
        flushed(harness, target)
        second = started(harness.sink("s"))
        second.begin()
        second.produce(out(target, b"kept"))
        second.commit(CALL_S)
        with pytest.raises(RebuildProducer):
            first.commit(CALL_S)
        assert values(harness.read(target)) == [b"kept"]
        first.rebuild()
        started(first).begin()
        first.produce(out(target, b"again"))
        first.commit(CALL_S)
        assert values(harness.read(target)) == [b"kept", b"again"]

    @pytest.mark.parametrize(
        "calls",
        ["begin", "init commit", "init abort", "init begin begin", "init begin commit commit"],
    )
    def test_calls_out_of_order_are_refused(self, harness: Harness, calls: str) -> None:
        sink = harness.sink("s")
        functions: dict[str, Callable[[], None]] = {
            "init": lambda: sink.init_transactions(CALL_S),
            "begin": sink.begin,
            "commit": lambda: sink.commit(CALL_S),
            "abort": lambda: sink.abort(CALL_S),
        }
        *legal, last = calls.split()
        for call in legal:
            functions[call]()
        with pytest.raises(ExitProcess):
            functions[last]()

    def test_a_stranger_cannot_commit_offsets(self, harness: Harness) -> None:
        source, target, group = harness.topic(), harness.topic(), harness.group()
        leaver = Member(harness.source(group, "a", [source]))
        poll_until(lambda: bool(leaver.assigned), leaver)
        metadata = leaver.source.group_metadata()
        check_member(metadata)
        leaver.source.close()
        stayer = Member(harness.source(group, "b", [source]))
        poll_until(lambda: bool(stayer.assigned), stayer)
        sink = started(harness.sink("s"))
        sink.begin()
        sink.produce(out(target, b"x"))
        with pytest.raises(AbortAndRewind):
            sink.send_offsets({(source, 0): 1}, metadata, CALL_S)
        sink.abort(CALL_S)
        sink.begin()
        sink.produce(out(target, b"y"))
        sink.send_offsets({(source, 0): 1}, stayer.source.group_metadata(), CALL_S)
        sink.commit(CALL_S)
        assert values(harness.read(target)) == [b"y"]
        assert harness.committed(group, source, 0) == 1

    def test_a_member_cannot_commit_with_an_old_generation(self, harness: Harness) -> None:
        """KIP-447: what fences a member that has not heard of a rebalance."""
        topic, group = harness.topic(2), harness.group()
        first = Member(harness.source(group, "a", [topic]))
        poll_until(lambda: len(first.source.assignment()) == 2, first)
        old = first.source.group_metadata()
        second = Member(harness.source(group, "b", [topic]))
        poll_until(lambda: len(second.source.assignment()) == 1, first, second)
        sink = started(harness.sink("s"))
        sink.begin()
        with pytest.raises(AbortAndRewind):
            sink.send_offsets({(topic, 0): 1, (topic, 1): 1}, old, CALL_S)
        sink.abort(CALL_S)
        assert first.source.group_metadata().member == old.member
        sink.begin()
        sink.send_offsets({(topic, 0): 1}, first.source.group_metadata(), CALL_S)
        sink.commit(CALL_S)
        assert harness.committed(group, topic, 0) == 1
        assert harness.committed(group, topic, 1) is None

    def test_publish_refuses_before_the_join(self, harness: Harness) -> None:
        topic = harness.topic()
        source = harness.source(harness.group(), "m", [topic])
        sink = harness.sink("s")
        transactions = Transactions(sink, source.group_metadata)
        transactions.start()
        with pytest.raises(AbortAndRewind, match="not a member"):
            transactions.publish([out(topic, b"x")], {(topic, 0): 1})
        assert harness.read(topic) == []

    def test_seek_goes_back_and_pause_holds(self, harness: Harness) -> None:
        topic = harness.topic(2)
        for partition in (0, 1):
            for n in range(4):
                harness.append(topic, partition, b"k", b"%d" % n)
        member = Member(harness.source(harness.group(), "m", [topic]))
        poll_until(lambda: len(member.records) == 8, member)
        member.source.pause([(topic, 0)])
        member.source.seek({(topic, 0): 2, (topic, 1): 1})
        member.records.clear()
        poll_until(lambda: len(member.records) == 3, member)
        member.poll(0.3)
        assert [(r.partition, r.offset) for r in member.records] == [(1, 1), (1, 2), (1, 3)]
        member.source.resume([(topic, 0)])
        poll_until(lambda: len(member.records) == 5, member)
        assert [(r.partition, r.offset) for r in member.records[3:]] == [(0, 2), (0, 3)]

    def test_a_seek_right_after_the_assignment_holds(self, harness: Harness) -> None:
        topic = harness.topic()
        for n in range(4):
            harness.append(topic, 0, b"k", b"%d" % n)
        source = harness.source(harness.group(), "m", [topic])
        member = Member(source)
        poll_until(lambda: bool(member.assigned), member)
        source.seek({(topic, 0): 3})
        member.records.clear()
        poll_until(lambda: bool(member.records), member)
        assert [r.offset for r in member.records] == [3]

    def test_members_share_and_hand_over(self, harness: Harness) -> None:
        topic, group = harness.topic(4), harness.group()
        first = Member(harness.source(group, "a", [topic]))
        poll_until(lambda: len(first.source.assignment()) == 4, first)
        second = Member(harness.source(group, "b", [topic]))
        poll_until(lambda: len(second.source.assignment()) == 2, first, second)
        assert len(first.revoked) == 2
        assert first.source.assignment() | second.source.assignment() == set(first.assigned)
        assert sorted(first.revoked) == sorted(second.source.assignment())
        check_member(first.source.group_metadata())
        first.source.close()
        poll_until(lambda: len(second.source.assignment()) == 4, second)
        assert second.revoked == []

    def test_a_static_member_comes_back_to_its_partitions(self, harness: Harness) -> None:
        topic, group = harness.topic(4), harness.group()
        first = Member(harness.source(group, "a", [topic], static=True))
        other = Member(harness.source(group, "b", [topic], static=True))
        poll_until(lambda: len(other.source.assignment()) == 2, first, other)
        poll_until(lambda: len(first.source.assignment()) == 2, first, other)
        owned, generation = first.source.assignment(), other.source.group_metadata().generation
        first.source.close()
        again = Member(harness.source(group, "a", [topic], static=True))
        begun = time.monotonic()
        poll_until(lambda: again.source.assignment() == owned, again, other)
        assert time.monotonic() - begun < 5
        assert other.source.group_metadata().generation == generation

    def test_the_older_of_two_static_twins_exits(self, harness: Harness) -> None:
        topic, group = harness.topic(), harness.group()
        older = Member(harness.source(group, "a", [topic], static=True))
        poll_until(lambda: bool(older.assigned), older)
        newer = Member(harness.source(group, "a", [topic], static=True))
        poll_until(lambda: bool(newer.assigned), newer)
        with pytest.raises(ExitProcess):
            poll_until(lambda: False, older)

    def test_metadata_says_that_we_are_no_member(self, harness: Harness) -> None:
        source = harness.source(harness.group(), "m", [harness.topic()])
        metadata = source.group_metadata()
        assert metadata.generation < 0
        with pytest.raises(AbortAndRewind):
            check_member(metadata)
