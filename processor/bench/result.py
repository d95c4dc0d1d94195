"""From times to figures: what a benchmark run says, as it is written to JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from processor.bench.rounds import Spread, Times, paired_gain, quantile, spread

BASE = "full"  # the system that gains are against


@dataclass(frozen=True, slots=True)
class Entry:
    """A system at a batch size. `tokens` and `flops`: what it computes for one event."""

    system: str
    batch: int
    tokens: int
    flops: float

    @property
    def name(self) -> str:
        return f"{self.system} x {self.batch}"


def rows(entries: Sequence[Entry], times: Times, peak: float) -> list[dict[str, Any]]:
    """One row per entry. Rates are of the median batch; `peak` in FLOP/s."""
    base = next((entry for entry in entries if entry.system == BASE), None)
    return [_row(entry, times, base, peak) for entry in entries]


def _row(entry: Entry, times: Times, base: Entry | None, peak: float) -> dict[str, Any]:
    seconds = times[entry.name]
    middle = spread(seconds)
    rate = entry.batch / middle.median
    gain = paired_gain(times[base.name], base.batch, seconds, entry.batch) if base else None
    return {
        "system": entry.system,
        "batch": entry.batch,
        "events_per_s": rate,
        "p50_ms": 1e3 * middle.median,
        "p99_ms": 1e3 * quantile(seconds, 0.99),
        "tokens_per_s": rate * entry.tokens,
        "fraction_of_peak": rate * entry.flops / peak,
        "gain": gain.median if gain else None,
        "spread": {
            "events_per_s": [entry.batch / middle.high, entry.batch / middle.low],
            "gain": _quartiles(gain),
        },
    }


def _quartiles(found: Spread | None) -> list[float] | None:
    return [found.low, found.high] if found else None


COLUMNS = ("system", "batch", "events/s", "p50 ms", "p99 ms", "tok/s", "peak", "gain")


def table_rows(result: Mapping[str, Any]) -> list[list[Any]]:
    """The rows of a result under `COLUMNS`."""
    return [
        [
            row["system"],
            row["batch"],
            row["events_per_s"],
            *(_short(row[key]) for key in ("p50_ms", "p99_ms")),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['fraction_of_peak']:.1%}",
            None if row["gain"] is None else f"{row['gain']:.2f}x",
        ]
        for row in result["rows"]
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


SWEEP_COLUMNS = ("varied", "value", "full", "transformers", "ours", "peak", "gain", "ideal")


def sweep_row(result: Mapping[str, Any]) -> list[Any]:
    """One point of a sweep under `SWEEP_COLUMNS`: events per second of each system, and ours
    beside the peak and the ideal gain."""
    found = {row["system"]: row for row in result["rows"]}
    rates = [found[name]["events_per_s"] if name in found else None for name in SWEEP_COLUMNS[2:5]]
    own = found.get("ours")
    gain = own["gain"] if own else None
    return [
        result["factor"],
        result["value"],
        *rates,
        f"{own['fraction_of_peak']:.1%}" if own else None,
        None if gain is None else f"{gain:.2f}x",
        f"{result['ideal_gain']:.2f}x",
    ]


def summary(result: Mapping[str, Any]) -> list[str]:
    """What belongs beside the table, a line each."""
    lines = [
        f"{result['model']} in {result['dtype']} on {result['chip']}, "
        f"threads {result['threads']}; {result['rounds']} paired rounds, seed {result['seed']}",
        f"prefix {result['prefix']} and suffix {result['suffix']} tokens: "
        f"{result['flops_per_event'] / 1e9:,.3g} GFLOP per event, "
        f"ideal gain over full prefill {result['ideal_gain']:.2f}x",
        f"matrix-product peak {result['peak_flops'] / 1e12:,.3g} TFLOPS "
        f"({result['peak_product']}), measured between the rounds",
        *_own_product(result),
        f"answers agree: log-probabilities differ by at most {result['largest_difference']:.2g} "
        f"(allowed: {result['tolerance']:g})",
        f"peak memory {_gib(result['peak_rss_bytes'])}, before the other systems were loaded "
        f"{_gib(result['peak_rss_ours_bytes'])}",
    ]
    if result["peak_cuda_bytes"] is not None:
        lines.append(
            f"peak GPU memory {_gib(result['peak_cuda_bytes'])}, before the other systems were "
            f"loaded {_gib(result['peak_cuda_ours_bytes'])}"
        )
    if result["host_ms_per_event"] is not None:
        lines.append(
            f"host work outside the forward pass {result['host_ms_per_event']:.3f} ms per event "
            f"({result['host_policy']}: decode, validate, render, tokenize, pack, decide, encode)"
        )
    return lines + [f"note: {note}" for note in result["notes"]]


def _own_product(result: Mapping[str, Any]) -> list[str]:
    own = result["own_peak_flops"]
    if own is None:
        return []
    share = result["peak_flops"] / own
    return [
        f"our own kernel's products reach {own / 1e12:,.3g} TFLOPS ({result['own_peak_product']}): "
        f"multiply fractions of the peak by {share:.2f} for fractions of that"
    ]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
