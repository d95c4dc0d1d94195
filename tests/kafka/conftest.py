from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kafka.cluster import Cluster
from tests.kafka.harness import KafkaHarness
from tests.kafka.node import Unavailable


@pytest.fixture
def harness(kafka_address: str) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_address)
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def one_node() -> Iterator[Cluster]:
    """A broker of the module's own, to be harmed; each test leaves it whole."""
    yield from _cluster(1)


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[Cluster]:
    """Three brokers of the module's own: every partition survives the loss of one."""
    yield from _cluster(3)


def _cluster(nodes: int) -> Iterator[Cluster]:
    try:
        cluster = Cluster(nodes)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with cluster:
        yield cluster
