"""Parts of a worker that can be watched and held."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from processor.broker.kafka import KafkaSink, KafkaSource
from processor.broker.transaction import GroupMetadata, Offsets, OnPartitions, TopicPartition
from processor.core.batch import MicroBatch
from processor.core.decision import Scores
from processor.core.event import Record
from processor.errors import AbortAndRewind, BrokerError
from processor.kafka_settings import KafkaSettings
from tests.core.builders import LengthScorer
from tests.kafka.world import PATIENCE_S

DYNAMIC: dict[str, Any] = {"static_membership": False}
# KIP-848. Its broker has the time-outs of members.
CONSUMER: dict[str, Any] = {"group_protocol": "consumer", "client": {}}
# A member that does not poll is expelled after 4 s; its transactions live on.
EXPELLED_SOON: dict[str, Any] = DYNAMIC | {
    "session_timeout_ms": 3000,
    "max_poll_interval_ms": 4000,
    "publish_timeout_ms": 900,
    "transaction_timeout_ms": 60_000,
}


class WatchedSource(KafkaSource):
    """Keeps what it was given and what was taken from it, call by call."""

    def __init__(self, settings: KafkaSettings, topics: Collection[str]) -> None:
        super().__init__(settings, list(topics))
        self.given: list[list[TopicPartition]] = []
        self.taken: list[list[TopicPartition]] = []
        self.paused = threading.Event()

    def open(self, on_assign: OnPartitions, on_revoke: OnPartitions) -> None:
        def assigned(partitions: Collection[TopicPartition]) -> None:
            self.given.append(sorted(partitions))
            on_assign(partitions)

        def revoked(partitions: Collection[TopicPartition]) -> None:
            self.taken.append(sorted(partitions))
            on_revoke(partitions)

        super().open(assigned, revoked)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        super().pause(partitions)
        self.paused.set()


class Gate:
    """Holds the first thread that comes to it."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def hold(self, *_: object) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self._opened.wait(PATIENCE_S)

    def await_reached(self) -> None:
        assert self.reached.wait(PATIENCE_S)

    def open(self) -> None:
        self._opened.set()


@dataclass
class HeldScorer(LengthScorer):
    """Stands still with its first batch."""

    gate: Gate = field(default_factory=Gate)

    def score(self, batch: MicroBatch) -> list[Scores]:
        self.gate.hold()
        return super().score(batch)


class HeldSink(KafkaSink):
    """Stands still in its first transaction, with the metadata of its group in its hand."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(settings)
        self.gate = Gate()
        self.refusals: list[str] = []

    def send_offsets(self, offsets: Offsets, group: GroupMetadata, timeout_s: float) -> None:
        if not self.gate.reached.is_set():
            self._producer.poll(0.1)  # let what was produced get out
        self.gate.hold()
        try:
            super().send_offsets(offsets, group, timeout_s)
        except BrokerError as error:
            self.refusals.append(str(error))
            raise


class FailingSink(KafkaSink):
    """Fails in its first transactions, right before the commit."""

    def __init__(self, settings: KafkaSettings, error: type[BrokerError], times: int) -> None:
        super().__init__(settings)
        self.calls = 0
        self._error, self._times = error, times

    def send_offsets(self, offsets: Offsets, group: GroupMetadata, timeout_s: float) -> None:
        super().send_offsets(offsets, group, timeout_s)
        self.calls += 1
        if self.calls <= self._times:
            raise self._error("for the rewind")


class AbortingSink(HeldSink):
    """What it held is aborted."""

    def send_offsets(self, offsets: Offsets, group: GroupMetadata, timeout_s: float) -> None:
        first = not self.gate.reached.is_set()
        super().send_offsets(offsets, group, timeout_s)
        if first:
            raise AbortAndRewind("for the view of it")


def coordinates_of(records: Collection[Record]) -> set[tuple[str, int, int]]:
    return {(r.topic, r.partition, r.offset) for r in records}
