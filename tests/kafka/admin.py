"""What operators and other producers do to topics, partitions and groups."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewPartitions, NewTopic

from tests.kafka.harness import CALL_S, KafkaHarness


class Operator:
    def __init__(self, harness: KafkaHarness) -> None:
        self.address = harness.address
        self._client = AdminClient({"bootstrap.servers": harness.address})

    def configure(self, kind: str, name: str, changes: Mapping[str, object]) -> None:
        entries = [
            ConfigEntry(key, str(value), incremental_operation=AlterConfigOpType.SET)
            for key, value in changes.items()
        ]
        resource = ConfigResource(ResourceType[kind.upper()], name, incremental_configs=entries)
        self._wait(self._client.incremental_alter_configs([resource]))

    def configuration(self, kind: str, name: str) -> dict[str, str]:
        [future] = self._client.describe_configs(
            [ConfigResource(ResourceType[kind.upper()], name)]
        ).values()
        return {key: entry.value for key, entry in future.result(CALL_S).items()}

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        self._wait(self._client.delete_records([TopicPartition(topic, partition, before)]))

    def delete_topic(self, topic: str) -> None:
        self._wait(self._client.delete_topics([topic]))

    def create_topic(self, topic: str) -> None:
        self._wait(self._client.create_topics([NewTopic(topic, 1, -1)]))

    def add_partitions(self, topic: str, total: int) -> None:
        self._wait(self._client.create_partitions([NewPartitions(topic, total)]))
        deadline = time.monotonic() + CALL_S
        while len(self._client.list_topics(timeout=CALL_S).topics[topic].partitions) < total:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def group_state(self, group: str) -> str:
        return str(self._describe(group).state.name)

    def members(self, group: str) -> int:
        """How many have partitions."""
        return sum(bool(m.assignment.topic_partitions) for m in self._describe(group).members)

    def _describe(self, group: str) -> Any:
        [future] = self._client.describe_consumer_groups([group]).values()
        return future.result(CALL_S)

    def _wait(self, futures: dict[Any, Any]) -> None:
        for future in futures.values():
            future.result(CALL_S)


class Upstream:
    """Another team's producer, with transactions of its own."""

    def __init__(self, harness: KafkaHarness, name: str = "upstream") -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": harness.address,
                "transactional.id": f"{harness.word}-{name}",
                "message.max.bytes": 70_000_000,
            }
        )
        self._producer.init_transactions(CALL_S)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, partition: int, key: bytes | None, value: bytes | None) -> None:
        self._producer.produce(topic, value, key, partition)

    def flush(self) -> None:
        """Let all of it get to the broker."""
        assert self._producer.flush(CALL_S) == 0

    def commit(self) -> None:
        self._producer.commit_transaction(CALL_S)

    def abort(self) -> None:
        self.flush()  # what never left the client would leave nothing to abort
        self._producer.abort_transaction(CALL_S)


def memory(process: int, name: str) -> int:
    """Of a process, in MiB: VmRSS or VmHWM, its peak."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) // 1024
