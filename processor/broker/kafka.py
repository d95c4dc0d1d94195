"""Kafka behind the same protocols. No other module imports the client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as ClientPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from processor.broker.kafka_calls import report, reporting, within
from processor.broker.kafka_config import (
    DEFAULT_MAX_BYTES,
    client_config,
    consumer_config,
    parse_metadata,
    reader_config,
    to_record,
    transactional_config,
)
from processor.broker.kafka_ends import EndOffsets, Which
from processor.broker.kafka_errors import is_record, of_several
from processor.broker.kafka_placement import Placement
from processor.broker.kafka_positions import Positions
from processor.broker.transaction import Ends, GroupMetadata, Offsets, OnPartitions, TopicPartition
from processor.core.encode import OutputRecord
from processor.core.event import Record
from processor.errors import BrokerError, ExitProcess, RebuildProducer, RetryCall, ShrinkOutput
from processor.kafka_settings import KafkaSettings

STORED = -1000  # the client looks its committed offset up, as it would by itself
COMMIT_SLICE_S = 1.0  # a record that was refused stops all others: only the next call says so
AT_END, ASKS_FOR_START = NEWS = ("_PARTITION_EOF", "_AUTO_OFFSET_RESET")

client_partition = ClientPartition  # for `kafka_reader`, which may not import the client
logger = logging.getLogger(__name__)


def _client_partitions(partitions: Iterable[TopicPartition]) -> list[ClientPartition]:
    return [ClientPartition(*partition) for partition in partitions]


class KafkaSource:
    """A consumer group member with cooperative rebalances (KIP-429, or KIP-848 where the broker
    assigns).

    Positions are only ever set by `seek`, to offsets known here; what the client calls a lost
    assignment is treated as any other revocation (librdkafka PR#5604).
    """

    def __init__(self, settings: KafkaSettings, topics: Sequence[str]) -> None:
        self._topics = list(topics)
        self._consumer = Consumer(consumer_config(settings), logger=logger)
        admin = KafkaAdmin(settings)
        self._ends = EndOffsets(admin.offsets)
        self._positions = Positions()
        asks = ClientPartition, self.committed, admin.offsets, admin.topics
        self._placement = Placement(settings, self._consumer, self._positions, *asks)
        self._failure: BrokerError | None = None  # of a callback
        self._callbacks: tuple[OnPartitions, OnPartitions] | None = None
        self._closed = False

    def open(self, on_assign: OnPartitions, on_revoke: OnPartitions) -> None:
        self._callbacks = on_assign, on_revoke
        # Without on_lost the client calls on_revoke for lost partitions too.
        self._consumer.subscribe(self._topics, on_assign=self._assign, on_revoke=self._revoke)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        if self._callbacks is None or self._closed:
            raise ExitProcess("illegal call: poll while not open")
        self._placement.step(self.group_metadata)
        before = self._positions.numbers()
        try:
            # `consume` alone would wait for all of `max_records` until its time is over.
            first = self._consumer.poll(timeout_s)
            messages = [] if first is None else [first]
            if first is not None and max_records > 1:
                messages += self._consumer.consume(max_records - 1, 0)
        except KafkaException as error:
            raise ExitProcess(f"poll: {error}") from error
        records = [to_record(m) for m in messages if self._is_record(m)]
        if doubtful := self._positions.reassigned(before):
            self._placement.fetch_again([r for r in records if (r.topic, r.partition) in doubtful])
            records = [r for r in records if (r.topic, r.partition) not in doubtful]
        if self._failure is not None:
            raise self._failure
        handed_out = [r for r in records if self._positions.hand_out(r)]
        for message in messages:
            if message.error() is not None:
                self._take_news(message, doubtful)
        return handed_out

    def assignment(self) -> frozenset[TopicPartition]:
        return self._positions.assigned()

    def positions(self) -> dict[TopicPartition, int]:
        return self._positions.known()

    def ends(self) -> dict[TopicPartition, Ends]:
        return self._ends.latest(self._positions.assigned())

    def records_lost(self) -> int:
        return self._placement.lost

    def group_metadata(self) -> GroupMetadata:
        return parse_metadata(self._consumer.consumer_group_metadata())

    def committed(
        self, partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, int | None]:
        with reporting("committed"):
            found = self._consumer.committed(_client_partitions(partitions), timeout_s)
            if failed := [answer.error for answer in found if answer.error is not None]:
                raise KafkaException(failed[0])
        return {(p.topic, p.partition): p.offset if p.offset >= 0 else None for p in found}

    def seek(self, offsets: Offsets) -> None:
        self._placement.seek(offsets)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._consumer.pause(_client_partitions(partitions))

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """The seek to where we are goes nowhere, but wakes the client's thread: it would look at
        the resumed partitions up to a second later (measured: 0.94 s; with the seek, 0.01 s)."""
        self._consumer.resume(_client_partitions(partitions))
        known = self._positions.known()
        self.seek({p: known[p] for p in partitions if p in known})

    def close(self) -> None:
        """Leave the group. A static member sends no leave: it may be back within its session."""
        if not self._closed:
            self._closed = True
            self._consumer.close()

    def _assign(self, consumer: Consumer, partitions: list[ClientPartition]) -> None:
        added = [(p.topic, p.partition) for p in partitions]
        starts: dict[TopicPartition, int] = {}
        try:
            starts = {} if self._closed else self._placement.starts(added)
        except BrokerError as error:  # nothing may be raised through the client
            self._failure = error
        consumer.incremental_assign([ClientPartition(*p, starts.get(p, STORED)) for p in added])
        self._positions.assign(added, starts)
        if self._callbacks is not None:
            self._callbacks[0](added)

    def _revoke(self, consumer: Consumer, partitions: list[ClientPartition]) -> None:
        removed = [(p.topic, p.partition) for p in partitions]
        try:
            if self._callbacks is not None:
                self._callbacks[1](removed)
        finally:
            self._positions.revoke(removed)
            consumer.incremental_unassign(partitions)

    def _is_record(self, message: Message) -> bool:
        error = message.error()
        return error is None or (error.name() not in NEWS and is_record(message))

    def _take_news(self, message: Message, doubtful: set[TopicPartition]) -> None:
        """Both come in their place among the records. Neither is believed where it may be of an
        earlier assignment."""
        partition, offset = (str(message.topic()), message.partition() or 0), message.offset()
        name = getattr(message.error(), "name", str)()
        if partition in doubtful or partition not in self._positions.assigned():
            return
        if name == ASKS_FOR_START:
            raise self._placement.explain(partition)
        if name == AT_END and offset is not None:
            self._positions.reach_end(partition, offset)


class KafkaSink:
    """A transactional producer (KIP-98, KIP-447). `limits`: what each topic takes in bytes, as
    `check_cluster` finds it."""

    def __init__(self, settings: KafkaSettings, limits: Mapping[str, int] | None = None) -> None:
        self._settings = settings
        self._limits = limits or {}
        self._alone = False  # each record in a batch of its own
        self._open: Producer | None = self._build()

    @property
    def transactional_id(self) -> str:
        return self._settings.transactional_id

    @property
    def _producer(self) -> Producer:
        if self._open is None:
            raise ExitProcess("illegal call: the producer is closed")
        return self._open

    def max_bytes(self, topic: str) -> int:
        return self._limits.get(topic, DEFAULT_MAX_BYTES)

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
        except ShrinkOutput as error:
            raise ShrinkOutput(str(error), record.topic) from error

    def send_offsets(self, offsets: Offsets, group: GroupMetadata, timeout_s: float) -> None:
        positions = [ClientPartition(*p, offset) for p, offset in offsets.items()]
        send = self._producer.send_offsets_to_transaction
        self._call("send_offsets", within, timeout_s, send, positions, group.handle, timeout_s)

    def commit(self, timeout_s: float) -> None:
        slice_s = min(timeout_s, COMMIT_SLICE_S)
        self._call("commit_transaction", self._producer.commit_transaction, slice_s)

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
        config = transactional_config(self._settings, self._limits.values(), self._alone)
        return Producer(config, logger=logger)

    def _produce(self, record: OutputRecord) -> None:
        headers: Any = list(record.headers)
        self._producer.produce(record.topic, record.value, record.key, headers=headers)

    def _call(self, name: str, function: Callable[..., None], *args: object) -> None:
        try:  # once per record: `reporting` costs several times as much
            function(*args)
        except Exception as error:
            try:
                report(error, name)
            except ShrinkOutput as refused:
                if self._alone or not of_several(refused):
                    raise
                self._alone = True  # the records of a batch may well fit one by one
                raise RebuildProducer(str(refused)) from error


class KafkaAdmin:
    """What the cluster says of itself, as plain values. Raises what `classify` makes of errors."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._client = AdminClient(client_config(settings), logger=logger)

    def topics(self, timeout_s: float, *one: str) -> tuple[dict[str, int], list[str]]:
        """Number of partitions by topic, of all or of one; ids of the brokers."""
        with reporting("list_topics"):
            found = self._client.list_topics(*one, timeout=timeout_s)
        topics = {name: len(topic.partitions) for name, topic in found.topics.items()}
        return topics, [str(number) for number in found.brokers]

    def configs(self, kind: str, names: Collection[str], timeout_s: float) -> list[dict[str, str]]:
        """The configuration of each topic or broker, in the order of `names`."""
        wanted = [ConfigResource(ResourceType[kind.upper()], name) for name in names]
        answers = self._client.describe_configs(wanted, request_timeout=timeout_s)
        with reporting(f"configuration of {kind}"):
            found = [answers[resource].result(timeout_s) for resource in wanted]
        return [{key: entry.value for key, entry in config.items()} for config in found]

    def offsets(self, partitions: Collection[TopicPartition], which: Which) -> dict[Any, Any]:
        """Futures of offsets, by the client's partitions."""
        level = IsolationLevel["READ_UNCOMMITTED" if which == "last" else "READ_COMMITTED"]
        make: Any = OffsetSpec.earliest if which == "first" else OffsetSpec.latest
        wanted = dict.fromkeys(_client_partitions(partitions), make())
        return self._client.list_offsets(wanted, isolation_level=level, request_timeout=5.0)


def reading_consumer(settings: KafkaSettings) -> Consumer:
    """For `kafka_reader`: assigned by hand, and never a member of a group."""
    return Consumer(reader_config(settings), logger=logger)


def loading_producer(config: Mapping[str, Any]) -> Producer:
    """For `kafka_load`: outside of all transactions."""
    return Producer(dict(config), logger=logger)
