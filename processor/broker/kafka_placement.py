"""Putting the client where we want it: starts that it asks for, and seeks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from processor.broker.kafka_errors import classify
from processor.broker.kafka_positions import Positions
from processor.broker.start import Found, first_start, reset, starts_early
from processor.broker.transaction import GroupMetadata, Offsets, TopicPartition
from processor.core.event import Record
from processor.errors import ExitProcess, RetryCall
from processor.kafka_settings import KafkaSettings

LOOK_UP_S = 5.0
JOIN_S = 60.0  # a broker that speaks KIP-848 answers in less than a second
SEEK_S = 10.0  # a partition that cannot be positioned for so long is lost

logger = logging.getLogger(__name__)


class Placement:
    """`consumer` is the client's, `partition` makes its form of a topic's partition, with an
    offset or a time; `committed` is `RecordSource.committed`."""

    def __init__(
        self,
        settings: KafkaSettings,
        consumer: Any,
        positions: Positions,
        committed: Callable[..., dict[TopicPartition, int | None]],
        partition: Callable[..., Any],
    ) -> None:
        self._settings = settings
        self._consumer = consumer
        self._positions = positions
        self._committed = committed
        self._partition = partition
        self._seek_deadline = 0.0
        self._join_deadline: float | None = None
        if settings.group_protocol == "consumer":
            self._join_deadline = time.monotonic() + JOIN_S
        self.lost = 0

    def step(self, member: Callable[[], GroupMetadata]) -> None:
        """Find a start for one of the partitions that the client asks us for, and seek what is to
        be sought. Raises `ExitProcess` where records are lost, a position cannot be taken, or the
        broker does not let us in."""
        if self._join_deadline is not None and time.monotonic() > self._join_deadline:
            self._join_deadline = None
            self._check_joined(member())
        for partition in list(self._positions.unplaced)[:1]:
            try:
                offset = self._start(partition, self._look_up(partition))
            except RetryCall as error:
                logger.warning("%s: no start yet: %s", partition, error, extra={"action": "place"})
            else:
                self.seek({partition: offset})
        self._carry_out_seeks()

    def seek(self, offsets: Offsets) -> None:
        self._positions.seek(offsets)
        self._seek_deadline = time.monotonic() + SEEK_S
        self._carry_out_seeks()

    def fetch_again(self, records: list[Record]) -> None:
        """These may be from before or after an assignment, for their partitions were revoked and
        assigned again within one poll (confluent-kafka-python#1013)."""
        lowest: dict[TopicPartition, int] = {}
        for record in records:
            partition = (record.topic, record.partition)
            lowest[partition] = min(record.offset, lowest.get(partition, record.offset))
        if lowest:
            found = self._committed(lowest.keys(), SEEK_S)
            self.seek({p: o if (o := found.get(p)) is not None else lowest[p] for p in lowest})

    def _check_joined(self, member: GroupMetadata) -> None:
        """Against a broker without KIP-848 the client would wait for ever."""
        if member.generation < 0:
            raise ExitProcess(
                f"not in group {member.group!r} after {JOIN_S:.0f} s: does the broker know "
                "kafka.group_protocol = consumer (Kafka 4.0)?"
            )

    def _look_up(self, partition: TopicPartition) -> Found:
        topic, number = partition
        siblings = self._ask("list_topics", topic, LOOK_UP_S).topics[topic].partitions
        low, high = self._ask(
            "get_watermark_offsets", self._partition(topic, number), LOOK_UP_S, False
        )
        committed = self._committed([(topic, n) for n in siblings], LOOK_UP_S)
        known = self._positions.next(partition)
        position = committed.get(partition) if known is None else known
        return Found(position, low, high, any(o is not None for o in committed.values()))

    def _start(self, partition: TopicPartition, found: Found) -> int:
        policy, first = self._settings.auto_offset_reset, self._settings.first_start
        if found.position is None:
            if starts_early(first, found):
                return found.start
            time_ms = first_start(first)
            return found.end if time_ms is None else self._at_time(partition, time_ms, found.end)
        if found.start <= found.position <= found.end:
            return found.position
        self.lost += reset(policy, partition, found.position, found.start)
        return found.start if policy == "earliest" else found.end

    def _at_time(self, partition: TopicPartition, time_ms: int, end: int) -> int:
        wanted = [self._partition(*partition, time_ms)]
        [found] = self._ask("offsets_for_times", wanted, LOOK_UP_S)
        return found.offset if found.offset >= 0 else end  # -1: no record is as late

    def _ask(self, call: str, *args: Any) -> Any:
        try:
            return getattr(self._consumer, call)(*args)
        except Exception as error:
            if error.args and hasattr(error.args[0], "retriable"):  # the client's KafkaError
                raise classify(error.args[0], call) from error
            raise

    def _carry_out_seeks(self) -> None:
        """A seek fails while the client still looks up where an assignment starts. Until it
        succeeds, nothing of that partition is handed out."""
        for partition, offset in list(self._positions.seeks.items()):
            try:
                self._consumer.seek(self._partition(*partition, offset))
            except Exception as error:
                if not hasattr(error.args[0], "retriable"):
                    raise
                if time.monotonic() > self._seek_deadline:
                    raise ExitProcess(
                        f"cannot go back to {partition}, {offset}: {error}"
                    ) from error
            else:
                del self._positions.seeks[partition]
