"""Three brokers, one of which goes away: whatever it led or coordinated is taken over by others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kafka.cluster import Cluster
from tests.kafka.faults import under_load
from tests.kafka.harness import KafkaHarness
from tests.kafka.world import KafkaWorld

pytestmark = pytest.mark.kafka


@pytest.fixture
def world(three_nodes: Cluster, tmp_path: Path) -> Iterator[KafkaWorld]:
    three_nodes.mend()
    harness = KafkaHarness(three_nodes.address)
    world = KafkaWorld(harness, tmp_path)
    yield world
    world.close()
    harness.close()


def transaction_coordinator(world: KafkaWorld) -> int:
    name = world.settings("0").transactional_id
    return world.harness.coordinator("__transaction_state", name)


def group_coordinator(world: KafkaWorld) -> int:
    return world.harness.coordinator("__consumer_offsets", world.group)


def test_leader_stopped_and_leading_again(three_nodes: Cluster, world: KafkaWorld) -> None:
    """Leaders move twice: away from a broker that stops, and back to it by an election while all
    are up, when clients hear of it from nobody but a refusal."""
    leader = world.harness.leader(world.output)
    with under_load(world):
        three_nodes.stop(leader)
        world.await_progress()
        three_nodes.start(leader)
        three_nodes.await_whole()
        assert world.harness.leader(world.output) != leader
        world.await_progress()
        world.harness.elect_preferred_leaders(world.input, world.output, world.dead)
        assert world.harness.leader(world.output) == leader


def test_leader_killed(three_nodes: Cluster, world: KafkaWorld) -> None:
    leader = world.harness.leader(world.input)
    with under_load(world):
        three_nodes.kill(leader)
        world.await_progress()
        three_nodes.start(leader)
        three_nodes.await_whole()


def test_a10_transaction_coordinator_stopped(three_nodes: Cluster, world: KafkaWorld) -> None:
    """librdkafka#3779: a transaction blocked for minutes while its coordinator moved."""
    with under_load(world):
        coordinator = transaction_coordinator(world)
        three_nodes.stop(coordinator)
        world.await_progress()
        three_nodes.start(coordinator)
        three_nodes.await_whole()


def test_a32_group_coordinator_stopped(three_nodes: Cluster, world: KafkaWorld) -> None:
    """librdkafka#2944: after a failed look-up of offsets, a start where no one had committed."""
    with under_load(world):
        coordinator = group_coordinator(world)
        before = world.committed()
        three_nodes.stop(coordinator)
        world.await_progress()
        assert all(now >= then for now, then in zip(world.committed(), before, strict=True))
        three_nodes.start(coordinator)
        three_nodes.await_whole()


def test_rolling_restart(three_nodes: Cluster, world: KafkaWorld) -> None:
    with under_load(world):
        for number in three_nodes.nodes:
            three_nodes.stop(number)
            three_nodes.start(number)
            three_nodes.await_whole()
            world.await_progress()
