"""The producer of the in-process broker: `TransactionalSink` on its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from processor.broker.transaction import GroupMetadata, Offsets
from processor.core.encode import OutputRecord
from processor.errors import AbortAndRewind, ExitProcess, RebuildProducer, RetryCall

if TYPE_CHECKING:
    from processor.broker.memory import Call, MemoryBroker

# Call: the states it may start from, the state it leads to.
_CALLS: dict[Call, tuple[set[str], str]] = {
    "init_transactions": ({"new"}, "ready"),
    "begin": ({"ready"}, "open"),
    "produce": ({"open"}, "open"),
    "send_offsets": ({"open"}, "open"),
    "commit": ({"open"}, "ready"),
    "abort": ({"open", "abortable"}, "ready"),
}


class MemorySink:
    """A transactional producer that refuses every call out of order, a pending one included."""

    def __init__(self, broker: MemoryBroker, transactional_id: str) -> None:
        self._broker = broker
        self._id = transactional_id
        self._epoch = -1
        self._state = "new"
        self._pending: Call | None = None  # timed out: only this call may follow
        self._applied = False  # the pending call has taken effect

    @property
    def transactional_id(self) -> str:
        return self._id

    def max_bytes(self, topic: str) -> int:
        return self._broker.max_bytes.get(topic, 2**20)

    def init_transactions(self, timeout_s: float) -> None:
        self._run("init_transactions", self._init)

    def begin(self) -> None:
        self._run("begin", lambda: None)

    def produce(self, record: OutputRecord) -> None:
        self._run(
            "produce",
            lambda: self._broker.produce(
                self._id, self._epoch, record.topic, record.key, record.value, record.headers
            ),
        )

    def send_offsets(self, offsets: Offsets, group: GroupMetadata, timeout_s: float) -> None:
        self._run("send_offsets", lambda: self._send(offsets, group))

    def commit(self, timeout_s: float) -> None:
        self._run(
            "commit", lambda: self._broker.end_transaction(self._id, self._epoch, "committed")
        )

    def abort(self, timeout_s: float) -> None:
        self._run("abort", lambda: self._broker.end_transaction(self._id, self._epoch, "aborted"))

    def rebuild(self) -> None:
        if self._state == "closed":
            raise ExitProcess("illegal call: rebuild of a closed producer")
        self._state, self._pending, self._applied, self._epoch = "new", None, False, -1

    def close(self) -> None:
        """What is open stays open until the id's next producer or the time-out ends it."""
        self._state = "closed"

    def _init(self) -> None:
        self._epoch = self._broker.init_transactions(self._id)

    def _send(self, offsets: Offsets, metadata: GroupMetadata) -> None:
        with self._broker.changed:
            self._broker.group(metadata.group).check(metadata, self._broker.lax)
            transaction = self._broker.transaction(self._id, self._epoch)
            transaction.offsets.update({(metadata.group, p): o for p, o in offsets.items()})

    def _run(self, call: Call, effect: Callable[[], None]) -> None:
        self._check(call)
        self._pending = call
        try:
            self._broker.faults.around(call, lambda: self._once(effect))
        except RetryCall:
            raise
        except AbortAndRewind:
            # What an earlier attempt has carried out is not refused now, whatever was ordered.
            if not self._applied:
                self._state, self._pending = "abortable", None
                raise
        except BaseException:
            self._state = "lost"
            raise
        self._state = _CALLS[call][1]
        self._pending, self._applied = None, False

    def _once(self, effect: Callable[[], None]) -> None:
        if not self._applied:
            effect()
            self._applied = True

    def _check(self, call: Call) -> None:
        if self._state == "lost":
            raise RebuildProducer("the producer is lost")
        if self._state == "abortable" and call != "abort":
            raise AbortAndRewind("the transaction has failed")
        before, _ = _CALLS[call]
        if self._state not in before or self._pending not in (None, call):
            raise ExitProcess(
                f"illegal call: {call} in state {self._state}, pending {self._pending}"
            )
