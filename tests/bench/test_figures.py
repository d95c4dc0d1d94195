"""The arithmetic of the benchmark: costs, rounds, agreement, points. No model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from processor.bench.agree import check_agreement
from processor.bench.flops import Shape, event_flops, full_flops, ideal_gain
from processor.bench.points import CENTRE, SWEPT, Point, centre, sweep
from processor.bench.result import Entry, rows
from processor.bench.rounds import best_rate, paired_gain, paired_rounds, quantile
from processor.errors import DistrustFigures


def decoder(layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int, mlp: int) -> Shape:
    """The weights of a Llama-type decoder, from its sizes."""
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    return Shape(layers, heads, head_dim, hidden, layers * (attention + 3 * hidden * mlp))


# Sizes from the models' own configurations; figures worked out by hand for a prefix of 2,000 tokens
# and a suffix of 150: GFLOP per event, GFLOP of the whole prompt, and the ideal gain.
@pytest.mark.parametrize(
    ("shape", "weights", "event", "full", "gain"),
    [
        pytest.param(decoder(30, 9, 3, 64, 576, 1536), 106e6, 53.4, 616, 11.5, id="SmolLM2-135M"),
        pytest.param(decoder(24, 14, 2, 64, 896, 4864), 358e6, 134, 1738, 13.0, id="Qwen2.5-0.5B"),
        pytest.param(
            decoder(28, 12, 2, 128, 1536, 8960), 1310e6, 447, 6032, 13.5, id="Qwen2.5-1.5B"
        ),
    ],
)
def test_flops_of_known_models(
    shape: Shape, weights: float, event: float, full: float, gain: float
) -> None:
    assert shape.linear_weights == pytest.approx(weights, rel=5e-3)
    assert event_flops(shape, 2000, 150, 2) / 1e9 == pytest.approx(event, rel=4e-3)
    assert full_flops(shape, 2150, 2) / 1e9 == pytest.approx(full, rel=1e-3)
    assert ideal_gain(shape, 2000, 150, 2) == pytest.approx(gain, abs=0.06)


def test_flops_add_up() -> None:
    shape = decoder(2, 4, 2, 8, 32, 64)
    split = event_flops(shape, 0, 100, 0) + event_flops(shape, 100, 30, 2)
    assert split == full_flops(shape, 130, 2)
    assert ideal_gain(shape, 0, 30, 2) == 1


def test_rounds_are_paired_and_rotate() -> None:
    calls: list[str] = []
    ticks: Iterator[float] = iter(range(1000))
    tasks = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = paired_rounds(tasks, 4, lambda: float(next(ticks)))
    order = ["".join(calls[i : i + 3]) for i in range(0, 12, 3)]
    assert order == ["abc", "acb", "cab", "cba"]
    assert times == {name: [1.0] * 4 for name in "abc"}


def test_statistics_of_rounds() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], share) for share in (0, 0.5, 1)] == [1.0, 2.5, 4.0]
    assert quantile([5.0], 0.99) == 5.0
    # A chip that slows down by half in the last round slows both: the ratio of pairs sees nothing.
    gain = paired_gain([8.0, 8.0, 16.0], 1, [4.0, 4.0, 8.0], 4)
    assert (gain.median, gain.low, gain.high) == (8.0, 8.0, 8.0)
    assert best_rate({"x": [2.0, 1.0, 9.0], "y": [1.0]}, {"x": 10.0, "y": 4.0}) == ("x", 5.0)


def test_rows_hold_what_the_times_say() -> None:
    entries = [Entry("full", 1, 100, 1e9), Entry("ours", 4, 10, 1e8)]
    full, ours = rows(entries, {"full x 1": [1.0, 3.0, 2.0], "ours x 4": [0.5, 1.5, 1.0]}, 4e9)
    assert (full["events_per_s"], ours["events_per_s"]) == (0.5, 4.0)
    assert (full["fraction_of_peak"], ours["fraction_of_peak"]) == (0.125, 0.1)
    assert (full["gain"], ours["gain"]) == (1.0, 8.0)
    assert ours["p50_ms"] == 1000.0
    assert ours["p50_ms"] < ours["p99_ms"] <= 1500.0
    assert ours["tokens_per_s"] == 40.0
    assert ours["spread"] == {"events_per_s": [4 / 1.25, 4 / 0.75], "gain": [8.0, 8.0]}
    [alone] = rows(entries[1:], {"ours x 4": [1.0]}, 4e9)
    assert alone["gain"] is None


def test_agreement() -> None:
    good = {"full": [("0", (-0.1, -2.0))], "ours": [("0", (-0.1, -2.01)), ("1", (-1.0, -0.5))]}
    assert check_agreement(good, 0.02) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("answers", "parts"),
    [
        ([("0", (-0.1, -2.1))], ("ours", "full", "event 0", "-2.1000")),
        ([("0", (-0.1, math.nan))], ("nan",)),
        ([("0", (math.nan, -2.0))], ("nan",)),
        ([("0", (-0.1, -math.inf))], ("inf",)),
        ([("1", (-0.1, -2.0))], ("ours", "no event")),
        ([("0", (-0.1, -2.0)), ("0", (-2.0, -0.1))], ("event 0",)),
    ],
)
def test_disagreement(answers: list[tuple[str, tuple[float, ...]]], parts: tuple[str, ...]) -> None:
    with pytest.raises(DistrustFigures) as raised:
        check_agreement({"full": [("0", (-0.1, -2.0))], "ours": answers}, 0.02)
    assert all(part in str(raised.value) for part in parts)


def test_events_that_only_later_systems_share_are_compared_too() -> None:
    answers = {
        "full": [("0", (-0.1,))],
        "stock": [("0", (-0.1,)), ("1", (-0.5,))],
        "ours": [("0", (-0.1,)), ("1", (-0.9,))],
    }
    with pytest.raises(DistrustFigures, match="ours and stock disagree on event 1"):
        check_agreement(answers, 0.02)


def test_sweep_varies_one_factor_at_a_time() -> None:
    points = sweep(SWEPT)
    middle = Point(CENTRE["prefix"], CENTRE["suffix"], (16,), (16,), CENTRE["topics"])
    assert [point for *_, point in points].count(middle) == 4
    assert len(points) == sum(map(len, SWEPT.values()))
    for factor, value, point in points:
        shown = {
            "prefix": point.prefix,
            "suffix": point.suffix,
            "batch": point.batches[0],
            "topics": point.topics,
        }
        assert shown == {**CENTRE, factor: value}
        assert point.stock_batches == point.batches
    assert centre("prefix", (100, 300, 200)) == 200
