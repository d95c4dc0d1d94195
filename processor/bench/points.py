"""What is to be measured: one point, or a sweep over one factor at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

SYSTEMS = ("full", "transformers", "decision", "ours")
STAGES = 3  # steps of a point that it reports, besides its rounds
FACTORS = ("prefix", "suffix", "batch", "topics")
CENTRE: Mapping[str, int] = {"prefix": 2000, "suffix": 150, "batch": 16, "topics": 1}
SWEPT: Mapping[str, tuple[int, ...]] = {
    "prefix": (500, 1000, 2000, 4000),
    "suffix": (50, 100, 150, 300),
    "batch": (1, 2, 4, 8, 16, 32),
    "topics": (1, 2, 4, 8),
}


@dataclass(frozen=True, slots=True)
class Point:
    """Tokens of prefix and suffix, batch sizes of ours and of the stock cache, and how many topics
    share a batch."""

    prefix: int
    suffix: int
    batches: tuple[int, ...]
    stock_batches: tuple[int, ...]
    topics: int = 1


def centre(factor: str, values: Sequence[int]) -> int:
    """Where a factor stays while another one is swept: at the default if it is among the values,
    else at their middle."""
    return CENTRE[factor] if CENTRE[factor] in values else sorted(values)[len(values) // 2]


def sweep(values: Mapping[str, Sequence[int]]) -> list[tuple[str, int, Point]]:
    """(factor, its value, what to measure), one factor at a time around the centre."""
    at = {factor: centre(factor, values[factor]) for factor in FACTORS}
    base = Point(at["prefix"], at["suffix"], (at["batch"],), (at["batch"],), at["topics"])
    return [
        (factor, value, _changed(base, factor, value))
        for factor in FACTORS
        for value in sorted(values[factor])
    ]


def _changed(point: Point, factor: str, value: int) -> Point:
    match factor:
        case "prefix":
            return replace(point, prefix=value)
        case "suffix":
            return replace(point, suffix=value)
        case "topics":
            return replace(point, topics=value)
        case _:
            return replace(point, batches=(value,), stock_batches=(value,))
