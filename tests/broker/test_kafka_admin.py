"""What is asked of a cluster before anything starts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import pytest

from processor.broker.kafka import KafkaAdmin
from processor.broker.kafka_admin import check_cluster
from processor.broker.kafka_config import transactional_config
from processor.errors import ConfigError, ExitProcess, RetryCall
from processor.kafka_settings import KafkaSettings

BROKER = {
    "transaction.max.timeout.ms": "900000",
    "group.min.session.timeout.ms": "6000",
    "group.max.session.timeout.ms": "1800000",
}


class Cluster:
    def __init__(self, broker: dict[str, str] | None = None, **topics: str) -> None:
        self.broker = BROKER | (broker or {})
        self.limits = topics
        self.failure: Exception | None = None

    def topics(self, _timeout_s: float) -> tuple[dict[str, int], list[str]]:
        return dict.fromkeys(self.limits, 1), ["1"]

    def configs(self, kind: str, names: Collection[str], _timeout_s: float) -> list[dict[str, str]]:
        if self.failure:
            raise self.failure
        if kind == "broker":
            return [self.broker]
        return [{"max.message.bytes": self.limits[name]} for name in names]


def check(cluster: Cluster, *names: str, **settings: Any) -> dict[str, int]:
    return check_cluster(KafkaSettings(**settings), names, cast(KafkaAdmin, cluster))


def test_limits_of_topics_are_found() -> None:
    assert check(Cluster(a="1000", b="2000000", c="5"), "b", "a") == {"a": 1000, "b": 2000000}


def test_missing_topics_are_named() -> None:
    with pytest.raises(ConfigError, match="topics = 'x, y': no such topics"):
        check(Cluster(a="1000"), "y", "a", "x")


@pytest.mark.parametrize(
    ("broker", "message"),
    [
        (
            {"transaction.max.timeout.ms": "20000"},
            "transaction_timeout_ms = 30000: lower it to 20000, the broker's transaction.max",
        ),
        (
            {"group.min.session.timeout.ms": "15000"},
            "session_timeout_ms = 12000: raise it to 15000, the broker's group.min",
        ),
        (
            {"group.max.session.timeout.ms": "8000"},
            "session_timeout_ms = 12000: lower it to 8000, the broker's group.max",
        ),
    ],
)
def test_a34_a_time_that_the_broker_refuses_is_named(broker: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Cluster(broker, a="1000"), "a")


def test_the_session_of_the_other_protocol_is_the_brokers() -> None:
    cluster = Cluster({"group.min.session.timeout.ms": "15000"}, a="1000")
    assert check(cluster, "a", group_protocol="consumer") == {"a": 1000}


@pytest.mark.parametrize("failure", [ExitProcess("CLUSTER_AUTHORIZATION_FAILED"), RetryCall("no")])
def test_who_may_not_read_configurations_starts_all_the_same(failure: Exception) -> None:
    cluster = Cluster(a="1000")
    cluster.failure = failure
    assert check(cluster, "a") == {}


def test_c11_the_client_lets_through_what_the_topics_take() -> None:
    """And packs no batch that one of them refuses: it does not split it then."""
    config = transactional_config(KafkaSettings(), [10_000, 5_000_000])
    assert config["batch.size"] == 10_000
    assert 5_000_000 < config["message.max.bytes"] < 6_000_000
    config = transactional_config(KafkaSettings())
    assert config["message.max.bytes"] > 1_048_588
