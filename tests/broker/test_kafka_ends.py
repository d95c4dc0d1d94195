"""Ends of partitions, asked in the background."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest

from processor.broker.kafka_ends import EndOffsets, Which, bounds
from processor.broker.transaction import Ends, TopicPartition
from processor.errors import RetryCall

A, B = ("in", 0), ("in", 1)


class Partition(NamedTuple):
    topic: str
    partition: int


class Answer(NamedTuple):
    offset: int


class Broker:
    def __init__(self) -> None:
        self.asked: list[tuple[Which, dict[Any, Future[Answer]]]] = []

    def ask(self, partitions: Collection[TopicPartition], which: Which) -> dict[Any, Any]:
        futures: dict[Any, Future[Answer]] = {Partition(*p): Future() for p in sorted(partitions)}
        self.asked.append((which, futures))
        return futures

    def answer(self, **offsets: list[int | None]) -> None:
        for which, futures in self.asked[-2:]:
            for future, offset in zip(futures.values(), offsets[which], strict=True):
                if offset is None:
                    future.set_exception(RuntimeError("no leader"))
                else:
                    future.set_result(Answer(offset))


def test_answers_are_taken_when_they_are_there() -> None:
    broker = Broker()
    ends = EndOffsets(broker.ask)
    assert ends.latest([A, B]) == {}
    assert ends.latest([A, B]) == {}
    assert [which for which, _ in broker.asked] == ["stable", "last"]  # not asked twice
    broker.answer(stable=[5, 7], last=[9, 6])
    assert ends.latest([A, B]) == {A: Ends(5, 9), B: Ends(7, 7)}
    assert len(broker.asked) == 4


def test_what_is_not_answered_is_known_no_longer() -> None:
    """A worker that cannot reach a broker must not take its partitions for stalled."""
    broker = Broker()
    ends = EndOffsets(broker.ask)
    ends.latest([A, B])
    broker.answer(stable=[5, 7], last=[5, 7])
    ends.latest([A, B])
    broker.answer(stable=[6, None], last=[6, None])
    assert ends.latest([A, B]) == {A: Ends(6, 6)}


def test_only_what_is_asked_for() -> None:
    broker = Broker()
    ends = EndOffsets(broker.ask)
    assert ends.latest([]) == {}
    assert broker.asked == []
    ends.latest([A, B])
    broker.answer(stable=[5, 7], last=[5, 7])
    assert ends.latest([A]) == {A: Ends(5, 5)}


def test_bounds_are_waited_for() -> None:
    with pytest.raises(RetryCall, match="no answer in time"):
        bounds(Broker().ask, [A], 0.01)
