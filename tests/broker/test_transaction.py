"""The one transaction: what follows what, and what an error leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from processor.broker.memory import Call, MemoryBroker
from processor.broker.transaction import GroupMetadata, State, Transactions, check_member
from processor.errors import AbortAndRewind, ExitProcess, RebuildProducer, RetryCall
from tests.broker.contract import Member, out, values

OFFSETS = {("in", 0): 1}


class Bench:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.broker.create_topic("in")
        self.broker.create_topic("out")
        self.member = Member(self.broker.source("g", "m", ["in"]))
        self.member.poll(0)
        self.now = 0.0
        self.metadata: Callable[[], GroupMetadata] = self.member.source.group_metadata
        self.transactions = Transactions(
            self.broker.sink("id"), lambda: self.metadata(), budget_s=5, clock=self.clock
        )

    def clock(self) -> float:
        self.now += 0.5
        return self.now

    def publish(self, value: bytes = b"x") -> None:
        self.transactions.publish([out("out", value)], OFFSETS)

    def fail(self, call: Call, error: Exception, times: int = 1, applied: bool = False) -> None:
        for _ in range(times):
            self.broker.faults.push(call, error, applied=applied)

    @property
    def written(self) -> list[bytes | None]:
        return values(self.broker.read("out"))


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.transactions.start()
    return bench


def test_records_and_offsets(bench: Bench) -> None:
    bench.publish()
    assert bench.written == [b"x"]
    assert bench.broker.committed("g", "in", 0) == 1
    assert bench.transactions.state is State.READY


def test_only_a_started_one_publishes() -> None:
    bench = Bench()
    with pytest.raises(ExitProcess, match="NEW, needs READY"):
        bench.publish()
    bench.transactions.start()
    with pytest.raises(ExitProcess, match="READY, needs NEW"):
        bench.transactions.start()


@pytest.mark.parametrize("call", ["begin", "produce", "send_offsets", "commit"])
def test_an_abort_leaves_it_ready(bench: Bench, call: Call) -> None:
    bench.fail(call, AbortAndRewind("no"))
    with pytest.raises(AbortAndRewind):
        bench.publish()
    assert bench.transactions.state is State.READY
    bench.publish(b"y")
    assert bench.written == [b"y"]


@pytest.mark.parametrize("call", ["begin", "produce", "send_offsets", "commit"])
@pytest.mark.parametrize("error", [RebuildProducer("lost"), ExitProcess("no"), KeyError("?")])
def test_a_lost_one_only_rebuilds(bench: Bench, call: Call, error: Exception) -> None:
    bench.fail(call, error)
    with pytest.raises(type(error)):
        bench.publish()
    assert bench.transactions.state is State.LOST
    with pytest.raises(ExitProcess):
        bench.publish()
    bench.transactions.rebuild()
    bench.publish(b"y")
    assert bench.written == [b"y"]


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("call", ["begin", "produce", "send_offsets", "commit", "abort"])
def test_a8_past_its_budget_a_call_is_given_up(bench: Bench, call: Call, applied: bool) -> None:
    if call == "abort":
        bench.fail("commit", AbortAndRewind("no"))
    bench.fail(call, RetryCall("timed out"), times=50, applied=applied)
    with pytest.raises(RebuildProducer, match="budget"):
        bench.publish()
    assert 30 < bench.broker.faults.pending() < 50
    bench.broker.faults.clear()
    bench.transactions.rebuild()
    committed = call == "commit" and applied
    assert bench.written == ([b"x"] if committed else [])
    assert bench.broker.committed("g", "in", 0) == (1 if committed else None)


def test_init_past_its_budget_exits() -> None:
    bench = Bench()
    bench.fail("init_transactions", RetryCall("timed out"), times=50)
    with pytest.raises(ExitProcess, match="cannot start"):
        bench.transactions.start()


@pytest.mark.parametrize("generation", [-1, 0, 3])
@pytest.mark.parametrize("member", ["", "m-1"])
def test_a15_the_guard(generation: int, member: str) -> None:
    metadata = GroupMetadata("g", generation, member)
    if generation >= 0 and member:
        check_member(metadata)
    else:
        with pytest.raises(AbortAndRewind, match="not a member"):
            check_member(metadata)


def test_a16_metadata_is_read_right_before_the_offsets_are_sent(bench: Bench) -> None:
    """Expelled between begin and send: nothing is sent, and the transaction is aborted."""
    sent: list[str] = []
    fresh = bench.metadata

    def expelled() -> None:
        bench.metadata = lambda: GroupMetadata("g", 2, "")

    bench.broker.faults.hook("produce", expelled)
    bench.broker.faults.hook("send_offsets", lambda: sent.append("offsets"))
    with pytest.raises(AbortAndRewind, match="not a member"):
        bench.publish()
    assert sent == []
    assert bench.broker.end_offset("out", 0) == 2  # the record and the marker of its abort
    bench.metadata = fresh
    bench.publish(b"y")
    assert bench.written == [b"y"]
