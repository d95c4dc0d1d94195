"""The contract's view of a real Kafka."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable
from typing import Any

from confluent_kafka import (
    Consumer,
    ElectionType,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from processor.broker.kafka import KafkaSink, KafkaSource
from processor.broker.kafka_config import to_record
from processor.broker.memory_log import Isolation
from processor.core.event import Headers, Record
from processor.kafka_settings import KafkaSettings

CALL_S = 20.0


class KafkaHarness:
    """Topics, groups and ids carry a word of their own per harness, so tests share a broker."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.word = uuid.uuid4().hex[:8]
        self._count = 0
        self._admin = AdminClient({"bootstrap.servers": address})
        self._producer = Producer({"bootstrap.servers": address})
        self._closing: list[Callable[[], None]] = []

    def topic(self, partitions: int = 1) -> str:
        name = self._name("t")
        for future in self._admin.create_topics([NewTopic(name, partitions, -1)]).values():
            future.result(CALL_S)
        self._await_topic(name, partitions)
        return name

    def group(self) -> str:
        return self._name("g")

    def append(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> None:
        self.append_later(topic, partition, key, value, headers)
        self.flush()

    def append_later(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> None:
        shown: Any = list(headers)
        self._producer.produce(topic, value, key, partition, headers=shown)

    def flush(self) -> None:
        assert self._producer.flush(CALL_S) == 0

    def read(self, topic: str, isolation: Isolation = "read_committed") -> list[Record]:
        """Everything up to the end, or the last stable offset; partition by partition."""
        consumer = self._consumer(isolation)
        try:
            metadata = consumer.list_topics(topic, CALL_S)
            partitions = [TopicPartition(topic, p, 0) for p in metadata.topics[topic].partitions]
            consumer.assign(partitions)
            records: list[Record] = []
            ended = 0
            deadline = time.monotonic() + CALL_S
            while ended < len(partitions):
                assert time.monotonic() < deadline, "no end of the partition"
                for message in consumer.consume(1000, 0.2):
                    error = message.error()
                    if error is None:
                        records.append(to_record(message))
                    else:
                        assert error.code() == KafkaError._PARTITION_EOF, error
                        ended += 1
            return sorted(records, key=lambda r: (r.partition, r.offset))
        finally:
            consumer.close()

    def end_offset(
        self, topic: str, partition: int, isolation: Isolation = "read_committed"
    ) -> int:
        consumer = self._consumer(isolation)
        try:
            where = TopicPartition(topic, partition)
            return consumer.get_watermark_offsets(where, CALL_S)[1]
        finally:
            consumer.close()

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        return self.committed_offsets(group, topic, [partition])[0]

    def committed_offsets(
        self, group: str, topic: str, partitions: Iterable[int]
    ) -> list[int | None]:
        """As a consumer that does not wait for open transactions sees them."""
        consumer = self._consumer("read_uncommitted", group)
        asked = [TopicPartition(topic, partition) for partition in partitions]
        deadline = time.monotonic() + CALL_S
        try:
            while True:
                try:
                    found = consumer.committed(asked, CALL_S)
                    return [p.offset if p.offset >= 0 else None for p in found]
                except KafkaException:  # no coordinator now: the cluster is young, or it moves
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
        finally:
            consumer.close()

    def leader(self, topic: str, partition: int = 0) -> int:
        """Which broker leads the partition."""
        known = self._admin.list_topics(timeout=CALL_S).topics[topic]
        leader: int = known.partitions[partition].leader
        return leader

    def coordinator(self, topic: str, name: str) -> int:
        """Which broker coordinates a group, or the transactions of an id: the leader of the
        internal topic's partition that Java's hash of the name points to."""
        count = len(self._admin.list_topics(timeout=CALL_S).topics[topic].partitions)
        code = 0
        for byte in name.encode():
            code = (31 * code + byte) % 2**32
        return self.leader(topic, (code & 0x7FFFFFFF) % count)

    def elect_preferred_leaders(self, *topics: str) -> None:
        known = self._admin.list_topics(timeout=CALL_S).topics
        partitions = [TopicPartition(t, p) for t in topics for p in known[t].partitions]
        self._admin.elect_leaders(ElectionType.PREFERRED, partitions).result(CALL_S)

    def settings(self, group: str, replica: str, **changes: Any) -> KafkaSettings:
        values: dict[str, Any] = {
            "bootstrap_servers": self.address,
            "group": group,
            "replica": replica,
            "transactional_id_prefix": self.word,
            "session_timeout_ms": 6000,
            "client": {"heartbeat.interval.ms": "500"},  # how soon a rebalance is heard of
        }
        return KafkaSettings(**values | changes)

    def source(
        self, group: str, member: str, topics: Collection[str], *, static: bool = False
    ) -> KafkaSource:
        settings = self.settings(group, member, static_membership=static)
        source = KafkaSource(settings, list(topics))
        self._closing.append(source.close)
        return source

    def sink(self, name: str) -> KafkaSink:
        sink = KafkaSink(self.settings("sinks", name))
        self._closing.append(sink.close)
        return sink

    def close(self) -> None:
        for close in reversed(self._closing):
            close()
        del self._admin, self._producer

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}-{self.word}"

    def _await_topic(self, name: str, partitions: int) -> None:
        deadline = time.monotonic() + CALL_S
        while True:
            known = self._admin.list_topics(timeout=CALL_S).topics.get(name)
            if known and len(known.partitions) == partitions:
                return
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _consumer(self, isolation: Isolation, group: str = "reader") -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": group,
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,
            }
        )
