"""Calls of the client, whose exceptions become ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from processor.broker.kafka_errors import classify
from processor.errors import RetryCall


def report(error: Exception, call: str) -> NoReturn:
    """Raise what `classify` makes of a client's exception; all others as they are."""
    if isinstance(error, TimeoutError):
        raise RetryCall(f"{call}: no answer in time") from error
    if (reported := client_error(error)) is None:
        raise error
    raise classify(reported, call) from error


@contextmanager
def reporting(call: str) -> Iterator[None]:
    """`report` for whatever is raised inside."""
    try:
        yield
    except Exception as error:
        report(error, call)


def client_error(error: Exception) -> Any | None:
    """The client's own description inside its `KafkaException`."""
    inner = error.args[0] if error.args else None
    return inner if hasattr(inner, "retriable") else None
