"""What a person sees and gives: progress, tables, errors, files named as arguments. Everything but
results goes to standard error."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from processor.core.decision import Decision
from processor.errors import ConfigError
from processor.runtime.telemetry import Snapshot

if TYPE_CHECKING:
    from processor.engine.check import PolicyReport

errors = Console(stderr=True)
output = Console()


def print_json(value: Any) -> None:
    """One JSON document on standard output, as it is: no colours, no wrapping."""
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar of so many steps; the function it yields begins the next one, by its name."""
    columns = (SpinnerColumn(), BarColumn(24), TextColumn("{task.description}", markup=False))
    with Progress(*columns, TimeElapsedColumn(), console=errors, transient=True) as bar:
        task = bar.add_task("starting", total=steps)

        def step(name: str) -> None:
            bar.update(task, advance=1, description=name)

        yield step


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table whose first column is text and whose numbers are right-aligned."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for position, column in enumerate(columns):
        made.add_column(column, justify="left" if position == 0 else "right")
    for row in rows:
        made.add_row(*(Text(cell(value)) for value in row))  # a label may look like markup
    return made


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def decision_table(decision: Decision) -> Table:
    best = sorted(decision.scores.items(), key=lambda item: -item[1])
    rows: list[tuple[str, Any]] = [("label", decision.label), ("action", decision.action)]
    rows += [(f"score {name}", score) for name, score in best[:5]]
    if len(best) > 5:
        rows.append((f"{len(best) - 5} more labels", sum(score for _, score in best[5:])))
    timings = decision.timings
    rows += [
        ("margin", decision.margin),
        ("prefix tokens (frozen)", decision.prefix_tokens),
        ("suffix tokens (computed)", decision.suffix_tokens),
        ("scored in ms", timings.score_ms),
    ]
    policy = decision.policy
    return table(f"{policy.name} {policy.version} ({policy.fingerprint[:12]})", ("", "value"), rows)


@contextmanager
def live(view: Callable[[], Any]) -> Iterator[None]:
    """Show what `view` returns, anew a few times a second; once at the end where there is no
    terminal."""
    with Live(get_renderable=view, console=errors, refresh_per_second=4):
        yield


def live_view(snapshot: Snapshot, total: int, seconds: float, policies: Sequence[str]) -> Group:
    """The worker at work."""
    rows = [
        (name, snapshot.decisions_by_policy.get(name, 0), _mix(snapshot, name)) for name in policies
    ]
    shown = table("", ("policy", "decisions", "labels"), rows)
    rejected = sum(snapshot.rejections.values())
    done = snapshot.decisions + rejected
    line = Text(
        f"{done} of {total} records in {seconds:.0f} s ({done / max(seconds, 1e-9):.1f}/s): "
        f"{snapshot.decisions} decided, {rejected} rejected, "
        f"{snapshot.transactions} transactions, {snapshot.queue_depth} in flight"
    )
    return Group(shown, line)


def _mix(snapshot: Snapshot, policy: str) -> str:
    counts = [
        (n, label) for (name, label), n in snapshot.decisions_by_label.items() if name == policy
    ]
    shown = ", ".join(f"{label} {n}" for n, label in sorted(counts, reverse=True)[:3])
    return shown + (", ..." if len(counts) > 3 else "")


def print_demo(result: Mapping[str, Any], reasons: Mapping[str, int]) -> None:
    columns = ("policy", "events", "prefix tokens", "suffix tokens", "metric", "value")
    rows = [[name, *policy.values()] for name, policy in result["policies"].items()]
    output.print(table("Measured on labelled events", columns, rows))
    output.print(
        f"{result['records']} records: {result['decisions']} decided, {result['rejections']} "
        f"rejected, {result['lost']} lost, {result['doubled']} doubled; "
        f"{result['seconds']:.1f} s, {result['events_per_s']:.2f} events/s; "
        f"{result['prompt_tokens_saved']:.1%} of the prompt tokens not computed",
        highlight=False,
        soft_wrap=True,
    )
    shown = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    output.print(f"Rejected: {shown}", highlight=False, soft_wrap=True)


def print_reports(reports: Sequence[PolicyReport]) -> None:
    columns = ("policy", "version", "labels", "prefix", "label rows", "suffix", "label mass")
    rows = [
        (
            r.policy,
            r.version,
            r.labels,
            r.prefix_tokens,
            r.label_rows,
            r.suffix_tokens_mean,
            r.label_mass,
        )
        for r in reports
    ]
    output.print(table("Policies (tokens; means over samples)", columns, rows))
    for report in reports:
        for warning in report.warnings:
            errors.print(f"warning: {report.policy}: {warning}", style="yellow", markup=False)


def prepare_streams() -> None:
    """Warnings and logs to standard error; results in UTF-8, whatever the locale."""
    warnings.showwarning = _show_warning
    level = os.environ.get("LOG_LEVEL", "INFO")
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError("environment", "LOG_LEVEL", level, "use DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(level=level.upper(), stream=sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    errors.print(f"warning: {message}", style="yellow", markup=False)


def read_event(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError("score", "EVENT", name, error.strerror or "cannot be read") from None


def check_writable(file: Path | None, key: str) -> None:
    """Refuse a file that could not be written, before the work that fills it."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError("arguments", key, str(file), "no such folder: create it first")
