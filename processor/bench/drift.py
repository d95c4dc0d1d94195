"""Whether memory grows while nothing but events goes by: `python -m processor.bench.drift`.

Random lengths in random batches: new shapes are what makes allocators and primitive caches grow
(pytorch #98688, #29893). The first tenth is warm-up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from processor.bench.standalone import arguments, budget, facts, load, random_events, report
from processor.core.batch import Budget, pack
from processor.engine.bench_memory import memory

_SAMPLES = 100


def run(
    events: int,
    lengths: Sequence[int],
    limits: Budget,
    score: Callable[[Sequence[int]], object],
    sample: Callable[[], Mapping[str, int]],
    seed: int,
) -> list[dict[str, int]]:
    """Score random events in batches of random sizes; memory at about 100 points, with `events`
    done by then."""
    draw = random.Random(seed)
    samples: list[dict[str, int]] = []
    done = 0
    while done < events:
        places = [draw.randrange(len(lengths)) for _ in range(draw.randint(1, limits.max_events))]
        fitting = pack([lengths[place] for place in places], limits)[0]
        batch = places[: min(len(fitting), events - done)]
        score(batch)
        done += len(batch)
        if done * _SAMPLES >= (len(samples) + 1) * events:
            samples.append({"events": done, **sample()})
    return samples


def drift(samples: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Bytes gained from the end of the warm-up to the end, and the largest gain on the way."""
    counted = samples[min(len(samples) // 10, len(samples) - 1) :]
    kinds = [kind for kind in counted[0] if kind != "events"]
    gains = {kind: [sample[kind] - counted[0][kind] for sample in counted] for kind in kinds}
    return {
        "warm_up_events": counted[0]["events"],
        "drift_bytes": {kind: gain[-1] for kind, gain in gains.items()},
        "largest_gain_bytes": {kind: max(gain) for kind, gain in gains.items()},
        "bytes_at_end": {kind: samples[-1][kind] for kind in kinds},
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments("Memory over many events of random lengths.", 100_000).parse_args(argv)
    loaded = load(options.model)
    ours, lengths = random_events(loaded, options.prefix, 1, options.suffix * 2 - 1, options.seed)
    samples = run(
        options.events,
        lengths,
        budget(options),
        ours.score,
        lambda: memory(loaded.device),
        options.seed,
    )
    found = drift(samples)
    gains = ", ".join(f"{kind} {gain:+,}" for kind, gain in found["drift_bytes"].items())
    line = f"bytes gained from event {found['warm_up_events']:,} to {options.events:,}: {gains}"
    report({**facts(loaded, options), **found, "samples": samples}, [line], options.json)


if __name__ == "__main__":
    main()
