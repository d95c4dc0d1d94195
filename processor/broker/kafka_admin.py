"""What is done with a cluster besides running: looking for topics, and filling one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient

from processor.broker.kafka_config import client_config, producer_config
from processor.config import KafkaSettings
from processor.core.event import Headers
from processor.errors import ConfigError, ExitProcess

CONNECT_S = 10.0


def check_topics(settings: KafkaSettings, names: Collection[str]) -> None:
    """Raise `ConfigError` where the cluster does not answer or lacks one of the topics."""
    try:
        metadata = AdminClient(client_config(settings)).list_topics(timeout=CONNECT_S)
    except KafkaException as error:
        servers, reason = settings.bootstrap_servers, error.args[0].str()
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
