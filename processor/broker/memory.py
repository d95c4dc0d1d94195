"""A strict in-process broker: topics, transactions, fencing, consumer groups, and faults on order.

It ships with the package: the demo runs on it, and so can the tests of whoever builds on us. It
refuses what Kafka refuses and some of what Kafka lets pass, so that code that runs here has no
excuse there. What it has not: replication, retention, compaction, time-outs that fire by
themselves (`expel` and `time_out` stand for them), and the eager rebalance protocol.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count
from typing import Literal

from processor.broker.memory_group import Group
from processor.broker.memory_log import Isolation, PartitionLog, Transaction
from processor.broker.memory_sink import MemorySink
from processor.broker.memory_source import MemorySource
from processor.broker.transaction import Clock, TopicPartition
from processor.core.encode import OutputRecord
from processor.core.event import Headers, Record
from processor.errors import AbortAndRewind, RebuildProducer, ShrinkOutput

MAX_BYTES = 2**20  # what a topic takes unless told otherwise

Call = Literal[
    "poll",
    "committed",
    "seek",
    "init_transactions",
    "begin",
    "produce",
    "send_offsets",
    "commit",
    "abort",
]


@dataclass(frozen=True, slots=True)
class Fault:
    error: BaseException | None
    applied: bool
    hook: Callable[[], None] | None


class Faults:
    """What is to go wrong, per call and in order; each fault is used once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, deque[Fault | None]] = defaultdict(deque)

    def push(
        self,
        call: Call,
        error: BaseException,
        *,
        applied: bool = False,
        skip: int = 0,
        hook: Callable[[], None] | None = None,
    ) -> None:
        """Fail one call, after `skip` calls that succeed. `applied`: the call takes effect and
        only its answer is lost, as with a time-out. An abortable error is an answer: it says
        that the call had no effect. `hook` is run right before."""
        if applied and isinstance(error, AbortAndRewind):
            raise ValueError("no broker carries out a call and then asks for an abort")
        self._add(call, Fault(error, applied, hook), skip)

    def hook(self, call: Call, function: Callable[[], None], *, skip: int = 0) -> None:
        """Run `function` right before a call: whatever happens elsewhere at that moment."""
        self._add(call, Fault(None, True, function), skip)

    def clear(self) -> None:
        with self._lock:
            self._queues.clear()

    def pending(self) -> int:
        with self._lock:
            return sum(1 for queue in self._queues.values() for fault in queue if fault)

    def around(self, call: Call, effect: Callable[[], None] | None = None) -> None:
        """Carry out a call with its fault, if one is due."""
        with self._lock:
            queue = self._queues[call]
            fault = queue.popleft() if queue else None
        if fault is not None and fault.hook is not None:
            fault.hook()
        if effect is not None and (fault is None or fault.applied):
            effect()
        if fault is not None and fault.error is not None:
            raise fault.error

    def _add(self, call: Call, fault: Fault, skip: int) -> None:
        with self._lock:
            self._queues[call].extend([*[None] * skip, fault])


