"""Micro-batches: events packed without padding between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suffix:
    """The tokens of one event, and the policy whose prefix they follow, by its `key`."""

    policy: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The events scored in one forward pass; they may belong to several policies."""

    suffixes: tuple[Suffix, ...]

    def __len__(self) -> int:
        return len(self.suffixes)

    @property
    def tokens(self) -> int:
        return sum(len(suffix.token_ids) for suffix in self.suffixes)


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that one forward pass takes. `max_rows` counts suffix tokens and label rows."""

    max_rows: int = 2048
    max_events: int = 32


def pack(lengths: Sequence[int], budget: Budget) -> list[range]:
    """Cut a run of events into micro-batches, in order: `range`s of positions in `lengths`.

    Order is kept, since outcomes are published in the order of their offsets. A single event
    longer than the budget stands alone; the pipeline rejects such events before they get here.
    """
    batches: list[range] = []
    start = rows = 0
    for position, length in enumerate(lengths):
        full = position - start >= budget.max_events or rows + length > budget.max_rows
        if position > start and full:
            batches.append(range(start, position))
            start, rows = position, 0
        rows += length
    if start < len(lengths):
        batches.append(range(start, len(lengths)))
    return batches


class Ladder:
    """The numbers of rows that a forward pass may have: each is a multiple of `step` and at most
    4 % (or one step) above the one before. Few sizes bound the memory that a process ever asks
    for, and on a GPU allow one captured graph for each; small steps bound the padding."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._rungs = [step]

    def rung(self, rows: int) -> int:
        """The smallest rung that holds so many rows."""
        while self._rungs[-1] < rows:
            last = self._rungs[-1]
            self._rungs.append(last + max(self._step, int(last * 0.04) // self._step * self._step))
        return self._rungs[bisect_left(self._rungs, rows)]
