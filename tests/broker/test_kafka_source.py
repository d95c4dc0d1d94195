"""`KafkaSource` on a client that behaves as badly as clients have been seen to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from processor.broker import kafka
from processor.broker.kafka import KafkaSource
from processor.broker.transaction import TopicPartition
from processor.core.event import Record
from processor.errors import ExitProcess
from processor.kafka_settings import KafkaSettings


class ClientError:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name

    def str(self) -> str:
        return "what happened"

    def fatal(self) -> bool:
        return False

    def retriable(self) -> bool:
        return self._name == "_TIMED_OUT"

    def txn_requires_abort(self) -> bool:
        return False


@dataclass
class Message:
    p: int
    o: int
    failed: ClientError | None = None

    def error(self) -> ClientError | None:
        return self.failed

    def topic(self) -> str:
        return "in"

    def partition(self) -> int:
        return self.p

    def offset(self) -> int:
        return self.o

    def key(self) -> bytes:
        return b"k"

    value = key

    def headers(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, 1


def end(partition: int, offset: int) -> Message:
    return Message(partition, offset, ClientError("_PARTITION_EOF"))


@dataclass
class Partition:
    topic: str
    partition: int
    offset: int = -1001
    error: Any = None

    def __hash__(self) -> int:
        return hash((self.topic, self.partition))


@dataclass
class Client:
    """Stands for consumer and admin client. `script`: what each poll gives, callbacks included."""

    script: deque[list[Any]] = field(default_factory=deque)
    stored: dict[int, int] = field(default_factory=dict)
    bounds: tuple[int, int] = (0, 100)
    assigned: list[tuple[int, int]] = field(default_factory=list)
    seeks: list[tuple[int, int]] = field(default_factory=list)
    on_assign: Any = None
    on_revoke: Any = None
    left: list[Message] = field(default_factory=list)

    def subscribe(self, _topics: list[str], on_assign: Any, on_revoke: Any) -> None:
        self.on_assign, self.on_revoke = on_assign, on_revoke

    def poll(self, _timeout: float) -> Message | None:
        given = []
        for item in self.script.popleft() if self.script else []:
            if isinstance(item, Message):
                given.append(item)
            else:
                item(self)
        self.left = given[1:]
        return given[0] if given else None

    def consume(self, _count: int, _timeout: float) -> list[Message]:
        left, self.left = self.left, []
        return left

    def committed(self, partitions: list[Partition], _timeout: float) -> list[Partition]:
        return [
            Partition(p.topic, p.partition, self.stored.get(p.partition, -1001)) for p in partitions
        ]

    def topics(self, _timeout: float, topic: str) -> tuple[dict[str, int], list[str]]:
        return {topic: 2}, ["1"]

    def offsets(self, partitions: list[TopicPartition], which: str) -> dict[Any, Any]:
        offset = self.bounds[0] if which == "first" else self.bounds[1]
        answer = type("F", (), {"result": lambda _s, _t=0: type("O", (), {"offset": offset})})
        return {Partition(*p): answer() for p in partitions}

    def incremental_assign(self, partitions: list[Partition]) -> None:
        self.assigned += [(p.partition, p.offset) for p in partitions]

    def incremental_unassign(self, partitions: list[Partition]) -> None: ...

    def seek(self, partition: Partition) -> None:
        self.seeks.append((partition.partition, partition.offset))

    def offsets_for_times(self, partitions: list[Partition], _timeout: float) -> list[Partition]:
        [asked] = partitions
        return [Partition(asked.topic, asked.partition, 42 if asked.offset < 10**13 else -1)]


def assign(*partitions: int) -> Callable[[Client], None]:
    return lambda client: client.on_assign(client, [Partition("in", p) for p in partitions])


def revoke(*partitions: int) -> Callable[[Client], None]:
    return lambda client: client.on_revoke(client, [Partition("in", p) for p in partitions])


def make(
    monkeypatch: pytest.MonkeyPatch, client: Client, *script: list[Any], **settings: Any
) -> KafkaSource:
    monkeypatch.setattr(kafka, "Consumer", lambda *_, **__: client)
    monkeypatch.setattr(kafka, "KafkaAdmin", lambda *_: client)
    monkeypatch.setattr(kafka, "ClientPartition", Partition)
    client.script = deque(script)
    source = KafkaSource(KafkaSettings(**settings), ["in"])
    source.open(lambda _: None, lambda _: None)
    return source


def places(records: list[Record]) -> list[tuple[int, int]]:
    return [(record.partition, record.offset) for record in records]


def test_a20_records_of_a_partition_revoked_in_the_same_poll_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """confluent-kafka-python#1013."""
    client = Client(stored={0: 5, 1: 7})
    script: list[list[Any]] = [
        [assign(0, 1)],
        [revoke(1), Message(1, 7), Message(0, 5), Message(1, 8)],
    ]
    source = make(monkeypatch, client, *script)
    assert source.poll(10, 0) == []
    assert places(source.poll(10, 0)) == [(0, 5)]
    assert source.positions() == {("in", 0): 6}