class MemoryBroker:
    """All state behind one lock; `changed` is notified of whatever a poll may wait for.

    `lax`: a member that has been expelled reports at once that it is none, as Kafka's client may,
    and a dynamic one may commit then, as Kafka lets it. Only a check of ours stands against it.
    """

    def __init__(self, clock: Clock = time.time, *, lax: bool = False) -> None:
        self.faults = Faults()
        self.lax = lax
        self.changed = threading.Condition(threading.RLock())
        self.version = 0
        self._clock = clock
        self.max_bytes: dict[str, int] = {}  # by topic
        self._topics: dict[str, list[PartitionLog]] = {}
        self._groups: dict[str, Group] = {}
        self._epochs: dict[str, int] = {}
        self._transactions: dict[str, Transaction] = {}
        self._ids = count(1)
        self._spread = count()

    # Topics

    def create_topic(self, name: str, partitions: int = 1, max_bytes: int = MAX_BYTES) -> None:
        with self.changed:
            if name in self._topics:
                raise ValueError(f"topic {name!r} exists")
            self._topics[name] = [PartitionLog(name, p) for p in range(partitions)]
            self.max_bytes[name] = max_bytes
            self.notify()

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete what lies below an offset, as retention does."""
        with self.changed:
            log = self.log(topic, partition)
            log.start = max(log.start, before)

    def topics(self) -> frozenset[str]:
        with self.changed:
            return frozenset(self._topics)

    def append(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        timestamp_ms: int | None = None,
    ) -> Record:
        """Append outside any transaction, as a plain producer does."""
        with self.changed:
            log = self.log(topic, self._partition(topic, key) if partition is None else partition)
            record = log.append(key, value, headers, self._timestamp(timestamp_ms))
            self.notify()
            return record

    def read(self, topic: str, isolation: Isolation = "read_committed") -> list[Record]:
        """All visible records, partition by partition."""
        with self.changed:
            logs = self._topics[topic]
            return [r for log in logs for r in log.read(0, log.end, isolation)[0]]

    def end_offset(
        self, topic: str, partition: int, isolation: Isolation = "read_committed"
    ) -> int:
        """The last stable offset, or the high watermark for read_uncommitted."""
        with self.changed:
            log = self.log(topic, partition)
            return log.last_stable if isolation == "read_committed" else log.end

    def log(self, topic: str, partition: int) -> PartitionLog:
        return self._topics[topic][partition]

    def partitions(self, topics: Collection[str]) -> list[TopicPartition]:
        return [(t, log.partition) for t in sorted(topics) for log in self._topics.get(t, [])]

    def notify(self) -> None:
        self.version += 1
        self.changed.notify_all()

    # Clients

    def source(
        self,
        group: str,
        member: str,
        topics: Collection[str],
        *,
        static: bool = True,
        first_start: Literal["earliest", "latest"] = "earliest",
        auto_offset_reset: Literal["error", "earliest", "latest"] = "error",
    ) -> MemorySource:
        """A member of a group. `static`: `member` is its `group.instance.id`."""
        start = first_start, auto_offset_reset
        return MemorySource(self, group, member, frozenset(topics), static, *start)

    def sink(self, transactional_id: str) -> MemorySink:
        return MemorySink(self, transactional_id)

    # Groups

    def group(self, name: str) -> Group:
        return self._groups.setdefault(name, Group(name))

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        with self.changed:
            return self.group(group).committed.get((topic, partition))

    def unstable(self, group: str, partition: TopicPartition) -> bool:
        """An open transaction holds offsets of this partition (UNSTABLE_OFFSET_COMMIT)."""
        return any((group, partition) in t.offsets for t in self._transactions.values())

    def member_id(self, member: str) -> str:
        return f"{member}-{next(self._ids)}"

    def expel(self, group: str, member: str) -> None:
        """End the session of a member, as its time-out would."""
        with self.changed:
            for found in [m for m in self.group(group).members if m.rpartition("-")[0] == member]:
                self.expel_id(group, found)

    def expel_id(self, group: str, member_id: str) -> None:
        """As `expel`, where a process and its successor are both members."""
        with self.changed:
            state = self.group(group)
            state.leave(member_id, self.partitions(state.members[member_id].topics))
            self.notify()

    # Transactions

    def init_transactions(self, transactional_id: str) -> int:
        """A new epoch of the id; whatever transaction the last epoch left open is aborted."""
        with self.changed:
            self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
            if transactional_id in self._transactions:
                self._end(transactional_id, "aborted")
            return self._epochs[transactional_id]

    def time_out(self, transactional_id: str) -> None:
        """Abort the id's open transaction and fence its producer, as the coordinator does past
        `transaction.timeout.ms`."""
        self.init_transactions(transactional_id)

    def transaction(self, transactional_id: str, epoch: int) -> Transaction:
        """The open transaction of a producer, begun if there is none; raises
        `RebuildProducer` where the producer is fenced."""
        self._check_epoch(transactional_id, epoch)
        return self._transactions.setdefault(transactional_id, Transaction(transactional_id))

    def produce(
        self,
        transactional_id: str,
        epoch: int,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
    ) -> None:
        with self.changed:
            if topic not in self._topics:
                raise AbortAndRewind(f"UNKNOWN_TOPIC_OR_PART: {topic}")
            log = self.log(topic, self._partition(topic, key))
            transaction = self.transaction(transactional_id, epoch)
            if (size := OutputRecord(topic, key, value, headers).size) > self.max_bytes[topic]:
                raise ShrinkOutput(f"MSG_SIZE_TOO_LARGE: {size} bytes for {topic}", topic)
            log.append(key, value, headers, self._timestamp(None), transaction)
            self.notify()

    def end_transaction(
        self, transactional_id: str, epoch: int, state: Literal["committed", "aborted"]
    ) -> None:
        with self.changed:
            self._check_epoch(transactional_id, epoch)
            if transactional_id in self._transactions:
                self._end(transactional_id, state)

    def _end(self, transactional_id: str, state: Literal["committed", "aborted"]) -> None:
        transaction = self._transactions.pop(transactional_id)
        transaction.state = state
        for log in transaction.logs:
            log.end_transaction(transaction)
        if state == "committed":
            for (group, partition), offset in transaction.offsets.items():
                self.group(group).committed[partition] = offset
        self.notify()

    def _check_epoch(self, transactional_id: str, epoch: int) -> None:
        if epoch != self._epochs.get(transactional_id):
            raise RebuildProducer(f"PRODUCER_FENCED: {transactional_id} has a newer producer")

    def _partition(self, topic: str, key: bytes | None) -> int:
        number = next(self._spread) if key is None else zlib.crc32(key)
        return number % len(self._topics[topic])

    def _timestamp(self, timestamp_ms: int | None) -> int:
        return int(self._clock() * 1000) if timestamp_ms is None else timestamp_ms
