"""Where partitions end, asked in the background.

What the client remembers of its own fetches would not do: a partition that it has stopped
fetching has no new end either, and that is the very case which has to be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

from processor.broker.kafka_calls import reporting
from processor.broker.transaction import Ends, TopicPartition

Which = Literal["first", "stable", "last"]
Ask = Callable[[Collection[TopicPartition], Which], dict[Any, Any]]
ASKED: tuple[Which, Which] = ("stable", "last")


class EndOffsets:
    """`ask` sends a request for first, last stable or last offsets; gives futures of answers."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._pending: list[dict[Any, Any]] = []
        self._known: dict[TopicPartition, Ends] = {}

    def latest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Ends]:
        """What is known of these by now. Sends the next request once the last was answered."""
        if all(future.done() for answer in self._pending for future in answer.values()):
            self._take()
            self._pending = [self._ask(partitions, which) for which in ASKED] if partitions else []
        return {p: self._known[p] for p in partitions if p in self._known}

    def _take(self) -> None:
        if self._pending:
            stable, last = map(_answered, self._pending)
            # The two were read at different moments. What was not answered is known no longer:
            # while a broker is away, nobody may conclude that records wait there.
            self._known = {p: Ends(s, max(s, last.get(p, s))) for p, s in stable.items()}


def _answered(futures: dict[Any, Any]) -> dict[TopicPartition, int]:
    """Without the partitions of which there is an error."""
    return {
        (partition.topic, partition.partition): future.result().offset
        for partition, future in futures.items()
        if future.exception() is None
    }


def bounds(
    ask: Ask, partitions: Collection[TopicPartition], timeout_s: float
) -> dict[TopicPartition, tuple[int, int]]:
    """First and last stable offsets, waited for. Raises as `reporting` says."""
    with reporting("list_offsets"):
        first, stable = (
            {(p.topic, p.partition): future.result(timeout_s).offset for p, future in asked.items()}
            for asked in (ask(partitions, "first"), ask(partitions, "stable"))
        )
        return {p: (first[p], stable[p]) for p in partitions}
