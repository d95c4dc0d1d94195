"""librdkafka's mock cluster, which runs inside the test process and fails on request, and a member
of a group in it.

Good for what the client makes of an error, a lost connection or an expired member. It shows open
and aborted records to read_committed readers and takes offsets of stale generations, so nothing
about isolation, committed offsets or fencing can be asserted on it.
"""

from __future__ import annotations

import ctypes
import enum
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Any, Self

from confluent_kafka import cimpl

from processor.broker.kafka import KafkaSource
from processor.broker.transaction import GroupMetadata
from processor.config import KafkaSettings

PATIENCE_S = 30.0  # for what takes a second or two

PRODUCER = 0  # the kind of handle that the cluster hangs on; it never connects to anything
_POINTER, _INT, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
_ID, _API = ctypes.c_int32, ctypes.c_int16
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "conf_new": (_POINTER, []),
    "new": (_POINTER, [_INT, _POINTER, _TEXT, ctypes.c_size_t]),
    "destroy": (None, [_POINTER]),
    "mock_cluster_new": (_POINTER, [_POINTER, _INT]),
    "mock_cluster_destroy": (None, [_POINTER]),
    "mock_cluster_bootstraps": (_TEXT, [_POINTER]),
    "mock_topic_create": (_INT, [_POINTER, _TEXT, _INT, _INT]),
    "mock_push_request_errors_array": (
        None,
        [_POINTER, _API, ctypes.c_size_t, ctypes.POINTER(_INT)],
    ),
    "mock_clear_request_errors": (None, [_POINTER, _API]),
    "mock_broker_set_down": (_INT, [_POINTER, _ID]),
    "mock_broker_set_up": (_INT, [_POINTER, _ID]),
    "mock_group_initial_rebalance_delay_ms": (None, [_POINTER, _ID]),
}


class Api(enum.IntEnum):
    """Requests by their number in Kafka's protocol."""

    Produce = 0
    Heartbeat = 12
    InitProducerId = 22
    AddPartitionsToTxn = 24
    AddOffsetsToTxn = 25
    EndTxn = 26
    TxnOffsetCommit = 28


def _library() -> dict[str, Any]:
    # The client's extension module, for a symbol is looked up in what a module depends on as
    # well: whichever librdkafka that is, it is the one that the client itself calls.
    library = ctypes.CDLL(cimpl.__file__)
    functions: dict[str, Any] = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"rd_kafka_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


class MockCluster:
    """A group in it is complete as soon as its first member is there."""

    def __init__(self, brokers: int = 1) -> None:
        self._brokers = range(1, brokers + 1)  # their numbers
        self._call = _library()
        reason = ctypes.create_string_buffer(512)
        self._handle = self._call["new"](PRODUCER, self._call["conf_new"](), reason, len(reason))
        assert self._handle, reason.value.decode()
        self._cluster = self._call["mock_cluster_new"](self._handle, brokers)
        self._call["mock_group_initial_rebalance_delay_ms"](self._cluster, 0)
        self.bootstrap: str = self._call["mock_cluster_bootstraps"](self._cluster).decode()

    def topic(self, name: str, partitions: int = 1) -> str:
        assert not self._call["mock_topic_create"](self._cluster, name.encode(), partitions, 1)
        return name

    def fail(self, api: Api, *errors: int) -> None:
        """The next requests of that kind are answered with these errors, one each."""
        codes = (_INT * len(errors))(*errors)
        self._call["mock_push_request_errors_array"](self._cluster, api, len(errors), codes)

    def forget(self) -> None:
        """The errors that no request has been answered with."""
        for api in Api:
            self._call["mock_clear_request_errors"](self._cluster, api)

    def down(self) -> None:
        for broker in self._brokers:
            assert not self._call["mock_broker_set_down"](self._cluster, broker)

    def up(self) -> None:
        for broker in self._brokers:
            assert not self._call["mock_broker_set_up"](self._cluster, broker)

    def close(self) -> None:
        self._call["mock_cluster_destroy"](self._cluster)
        self._call["destroy"](self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def settings(cluster: MockCluster, **changes: Any) -> KafkaSettings:
    """With a group and a transactional id of its own, for tests share a cluster."""
    values: dict[str, Any] = {
        "bootstrap_servers": cluster.bootstrap,
        "group": uuid.uuid4().hex,
        "replica": "0",
        # Above one second the cluster lets an expelled member back that much sooner.
        "session_timeout_ms": 1100,
        "static_membership": False,
        "client": {"reconnect.backoff.max.ms": "100"},
    }
    return KafkaSettings(**values | changes)


class Member:
    """A source that polls until something holds, and notes what it hears meanwhile."""

    def __init__(self, cluster: MockCluster, topic: str, **changes: Any) -> None:
        # The cluster writes the markers of transactions without a check sum.
        client = {"heartbeat.interval.ms": "100", "check.crcs": "false"}
        self.source = KafkaSource(settings(cluster, client=client, **changes), [topic])
        self.revocations = 0
        self.values: list[bytes | None] = []

    def _on_revoke(self, _partitions: object) -> None:
        self.revocations += 1

    def join(self) -> GroupMetadata:
        self.source.open(lambda _partitions: None, self._on_revoke)
        return self.joined_after(-1)

    def joined_after(self, generation: int) -> GroupMetadata:
        """Poll until a member of a later generation, with partitions."""

        def joined() -> bool:
            now, ours = self.source.group_metadata(), self.source.assignment()
            return bool(now.member and ours) and now.generation > generation

        self.poll_until(joined)
        return self.source.group_metadata()

    def poll_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline
            self.values += [record.value for record in self.source.poll(10, 0.02)]


@contextmanager
def joining(cluster: MockCluster, topic: str, **changes: Any) -> Iterator[Member]:
    member = Member(cluster, topic, **changes)
    with closing(member.source):
        yield member
