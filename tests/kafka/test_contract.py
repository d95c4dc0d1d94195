"""The contract of the broker protocols on Apache Kafka."""

from __future__ import annotations

import pytest

from tests.broker.contract import BrokerContract

pytestmark = pytest.mark.kafka


class TestKafka(BrokerContract):
    pass
