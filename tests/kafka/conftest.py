from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kafka.harness import KafkaHarness


@pytest.fixture
def harness(kafka_address: str) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_address)
    yield harness
    harness.close()
