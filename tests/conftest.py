"""Fixtures that several test folders share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kafka.cluster import kafka
from tests.kafka.node import Unavailable


@pytest.fixture(scope="session")
def kafka_address() -> Iterator[str]:
    """The address of a Kafka that all tests share: nothing may happen to it. The test is skipped
    where none can be had."""
    with ExitStack() as stack:
        try:
            address = stack.enter_context(kafka())
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield address
