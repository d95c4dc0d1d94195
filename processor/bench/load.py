"""Latency under an offered load: `python -m processor.bench.load --rate 780`.

Events arrive at random (Poisson) and on their own: a slow answer delays no arrival, so waiting in
line is part of a latency. Batches are what the worker makes: whenever the model is free, all that
is there goes at once, up to the budget. One process, no broker.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from processor.bench.rounds import quantile
from processor.bench.standalone import arguments, budget, facts, load, random_events, report
from processor.core.batch import Budget, pack

_WARM_UP = 0.1  # of the events: not counted
_REPEATS = 3  # of each batch size before all


@dataclass(frozen=True)
class Served:
    """Seconds from arrival to answer, per event in order; batches as (begin, end) in seconds and
    their events."""

    latencies: Sequence[float]
    batches: Sequence[tuple[float, float, int]]


def poisson(rate: float, events: int, seed: int) -> list[float]:
    """Arrival times in seconds, from 0."""
    draw = random.Random(seed)
    at, arrivals = 0.0, []
    for _ in range(events):
        at += draw.expovariate(rate)
        arrivals.append(at)
    return arrivals


def serve(
    arrivals: Sequence[float],
    lengths: Sequence[int],
    limits: Budget,
    score: Callable[[Sequence[int]], object],
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Served:
    """Score the events as they arrive, by their places in `arrivals`."""
    begun, done = now(), 0
    latencies: list[float] = []
    batches: list[tuple[float, float, int]] = []
    while done < len(arrivals):
        begin = now() - begun
        if arrivals[done] > begin:
            sleep(arrivals[done] - begin)
            continue
        ready = min(bisect_right(arrivals, begin), done + limits.max_events)
        count = len(pack(lengths[done:ready], limits)[0])
        score(range(done, done + count))
        end = now() - begun
        latencies += [end - arrival for arrival in arrivals[done : done + count]]
        batches.append((begin, end, count))
        done += count
    return Served(latencies, batches)


def summary(served: Served, arrivals: Sequence[float], rate: float) -> dict[str, Any]:
    """Without the warm-up. `utilisation`: the part of the time in which the model worked."""
    first = int(_WARM_UP * len(arrivals))
    counted = [batch for batch in served.batches if batch[0] >= arrivals[first]]
    latencies = served.latencies[first:]
    span = served.batches[-1][1] - arrivals[first]
    points = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {
        "offered_per_s": rate,
        "achieved_per_s": len(latencies) / span,
        "counted_events": len(latencies),
        **{f"{name}_ms": 1e3 * quantile(latencies, at) for name, at in points.items()},
        "mean_batch": sum(b[2] for b in counted) / max(1, len(counted)),
        "largest_batch": max(batch[2] for batch in served.batches),
        "utilisation": sum(end - begin for begin, end, _ in counted) / span,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("Latency at an offered load, in one process.", events=20_000)
    parser.add_argument("--rate", type=float, default=780.0, help="events per second")
    options = parser.parse_args(argv)
    loaded = load(options.model)
    shortest, longest = max(1, options.suffix // 2), max(1, options.suffix * 3 // 2)
    ours, cycle = random_events(loaded, options.prefix, shortest, longest, options.seed)
    lengths = [cycle[place % len(cycle)] for place in range(options.events)]
    limits = budget(options)
    for count in (*range(1, limits.max_events + 1),) * _REPEATS:
        ours.score(range(len(pack(lengths[:count], limits)[0])))
    arrivals = poisson(options.rate, options.events, options.seed)
    found = summary(serve(arrivals, lengths, limits, ours.score), arrivals, options.rate)
    line = (
        f"{found['offered_per_s']:,.0f} events/s offered, {found['achieved_per_s']:,.0f} answered: "
        f"p50 {found['p50_ms']:.2f}, p99 {found['p99_ms']:.2f}, max {found['max_ms']:.2f} ms; "
        f"{found['mean_batch']:.1f} events in a batch, {found['utilisation']:.0%} busy"
    )
    report({**facts(loaded, options), **found}, [line], options.json)


if __name__ == "__main__":
    main()
