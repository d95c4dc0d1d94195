"""Calls of the client: what they raise, and that they come back."""

from __future__ import annotations

import threading
import time

import pytest

from processor.broker import kafka_calls
from processor.broker.kafka_calls import report, reporting, within
from processor.errors import RebuildProducer, RetryCall


def test_a9_a_call_that_does_not_come_back_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_calls, "GRACE_S", 0.01)
    released = threading.Event()

    def hang() -> None:
        released.wait(30)

    begun = time.monotonic()
    with pytest.raises(RebuildProducer, match=r"has not come back in 0\.1 s"):
        within(0.1, hang)
    assert time.monotonic() - begun < 5
    released.set()


def test_a_call_that_comes_back_is_as_if_it_was_made_here() -> None:
    seen: list[int] = []
    within(5, seen.append, 1)
    assert seen == [1]
    with pytest.raises(ValueError, match="no number"):
        within(5, raises, ValueError("no number"))


def test_errors_that_are_not_the_clients_pass() -> None:
    with pytest.raises(KeyError), reporting("call"):
        raise KeyError("x")
    with pytest.raises(RetryCall, match="call: no answer in time"):
        report(TimeoutError(), "call")


def raises(error: Exception) -> None:
    raise error