def test_a20_records_around_a_reassignment_are_fetched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client(stored={0: 5})
    again = [revoke(0), assign(0), Message(0, 9), end(0, 90)]
    source = make(monkeypatch, client, [assign(0)], again, [Message(0, 5)])
    source.poll(10, 0)
    assert source.poll(10, 0) == []
    assert client.seeks == [(0, 5)]
    assert places(source.poll(10, 0)) == [(0, 5)]
    assert source.positions() == {("in", 0): 6}


def test_positions_stand_behind_markers_and_not_past_a_seek(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client(stored={0: 5})
    script: list[list[Any]] = [[assign(0), Message(0, 5), end(0, 9)], [], [end(0, 9)]]
    source = make(monkeypatch, client, *script)
    assert places(source.poll(10, 0)) == [(0, 5)]
    assert source.positions() == {("in", 0): 9}
    source.seek({("in", 0): 5})
    assert source.positions() == {("in", 0): 5}


@pytest.mark.parametrize(
    ("stored", "first_start", "wanted"),
    [
        ({0: 5, 1: 6}, "latest", {0: 5, 1: 6}),  # what is committed wins
        ({}, "earliest", {0: 3, 1: 3}),
        ({}, "latest", {0: 100, 1: 100}),
        ({}, "2026-01-31T12:00:00Z", {0: 42, 1: 42}),
        ({}, "2926-01-31T12:00:00Z", {0: 100, 1: 100}),  # later than all records
        ({1: 6}, "latest", {0: 3, 1: 6}),  # a partition that was added later
    ],
)
def test_a23_where_an_assignment_starts(
    monkeypatch: pytest.MonkeyPatch, stored: dict[int, int], first_start: str, wanted: Any
) -> None:
    """In the call that assigns: a seek right after it can fail (confluent-kafka-python#1669)."""
    client = Client(stored=stored, bounds=(3, 100))
    source = make(monkeypatch, client, [assign(0, 1)], first_start=first_start)
    source.poll(10, 0)
    assert dict(client.assigned) == wanted
    assert client.seeks == []
    assert source.positions() == {("in", p): o for p, o in wanted.items()}


def test_b30_deleted_records_end_the_process_with_the_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client(stored={0: 5}, bounds=(10, 100))
    lost = Message(0, 5, ClientError("_AUTO_OFFSET_RESET"))
    source = make(monkeypatch, client, [assign(0)], [lost])
    source.poll(10, 0)
    with pytest.raises(ExitProcess, match=r"in\[0\]: next offset is 5, but records below 10 were"):
        source.poll(10, 0)


def test_b30_an_end_that_was_cut_off_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(stored={0: 50}, bounds=(0, 20))
    lost = Message(0, 50, ClientError("_AUTO_OFFSET_RESET"))
    source = make(monkeypatch, client, [assign(0)], [lost])
    source.poll(10, 0)
    with pytest.raises(ExitProcess, match="no longer reaches: its end was cut off"):
        source.poll(10, 0)


@pytest.mark.parametrize(("policy", "wanted"), [("earliest", 10), ("latest", 100)])
def test_b30_going_on_is_counted(monkeypatch: pytest.MonkeyPatch, policy: str, wanted: int) -> None:
    client = Client(stored={0: 4, 1: 50}, bounds=(10, 100))
    source = make(monkeypatch, client, [assign(0, 1)], auto_offset_reset=policy)
    source.poll(10, 0)
    assert dict(client.assigned) == {0: wanted, 1: 50}
    assert source.records_lost() == 6


def test_a32_a_look_up_that_times_out_is_left_to_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which waits for the offsets, and does not fall back to the first or last record."""
    client = Client(stored={0: 4})

    def timed_out(*_: object) -> None:
        raise RuntimeError(ClientError("_TIMED_OUT"))

    monkeypatch.setattr(client, "committed", timed_out)
    source = make(monkeypatch, client, [assign(0)], [Message(0, 4)])
    source.poll(10, 0)
    assert client.assigned == [(0, kafka.STORED)]
    assert source.positions() == {}
    assert places(source.poll(10, 0)) == [(0, 4)]


def test_a30_a_fatal_error_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fenced = Message(0, 0, ClientError("FENCED_INSTANCE_ID"))
    source = make(monkeypatch, Client(), [fenced])
    with pytest.raises(ExitProcess, match="FENCED_INSTANCE_ID"):
        source.poll(10, 0)
