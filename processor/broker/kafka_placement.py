"""Putting the client where we want it: the starts of an assignment, and seeks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from processor.broker.kafka_calls import client_error, reporting
from processor.broker.kafka_ends import Ask, bounds
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
    offset or a time; `committed` is `RecordSource.committed`, `ask` asks for ends, `topics` for
    numbers of partitions.

    Inside a callback the consumer's own `list_topics` is not to be called: the next callback of
    the same poll would then abort the process (confluent-kafka 2.16.1, `CallState_get`)."""

    def __init__(
        self,
        settings: KafkaSettings,
        consumer: Any,
        positions: Positions,
        partition: Callable[..., Any],
        committed: Callable[..., dict[TopicPartition, int | None]],
        ask: Ask,
        topics: Callable[..., tuple[dict[str, int], list[str]]],
    ) -> None:
        self._settings = settings
        self._consumer = consumer
        self._positions = positions
        self._partition = partition
        self._committed = committed
        self._bounds = partial(bounds, ask)
        self._topics = topics
        self._seek_deadline = 0.0
        self._join_deadline: float | None = None
        if settings.group_protocol == "consumer":
            self._join_deadline = time.monotonic() + JOIN_S
        self.lost = 0

    def starts(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Where these are to be read from. What has a committed offset and needs no check is left
        to the client, and so is everything while the broker does not answer in time.

        Raises `ExitProcess` where records were lost and the settings do not allow for it.
        """
        checked = self._settings.auto_offset_reset != "error"
        try:
            committed = self._committed(self._siblings(partitions), LOOK_UP_S)
            doubtful = [p for p in partitions if checked or committed.get(p) is None]
            bounds = self._bounds(doubtful, LOOK_UP_S) if doubtful else {}
            started = {p[0] for p, offset in committed.items() if offset is not None}
            found = {p: Found(committed[p], *bounds[p], p[0] in started) for p in doubtful}
            starts = {p: self._start(p, what) for p, what in found.items()}
        except RetryCall as error:
            logger.warning("left to the client: %s", error, extra={"action": "starts"})
            return {}
        return {p: o for p, o in committed.items() if p in partitions and o is not None} | starts

    def explain(self, partition: TopicPartition) -> ExitProcess:
        """Why the client does not know where to go on with a partition. It cannot be told before
        the next assignment, so the process ends."""
        topic, number = partition
        try:
            position = self._positions.next(partition)
            if position is None:
                position = self._committed([partition], LOOK_UP_S)[partition]
            start, _ = self._bounds([partition], LOOK_UP_S)[partition]
            if position is not None:
                reset("error", partition, position, start)
        except ExitProcess as error:
            return error
        except RetryCall as error:
            return ExitProcess(f"{topic}[{number}]: no place to go on: {error}")
        return ExitProcess(f"{topic}[{number}]: no start was found in time")

    def step(self, member: Callable[[], GroupMetadata]) -> None:
        """Seek what is to be sought. Raises `ExitProcess` where a position cannot be taken, or
        the broker does not let us in."""
        if self._join_deadline is not None and time.monotonic() > self._join_deadline:
            self._join_deadline = None
            self._check_joined(member())
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

    def _siblings(self, partitions: Collection[TopicPartition]) -> list[TopicPartition]:
        """All partitions of their topics: a new one of an old topic is told by them."""
        topics = {topic for topic, _ in partitions}
        counts = {topic: self._topics(LOOK_UP_S, topic)[0].get(topic, 0) for topic in topics}
        return [*{*partitions, *((t, n) for t, count in counts.items() for n in range(count))}]

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
        with reporting(call):
            return getattr(self._consumer, call)(*args)

    def _carry_out_seeks(self) -> None:
        """A seek fails while the client still looks up where an assignment starts. Until it
        succeeds, nothing of that partition is handed out."""
        for partition, offset in list(self._positions.seeks.items()):
            try:
                self._consumer.seek(self._partition(*partition, offset))
            except Exception as error:
                if client_error(error) is None:
                    raise
                if time.monotonic() > self._seek_deadline:
                    raise ExitProcess(
                        f"cannot go back to {partition}, {offset}: {error}"
                    ) from error
            else:
                del self._positions.seeks[partition]
