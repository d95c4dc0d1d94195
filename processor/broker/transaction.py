"""What the worker needs of a broker, and the one short transaction that publishes outcomes.

Offsets are always *next* offsets: of the first record that is not yet dealt with. Nobody adds 1
to an offset but `Ledger`, which knows the last finished record of a partition.

A call reports what has to be done by the class of its error (`processor.errors`):

    RetryCall        call the same function again: it may have taken effect, and is idempotent
    AbortAndRewind   the transaction cannot commit: abort it
    RebuildProducer  the producer is lost, the outcome of its transaction unknown
    ShrinkOutput     so it is, for a record was too large: nothing was published
    ExitProcess      a bug, a fence that stands, or a setting: this process cannot mend it
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from processor.core.encode import OutputRecord
from processor.core.event import Record
from processor.errors import AbortAndRewind, ExitProcess, RebuildProducer, RetryCall

TopicPartition = tuple[str, int]
Offsets = Mapping[TopicPartition, int]
OnPartitions = Callable[[Collection[TopicPartition]], None]
Clock = Callable[[], float]

RETRY_PAUSE_S = 0.005  # calls that time out have waited by themselves


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """Who commits: what lets the broker refuse the offsets of a member that lost its partitions
    (KIP-447). `handle` is the client's own form of it."""

    group: str
    generation: int
    member: str
    handle: object = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a partition ends. A transaction that is open on it keeps `stable`, where read_committed
    readers stop, below `high`."""

    stable: int
    high: int


class RecordSource(Protocol):
    """A member of a consumer group. One thread calls it; callbacks run inside `poll` and `close`.

    Raises `ExitProcess` where the member is fenced or a position is lost; passing trouble of the
    network is waited out inside.
    """

    def open(self, on_assign: OnPartitions, on_revoke: OnPartitions) -> None:
        """Subscribe. `on_revoke` has returned before another member can get the partitions,
        unless they were lost already; which of the two it is, nobody can tell for sure."""

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """Records of assigned partitions that are not paused, as soon as there are any; in
        offset order per partition, and read_committed."""

    def assignment(self) -> frozenset[TopicPartition]: ...

    def positions(self) -> dict[TopicPartition, int]:
        """Next offsets of assigned partitions, where they are known: every record below has been
        handed out. At the end of a partition they stand behind control markers and aborted
        records, which are never handed out."""

    def ends(self) -> dict[TopicPartition, Ends]:
        """Of assigned partitions, as of the last few seconds; does not wait."""

    def records_lost(self) -> int:
        """How many records had been deleted before they were read, where
        `kafka.auto_offset_reset` lets us go on after that; a total."""

    def group_metadata(self) -> GroupMetadata:
        """As of now; generation -1 or an empty member id where we are no member."""

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, int | None]:
        """Committed next offsets, None where there is none. Waits for transactions that are being
        ended (KIP-447); raises `RetryCall` where that takes longer than the time-out."""

    def seek(self, offsets: Offsets) -> None:
        """The next `poll` returns records from these offsets on; others keep their position."""

    def pause(self, partitions: Collection[TopicPartition]) -> None: ...

    def resume(self, partitions: Collection[TopicPartition]) -> None: ...

    def close(self) -> None: ...


class TransactionalSink(Protocol):
    """A transactional producer. Calls out of order raise `ExitProcess`; after `RetryCall` only
    the same call may follow, after `RebuildProducer` only `rebuild`."""

    @property
    def transactional_id(self) -> str: ...

    def max_bytes(self, topic: str) -> int:
        """The largest `OutputRecord.size` that the topic takes, as far as is known."""

    def init_transactions(self, timeout_s: float) -> None:
        """Fence other producers of our id, and end the transaction they left: returns once it
        is known which way."""

    def begin(self) -> None: ...

    def produce(self, record: OutputRecord) -> None:
        """Queue a record; that it could not be delivered is reported by `commit`."""

    def send_offsets(self, offsets: Offsets, group: GroupMetadata, timeout_s: float) -> None: ...

    def commit(self, timeout_s: float) -> None: ...

    def abort(self, timeout_s: float) -> None: ...

    def rebuild(self) -> None:
        """Throw the producer away, whatever its state, and build a new one."""

    def close(self) -> None: ...


def check_member(group: GroupMetadata) -> None:
    """Raise `AbortAndRewind` for metadata that a broker would not check.

    A classic group takes a transactional commit of generation -1 and an empty member id without
    any check, even while it has members (evolution-gaming/kafka-flow#854); the client reports
    just that before it has joined and after it was expelled.
    """
    if group.generation < 0 or not group.member:
        raise AbortAndRewind(
            f"not a member of group {group.group!r} now (generation {group.generation}, "
            f"member {group.member!r}): its offsets would not be fenced"
        )


class State(enum.Enum):
    NEW = "init_transactions comes next"
    READY = "no transaction is open"
    OPEN = "a transaction is open"
    ENDING = "the transaction is being committed or aborted"
    LOST = "only rebuild can follow"


class Transactions:
    """Owns the one fact "is a transaction in flight".

    Between calls of its methods none is: `publish` begins one and ends it, and where it cannot
    end it the state is LOST, which only `rebuild` leaves. `budget_s` bounds all calls of one
    transaction together; it belongs below half of the broker's transaction time-out.
    """

    def __init__(
        self,
        sink: TransactionalSink,
        group: Callable[[], GroupMetadata],
        budget_s: float = 10.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._sink = sink
        self._group = group
        self._budget_s = budget_s
        self._clock = clock
        self.state = State.NEW
        self.in_doubt = False  # after `RebuildProducer`: whether a commit had been asked for

    def start(self) -> None:
        """Take over the transactional id. Raises `ExitProcess` past the budget: the supervisor's
        restart waits longer than we can."""
        self._expect(State.NEW)
        deadline = self._clock() + self._budget_s
        self.state = State.LOST
        try:
            self._call("init_transactions", self._sink.init_transactions, deadline)
        except RebuildProducer as error:
            if isinstance(error.__cause__, RetryCall):
                remedy = "has the cluster transaction.state.log.replication.factor brokers?"
                raise ExitProcess(f"cannot start transactions: {error}; {remedy}") from error
            raise
        self.state = State.READY

    def rebuild(self) -> None:
        """Replace the producer and end what the old one left, committed or aborted: afterwards
        the committed offsets tell which."""
        self._sink.rebuild()
        self.state = State.NEW
        self.start()

    def publish(
        self, records: Sequence[OutputRecord], offsets: Offsets, budget_s: float | None = None
    ) -> None:
        """Begin, produce all, send the offsets, commit.

        Raises `AbortAndRewind` after the transaction has been aborted, `RebuildProducer` where
        its outcome is unknown: `rebuild`, then rewind to the committed offsets. A commit that
        timed out is called again and never aborted: the broker may be about to carry it out
        (librdkafka#4558, PR#4016).
        """
        self._expect(State.READY)
        check_member(self._group())  # begins nothing in vain; what counts is the check below
        deadline = self._clock() + (self._budget_s if budget_s is None else budget_s)
        self.state, self.in_doubt = State.OPEN, False
        try:
            self._transact(records, offsets, deadline)
        except AbortAndRewind:
            self._abort()
            raise
        except BaseException:
            self.state = State.LOST
            raise
        self.state = State.READY

    def close(self) -> None:
        self.state = State.LOST
        self._sink.close()

    def _transact(self, records: Sequence[OutputRecord], offsets: Offsets, deadline: float) -> None:
        sink = self._sink
        self._call("begin", _untimed(sink.begin), deadline)
        for record in records:
            self._call("produce", _untimed(sink.produce, record), deadline)
        # Read right before use: metadata kept from the assignment would be stale after a
        # rebalance that leaves our partitions alone (KAFKA-9741).
        group = self._group()
        check_member(group)
        self._call("send_offsets", lambda left: sink.send_offsets(offsets, group, left), deadline)
        self.state, self.in_doubt = State.ENDING, True
        self._call("commit", sink.commit, deadline)

    def _abort(self) -> None:
        self.state = State.ENDING
        deadline = self._clock() + self._budget_s
        try:
            self._call("abort", self._sink.abort, deadline)
        except AbortAndRewind as error:
            self.state = State.LOST
            raise RebuildProducer(f"abort did not end the transaction: {error}") from error
        except BaseException:
            self.state = State.LOST
            raise
        self.state = State.READY

    def _call(self, name: str, function: Callable[[float], None], deadline: float) -> None:
        """Call until it succeeds, fails with another error, or the budget is spent.

        Past the budget the call is still pending in the client, and no other may follow it; only
        a new producer finds out what became of it.
        """
        while True:
            try:
                return function(max(0.1, deadline - self._clock()))
            except RetryCall as error:
                if self._clock() >= deadline:
                    raise RebuildProducer(f"{name} did not end in its budget: {error}") from error
                time.sleep(RETRY_PAUSE_S)

    def _expect(self, state: State) -> None:
        if self.state is not state:
            raise ExitProcess(f"a bug: called in state {self.state.name}, needs {state.name}")


def _untimed(function: Callable[..., None], *args: object) -> Callable[[float], None]:
    return lambda _left: function(*args)
