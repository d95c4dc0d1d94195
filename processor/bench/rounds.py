"""Paired rounds: each round times every system once, so that a chip which slows down for a while
slows all of them, and a ratio within a round is of two neighbours in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Times = Mapping[str, Sequence[float]]


def paired_rounds(
    tasks: Mapping[str, Callable[[], object]],
    rounds: int,
    now: Callable[[], float],
    progress: Callable[[str], None] = lambda stage: None,
) -> dict[str, list[float]]:
    """Seconds of each task in each round. The order is rotated by one from round to round and
    turned round in every second one, so that none is always first, nor always behind the same
    neighbour, whose heat and cache it would inherit."""
    names = list(tasks)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        first = number % max(1, len(names))
        order = names[first:] + names[:first]
        for name in reversed(order) if number % 2 else order:
            begun = now()
            tasks[name]()
            times[name].append(now() - begun)
    return times


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float


def quantile(values: Sequence[float], share: float) -> float:
    """With linear interpolation: over few rounds, a p99 is close to the slowest of them."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> Spread:
    return Spread(quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75))


def paired_gain(
    base: Sequence[float], base_events: int, times: Sequence[float], events: int
) -> Spread:
    """How many times faster per event than `base`, from the ratio within each round."""
    pairs = zip(base, times, strict=True)
    return spread([(slow / base_events) / (fast / events) for slow, fast in pairs])


def best_rate(times: Times, work: Mapping[str, float]) -> tuple[str, float]:
    """The task with the highest work per second, by its median, and that rate."""
    rates = {name: work[name] / quantile(values, 0.5) for name, values in times.items()}
    best = max(rates, key=lambda name: rates[name])
    return best, rates[best]
