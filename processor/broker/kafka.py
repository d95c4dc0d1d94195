"""Kafka behind the same protocols. No other module knows the client."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as ClientPartition
from confluent_kafka.admin import AdminClient

from processor.broker.kafka_config import (
    client_config,
    consumer_config,
    parse_metadata,
    producer_config,
    to_record,
    transactional_config,
)
from processor.broker.kafka_errors import classify, is_record
from processor.broker.transaction import GroupMetadata, Offsets, OnPartitions, TopicPartition
from processor.config import KafkaSettings
from processor.core.decision import OutputRecord
from processor.core.event import Headers, Record
from processor.errors import ConfigError, ExitProcess, RetryCall

__all__ = ["KafkaSink", "KafkaSource", "check_topics", "produce_all", "to_record"]

CONNECT_S = 10.0
SEEK_S = 10.0  # a partition that cannot be positioned for so long is lost

logger = logging.getLogger(__name__)


def kafka_error(exception: KafkaException) -> KafkaError:
    error: KafkaError = exception.args[0]
    return error


def _client_partitions(partitions: Iterable[TopicPartition]) -> list[ClientPartition]:
    return [ClientPartition(*partition) for partition in partitions]


class KafkaSource:
    """A consumer group member with cooperative rebalances (KIP-429).

    Positions are only ever set by `seek`, to offsets known here; what the client calls a lost
    assignment is treated as any other revocation (librdkafka PR#5604).
    """

    def __init__(self, settings: KafkaSettings, topics: Sequence[str]) -> None:
        self._topics = list(topics)
        self._consumer = Consumer(consumer_config(settings), logger=logger)
        self._assigned: dict[TopicPartition, int] = {}  # with the number of the assignment
        self._assignments = 0
        self._next: dict[TopicPartition, int] = {}  # after the last record handed out, or a seek
        self._seeks: dict[TopicPartition, int] = {}  # not carried out yet
        self._seek_deadline = 0.0
        self._callbacks: tuple[OnPartitions, OnPartitions] | None = None
        self._closed = False

    def open(self, on_assign: OnPartitions, on_revoke: OnPartitions) -> None:
        self._callbacks = on_assign, on_revoke
        # Without on_lost the client calls on_revoke for lost partitions too.
        self._consumer.subscribe(self._topics, on_assign=self._assign, on_revoke=self._revoke)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        if self._callbacks is None or self._closed:
            raise ExitProcess("illegal call: poll while not open")
        self._carry_out_seeks()
        before = dict(self._assigned)
        try:
            # `consume` alone would wait for all of `max_records` until its time is over.
            first = self._consumer.poll(timeout_s)
            messages = [] if first is None else [first]
            if first is not None and max_records > 1:
                messages += self._consumer.consume(max_records - 1, 0)
        except KafkaException as error:
            raise ExitProcess(f"poll: {error}") from error
        records = [to_record(m) for m in messages if is_record(m)]
        doubtful = self._reposition(records, before)
        ours = self._assigned.keys() - self._seeks.keys() - doubtful
        handed_out = [r for r in records if (r.topic, r.partition) in ours]
        self._next.update({(r.topic, r.partition): r.offset + 1 for r in handed_out})
        return handed_out

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._assigned)

    def group_metadata(self) -> GroupMetadata:
        return parse_metadata(self._consumer.consumer_group_metadata())

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, int | None]:
        try:
            found = self._consumer.committed(_client_partitions(partitions), timeout_s)
        except KafkaException as error:
            raise classify(kafka_error(error), "committed") from error
        for answer in found:
            if answer.error is not None:
                raise classify(answer.error, "committed")
        return {(p.topic, p.partition): p.offset if p.offset >= 0 else None for p in found}

    def seek(self, offsets: Offsets) -> None:
        self._next.update(offsets)
        self._seeks.update(offsets)
        self._seek_deadline = time.monotonic() + SEEK_S
        self._carry_out_seeks()

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._consumer.pause(_client_partitions(partitions))

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """The seek to where we are goes nowhere, but wakes the client's thread: it would look at
        the resumed partitions up to a second later (measured: 0.94 s; with the seek, 0.01 s)."""
        self._consumer.resume(_client_partitions(partitions))
        self.seek({p: self._next[p] for p in partitions if p in self._next})

    def close(self) -> None:
        """Leave the group. A static member sends no leave: it may be back within its session."""
        if not self._closed:
            self._closed = True
            self._consumer.close()

    def _assign(self, consumer: Consumer, partitions: list[ClientPartition]) -> None:
        consumer.incremental_assign(partitions)
        self._assignments += 1
        added = [(p.topic, p.partition) for p in partitions]
        self._assigned.update(dict.fromkeys(added, self._assignments))
        if self._callbacks is not None:
            self._callbacks[0](added)

    def _revoke(self, consumer: Consumer, partitions: list[ClientPartition]) -> None:
        removed = [(p.topic, p.partition) for p in partitions]
        try:
            if self._callbacks is not None:
                self._callbacks[1](removed)
        finally:
            for partition in removed:
                self._assigned.pop(partition, None)
                self._next.pop(partition, None)
                self._seeks.pop(partition, None)
            consumer.incremental_unassign(partitions)

    def _reposition(
        self, records: list[Record], before: dict[TopicPartition, int]
    ) -> set[TopicPartition]:
        """Partitions that were revoked and assigned again within one `poll`: their records may be
        from before or after (confluent-kafka-python#1013), so they are all fetched again."""
        lowest: dict[TopicPartition, int] = {}
        for record in records:
            partition = (record.topic, record.partition)
            number = self._assigned.get(partition)
            if number is not None and before.get(partition, number) != number:
                lowest[partition] = min(record.offset, lowest.get(partition, record.offset))
        if lowest:
            found = self.committed(lowest.keys(), SEEK_S)
            self.seek({p: o if (o := found.get(p)) is not None else lowest[p] for p in lowest})
        return set(lowest)

    def _carry_out_seeks(self) -> None:
        """A seek fails while the client still looks up where an assignment starts. Until it
        succeeds, nothing of that partition is handed out."""
        for partition, offset in list(self._seeks.items()):
            try:
                self._consumer.seek(ClientPartition(*partition, offset))
            except KafkaException as error:
                if time.monotonic() > self._seek_deadline:
                    raise ExitProcess(
                        f"cannot go back to {partition}, {offset}: {error}"
                    ) from error
            else:
                del self._seeks[partition]


class KafkaSink:
    """A transactional producer (KIP-98, KIP-447)."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._open: Producer | None = self._build()

    @property
    def transactional_id(self) -> str:
        return self._settings.transactional_id

    @property
    def _producer(self) -> Producer:
        if self._open is None:
            raise ExitProcess("illegal call: the producer is closed")
        return self._open

    def init_transactions(self, timeout_s: float) -> None:
        self._call("init_transactions", self._producer.init_transactions, timeout_s)

    def begin(self) -> None:
        self._call("begin_transaction", self._producer.begin_transaction)

    def produce(self, record: OutputRecord) -> None:
        try:
            self._call("produce", self._produce, record)
        except BufferError as error:
            self._producer.poll(0.01)
            raise RetryCall(f"produce: {error}") from error

    def send_offsets(self, offsets: Offsets, group: GroupMetadata, timeout_s: float) -> None:
        positions = [ClientPartition(*p, offset) for p, offset in offsets.items()]
        send = self._producer.send_offsets_to_transaction
        self._call("send_offsets", send, positions, group.handle, timeout_s)

    def commit(self, timeout_s: float) -> None:
        self._call("commit_transaction", self._producer.commit_transaction, timeout_s)

    def abort(self, timeout_s: float) -> None:
        self._call("abort_transaction", self._producer.abort_transaction, timeout_s)

    def rebuild(self) -> None:
        self.close()
        self._open = self._build()

    def close(self) -> None:
        """Not the client's own close: it flushes without a limit of time, and an open transaction
        is ended by the next producer of this id anyway."""
        if self._open is not None:
            self._open.purge(blocking=False)
            self._open = None  # the last reference: its threads and connections end with it

    def _build(self) -> Producer:
        return Producer(transactional_config(self._settings), logger=logger)

    def _produce(self, record: OutputRecord) -> None:
        headers: Any = list(record.headers)
        self._producer.produce(record.topic, record.value, record.key, headers=headers)

    def _call(self, name: str, function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        except KafkaException as error:
            raise classify(kafka_error(error), name) from error


def check_topics(settings: KafkaSettings, names: Collection[str]) -> None:
    """Raise `ConfigError` where the cluster does not answer or lacks one of the topics."""
    try:
        metadata = AdminClient(client_config(settings)).list_topics(timeout=CONNECT_S)
    except KafkaException as error:
        servers, reason = settings.bootstrap_servers, kafka_error(error).str()
        raise ConfigError(
            "kafka", "bootstrap_servers", servers, f"no answer in {CONNECT_S:.0f} s: {reason}"
        ) from error
    if missing := sorted(set(names) - set(metadata.topics)):
        listed = ", ".join(missing)
        raise ConfigError("kafka", "topics", listed, "no such topics: create them first")


def produce_all(
    settings: KafkaSettings,
    topic: str,
    records: Iterable[tuple[bytes | None, bytes | None, Headers]],
) -> int:
    """Produce outside any transaction, as the sources of events do; how many were written.

    Raises `ExitProcess` if one could not be delivered.
    """
    producer = Producer(producer_config(settings) | {"enable.idempotence": True, "linger.ms": 5})
    failures: list[str] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failures.append(str(error))

    written = 0
    for key, value, headers in records:
        shown: Any = list(headers)
        while True:
            try:
                producer.produce(topic, value, key, headers=shown, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
        written += 1
    left = producer.flush(settings.transaction_timeout_ms / 1000)
    if failures or left:
        first = failures[0] if failures else "timed out"
        raise ExitProcess(f"{len(failures) + left} of {written} records not delivered: {first}")
    return written
