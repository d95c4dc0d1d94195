from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kafka.cluster import Cluster
from tests.kafka.harness import KafkaHarness
from tests.kafka.node import Unavailable
from tests.kafka.world import KafkaWorld

Worlds = Callable[..., KafkaWorld]


@pytest.fixture
def harness(kafka_address: str) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_address)
    yield harness
    harness.close()


@pytest.fixture
def worlds(harness: KafkaHarness, tmp_path: Path) -> Iterator[Worlds]:
    """Makes worlds that are not as usual."""
    made: list[KafkaWorld] = []

    def make(**options: Any) -> KafkaWorld:
        made.append(KafkaWorld(harness, tmp_path / str(len(made)), **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture(scope="module")
def one_node() -> Iterator[Cluster]:
    """A broker of the module's own, to be harmed; each test leaves it whole."""
    yield from _cluster(1)


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[Cluster]:
    """Three brokers of the module's own: every partition survives the loss of one."""
    yield from _cluster(3)


@pytest.fixture(scope="module")
def unready_node() -> Iterator[Cluster]:
    """One broker with settings that are meant for three: it never has transactions."""
    changes = {
        "transaction.state.log.replication.factor": "3",
        "transaction.max.timeout.ms": "60000",
    }
    yield from _cluster(1, changes, transactions=False)


def _cluster(
    nodes: int, *changes: Mapping[str, str], transactions: bool = True
) -> Iterator[Cluster]:
    try:
        cluster = Cluster(nodes, *changes, transactions=transactions)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with cluster:
        yield cluster
