"""Which librdkafka properties may be set beside our own settings, and how they are shown."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, PlainSerializer

from processor.documents import MASK, Secret, is_secret, refusal

# Client properties that have a setting of their own, and those that exactly-once rests on.
_HAS_SETTING = {
    "bootstrap.servers": "bootstrap_servers",
    "metadata.broker.list": "bootstrap_servers",
    "group.id": "group",
    "transactional.id": "transactional_id_prefix",
    "group.instance.id": "static_membership",
    "session.timeout.ms": "session_timeout_ms",
    "max.poll.interval.ms": "max_poll_interval_ms",
    "transaction.timeout.ms": "transaction_timeout_ms",
    "retry.backoff.ms": "retry_backoff_ms",
    "auto.offset.reset": "auto_offset_reset",
    "group.protocol": "group_protocol",
}
_FIXED = {
    *("enable.auto.commit", "auto.commit.enable", "enable.auto.offset.store", "isolation.level"),
    *("enable.idempotence", "enable.gapless.guarantee", "acks", "request.required.acks"),
    *("max.in.flight", "max.in.flight.requests.per.connection"),
    *("retries", "message.send.max.retries", "message.timeout.ms", "delivery.timeout.ms"),
    *("partition.assignment.strategy", "enable.partition.eof", "group.remote.assignor"),
}


def _checked_properties(properties: dict[str, str]) -> dict[str, str]:
    for name, value in properties.items():
        if name in _HAS_SETTING:
            raise refusal(name, value, f"set kafka.{_HAS_SETTING[name]} instead")
        if name in _FIXED:
            raise refusal(name, value, "exactly-once rests on it: remove it")
        if not re.fullmatch(r"debug|[a-z0-9]+(\.[a-z0-9]+)+", name):
            raise refusal(name, value, "not how a librdkafka property is written (a.b.c)")
    return {name: Secret(v) if is_secret(name) else v for name, v in properties.items()}


def _masked_properties(properties: dict[str, str]) -> dict[str, str]:
    return {name: MASK if is_secret(name) else v for name, v in properties.items()}


ClientProperties = Annotated[
    dict[str, str],
    AfterValidator(_checked_properties),
    PlainSerializer(_masked_properties, return_type=dict[str, str]),
]
