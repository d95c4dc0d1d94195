"""Fixtures that several test folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kafka.cluster import Unavailable, kafka


@pytest.fixture(scope="session")
def kafka_address() -> Iterator[str]:
    """The address of a Kafka with one broker; the test is skipped where none can be had."""
    try:
        context = kafka()
        address = context.__enter__()
    except Unavailable as reason:
        pytest.skip(str(reason))
    try:
        yield address
    finally:
        context.__exit__(None, None, None)
