"""Figures of a benchmark as PNG or SVG. matplotlib is imported when one is drawn, and only then."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from processor.bench.points import FACTORS
from processor.bench.result import BASE
from processor.errors import ConfigError

_AXES = {
    "prefix": "prefix, tokens",
    "suffix": "suffix, tokens",
    "batch": "events in a batch",
    "topics": "topics in a batch",
}
# Colours that remain apart without red or green; one marker each, for print.
_STYLES = {
    "full": {"color": "#777777", "marker": "s"},
    "transformers": {"color": "#d98200", "marker": "^"},
    "decision": {"color": "#8a5aa8", "marker": "D"},
    "ours": {"color": "#0b62a4", "marker": "o"},
}
_NAMES = {
    "full": "full prefill",
    "transformers": "transformers, cached prefix",
    "decision": "transformers, decision pipeline",
    "ours": "processor",
}
_IDEAL = "full prefill x ideal gain"


def check_plot(file: Path | None) -> None:
    """Raises `ConfigError` where a figure could not be drawn, before the work that fills it."""
    if file is None:
        return
    if file.suffix not in (".png", ".svg"):
        raise ConfigError("bench", "--plot", str(file), "name a .png or a .svg file")
    if find_spec("matplotlib") is None:
        raise ConfigError("bench", "--plot", str(file), "needs matplotlib: install extra `plot`")


def draw_result(result: Mapping[str, Any], file: Path) -> None:
    """Events per second of each system, and what would be ideal."""
    figure, axes = _figure(1, 1, (8, 0.4 * len(result["rows"]) + 1.5))
    shown = result["rows"][::-1]
    names = [f"{_NAMES[row['system']]}, batch {row['batch']}" for row in shown]
    rates = [row["events_per_s"] for row in shown]
    bars = axes[0].barh(names, rates, color=[_STYLES[row["system"]]["color"] for row in shown])
    axes[0].bar_label(bars, fmt=_number, padding=3)
    if (ideal := _ideal(result)) is not None:
        axes[0].axvline(ideal, color="black", linestyle="--", linewidth=1, label=_IDEAL)
        figure.legend(loc="outside lower right", frameon=False)
    axes[0].set_xlabel("events/s")
    axes[0].margins(x=0.12)
    tokens = f"prefix {result['prefix']}, suffix {result['suffix']} tokens"
    figure.suptitle(f"{_setting(result)}\n{tokens}", fontsize=9)
    figure.savefig(file, dpi=150)


def draw_sweep(results: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Four panels, one factor each: events per second against it."""
    figure, axes = _figure(2, 2, (10, 7))
    for factor, panel in zip(FACTORS, axes, strict=True):
        found = [result for result in results if result["factor"] == factor]
        for system, style in _STYLES.items():
            line = [(r["value"], rate) for r in found if (rate := _rate(r, system)) is not None]
            if line:
                panel.plot(*zip(*line, strict=True), label=_NAMES[system], **style)
        ideal = [(r["value"], rate) for r in found if (rate := _ideal(r)) is not None]
        if ideal:
            panel.plot(*zip(*ideal, strict=True), "k--", linewidth=1, label=_IDEAL)
        values = sorted({result["value"] for result in found})
        panel.set_xscale("log", base=2)
        panel.set_xticks(values, [str(value) for value in values])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_xlabel(_AXES[factor])
        panel.set_ylabel("events/s")
        panel.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel(_setting(results[0]), fontsize=9)
    figure.savefig(file, dpi=150)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure that needs no display and touches no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # tells of every font it looks at
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rate(result: Mapping[str, Any], system: str) -> float | None:
    rates = [row["events_per_s"] for row in result["rows"] if row["system"] == system]
    return max(rates, default=None)


def _ideal(result: Mapping[str, Any]) -> float | None:
    base = _rate(result, BASE)
    return None if base is None else base * float(result["ideal_gain"])


def _setting(result: Mapping[str, Any]) -> str:
    return f"{result['model']}, {result['dtype']}, {result['chip']}, threads {result['threads']}"
