"""What is asked of a cluster before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from processor.broker.kafka import KafkaAdmin
from processor.broker.kafka_config import DEFAULT_MAX_BYTES
from processor.errors import BrokerError, ConfigError
from processor.kafka_settings import KafkaSettings

CONNECT_S = 10.0

logger = logging.getLogger(__name__)


def check_cluster(
    settings: KafkaSettings, names: Collection[str], admin: KafkaAdmin | None = None
) -> dict[str, int]:
    """The largest record that each topic takes, in bytes.

    Raises `ConfigError` where the cluster does not answer, lacks one of the topics, or refuses
    one of our times. Who may not read configurations gets Kafka's defaults; the limits then show
    themselves one by one.
    """
    admin = admin or KafkaAdmin(settings)
    try:
        topics, brokers = admin.topics(CONNECT_S)
    except BrokerError as error:
        remedy = f"no answer in {CONNECT_S:.0f} s: {error}"
        raise ConfigError(
            "kafka", "bootstrap_servers", settings.bootstrap_servers, remedy
        ) from error
    if missing := sorted(set(names) - set(topics)):
        remedy = "no such topics: create them first"
        raise ConfigError("kafka", "topics", ", ".join(missing), remedy)
    try:
        [broker] = admin.configs("broker", brokers[:1], CONNECT_S)
        found = admin.configs("topic", sorted(names), CONNECT_S)
    except BrokerError as error:
        logger.warning("limits are not known: %s", error, extra={"action": "check_cluster"})
        return {}
    _check_times(settings, broker)
    limits = [int(config.get("max.message.bytes", DEFAULT_MAX_BYTES)) for config in found]
    return dict(zip(sorted(names), limits, strict=True))


def _check_times(settings: KafkaSettings, broker: dict[str, str]) -> None:
    def bound(key: str, name: str, refused: Callable[[int, int], bool], remedy: str) -> None:
        value, limit = getattr(settings, key), broker.get(name, "")
        if limit.isdigit() and refused(value, int(limit)):
            raise ConfigError("kafka", key, value, f"{remedy} {limit}, the broker's {name}")

    bound("transaction_timeout_ms", "transaction.max.timeout.ms", int.__gt__, "lower it to")
    if settings.group_protocol == "classic":
        bound("session_timeout_ms", "group.min.session.timeout.ms", int.__lt__, "raise it to")
        bound("session_timeout_ms", "group.max.session.timeout.ms", int.__gt__, "lower it to")
