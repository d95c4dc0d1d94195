"""Calls of the client, whose exceptions become ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from processor.broker.kafka_errors import classify
from processor.errors import RetryCall


@contextmanager
def reporting(call: str) -> Iterator[None]:
    """Raise what `classify` makes of a client's exception; all others pass."""
    try:
        yield
    except TimeoutError as error:
        raise RetryCall(f"{call}: no answer in time") from error
    except Exception as error:
        if (reported := client_error(error)) is None:
            raise
        raise classify(reported, call) from error


def client_error(error: Exception) -> Any | None:
    """The client's own description inside its `KafkaException`."""
    inner = error.args[0] if error.args else None
    return inner if hasattr(inner, "retriable") else None
