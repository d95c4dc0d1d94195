"""Calls of the client, whose exceptions become ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from processor.broker.kafka_errors import classify
from processor.errors import RebuildProducer, RetryCall

GRACE_S = 1.0


def within(timeout_s: float, function: Callable[..., None], *args: object) -> None:
    """For a call that keeps to no time: `send_offsets_to_transaction` does not come back while the
    group's last coordinator is away, though the group has another by now. It is made in a thread
    that is left behind then; whatever it still does is fenced by the next producer.

    Raises `RebuildProducer` where it does not come back."""
    outcome: list[Exception | None] = []

    def run() -> None:
        try:
            function(*args)
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="processor-call", daemon=True)
    thread.start()
    thread.join(timeout_s + GRACE_S)
    if not outcome:
        raise RebuildProducer(f"a call has not come back in {timeout_s:.1f} s")
    if outcome[0] is not None:
        raise outcome[0]


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
