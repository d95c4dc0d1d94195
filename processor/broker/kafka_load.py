"""Producing events outside of any transaction, as the sources of events do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from processor.broker.kafka import loading_producer
from processor.broker.kafka_config import producer_config
from processor.core.event import Headers
from processor.errors import ExitProcess
from processor.kafka_settings import KafkaSettings


def produce_all(
    settings: KafkaSettings,
    topic: str,
    records: Iterable[tuple[bytes | None, bytes | None, Headers]],
) -> int:
    """Produce keys, values and headers; how many were written.

    Raises `ExitProcess` if one could not be delivered.
    """
    config = producer_config(settings) | {"enable.idempotence": True, "linger.ms": 5}
    producer = loading_producer(config)
    failures: list[str] = []

    def delivered(error: object, _message: object) -> None:
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
