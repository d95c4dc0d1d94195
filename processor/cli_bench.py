"""The command `bench`: arguments to what is measured, results to a table, a file and a figure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from processor import console
from processor.bench.host import host_ms
from processor.bench.plot import check_plot, draw_result, draw_sweep
from processor.bench.points import CENTRE, STAGES, SWEPT, SYSTEMS, Point, sweep
from processor.bench.result import COLUMNS, SWEEP_COLUMNS, summary, sweep_row, table_rows
from processor.cli_options import Model, SettingsFile
from processor.config import ModelSettings
from processor.core.policy import Policy, load_policy
from processor.demo.samples import read_samples
from processor.errors import ConfigError
from processor.wiring import LOAD_STEPS, load_weights, read_settings

if TYPE_CHECKING:
    from processor.engine.model import LoadedModel

BATCHES, STOCK_BATCHES = "1,4,16,32", "1,16"
POLICY = Path("policies/messages")
_HOST_EVENTS = 64


def bench(
    prefix: Annotated[
        str | None, typer.Option(help="tokens of the prefix; several with commas for --sweep")
    ] = None,
    suffix: Annotated[
        str | None, typer.Option(help="tokens of an event; several with commas for --sweep")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help=f"batch sizes of ours [default: {BATCHES}]")
    ] = None,
    stock_batch: Annotated[
        str, typer.Option(help="batch sizes of transformers with a cached prefix; not for --sweep")
    ] = STOCK_BATCHES,
    topics: Annotated[
        str | None, typer.Option(help="topics in a batch; several with commas for --sweep")
    ] = None,
    sweep_: Annotated[
        bool, typer.Option("--sweep", help="vary prefix, suffix, batch and topics, one at a time")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="each times every system once")] = 7,
    seed: Annotated[int, typer.Option(help="of the random tokens")] = 1,
    skip: Annotated[
        list[str] | None, typer.Option(help=f"leave out a system: {', '.join(SYSTEMS)}")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help=f"its sample events time the host's work [default: {POLICY}]"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="also write the result to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the result: .png or .svg")] = None,
    settings: SettingsFile = None,
    model: Model = None,
) -> None:
    """Time this engine beside full prefill and transformers, on this chip, in one run."""
    console.check_writable(json, "--json")
    console.check_writable(plot, "--plot")
    check_plot(plot)
    left_out = _skipped(skip or [], sweep_)
    given = {"prefix": prefix, "suffix": suffix, "batch": batch, "topics": topics}
    host = None if sweep_ else _host_policy(policy)
    points = _sweep(given) if sweep_ else [("", 0, _point(given, stock_batch))]
    chosen = read_settings(settings, model).model
    results = _measure(chosen, points, rounds, seed, left_out, host)
    if sweep_:
        _print_sweep(results)
    else:
        console.output.print(console.table("", COLUMNS, table_rows(results[0])))
        for line in summary(results[0]):
            console.output.print(line, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        content = results if sweep_ else results[0]
        json.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")
    if plot is not None and sweep_:
        draw_sweep(results, plot)
    elif plot is not None:
        draw_result(results[0], plot)


def _measure(
    model: ModelSettings,
    points: Sequence[tuple[str, int, Point]],
    rounds: int,
    seed: int,
    skip: frozenset[str],
    host: Policy | None,
) -> list[dict[str, Any]]:
    """A result per point, in their order; a point that is named twice is measured once."""
    distinct = dict.fromkeys(point for _, _, point in points)
    with console.progress(LOAD_STEPS + 2 + len(distinct) * (STAGES + rounds)) as step:
        step("importing torch")
        from processor.bench.run import Bench

        loaded = load_weights(model, step)
        for point in distinct:
            _check_window(point, loaded.window)
        measured = Bench(loaded, rounds, seed, skip, step)
        found = {point: measured.measure(point) for point in distinct}
        if any(factor for factor, _, _ in points):
            return [{"factor": f, "value": v, **found[point]} for f, v, point in points]
        step("timing the host's work")
        [result] = found.values()
        _add_host(result, loaded, host, rounds)
        return [result]


def _add_host(
    result: dict[str, Any], loaded: LoadedModel, policy: Policy | None, rounds: int
) -> None:
    """Time what surrounds the forward pass, on a policy's sample events; or note why not."""
    from processor.engine.tokenizer import SuffixTokenizer

    samples = read_samples(policy, _HOST_EVENTS) if policy else []
    if policy is None or not samples:
        result["notes"].append("host work was not timed: no policy with sample events (--policy)")
        return
    try:
        tokenizer = SuffixTokenizer(loaded, [policy])
    except ConfigError as error:  # a prefix longer than this model's window, say
        result["notes"].append(f"host work was not timed: {error}")
        return
    values = [orjson.dumps(sample.event) for sample in samples]
    result["host_policy"] = policy.name
    result["host_ms_per_event"] = host_ms(policy, tokenizer, values, rounds, time.perf_counter)


def _print_sweep(results: Sequence[Mapping[str, Any]]) -> None:
    rows = [sweep_row(result) for result in results]
    console.output.print(console.table("events/s", SWEEP_COLUMNS, rows))
    for note in dict.fromkeys(note for result in results for note in result["notes"]):
        console.output.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _sweep(given: Mapping[str, str | None]) -> list[tuple[str, int, Point]]:
    return sweep(
        {
            factor: SWEPT[factor] if text is None else _numbers(factor, text)
            for factor, text in given.items()
        }
    )


def _point(given: Mapping[str, str | None], stock_batch: str) -> Point:
    return Point(
        prefix=_one(given, "prefix"),
        suffix=_one(given, "suffix"),
        batches=_numbers("batch", given["batch"] or BATCHES),
        stock_batches=_numbers("stock-batch", stock_batch),
        topics=_one(given, "topics"),
    )


def _one(given: Mapping[str, str | None], factor: str) -> int:
    text = given[factor]
    numbers = (CENTRE[factor],) if text is None else _numbers(factor, text)
    if len(numbers) > 1:
        raise ConfigError("bench", f"--{factor}", text, "give one number, or add --sweep")
    return numbers[0]


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers from 1 up, separated by commas, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError("bench", f"--{name}", text, "give whole numbers from 1 up, with commas")
    return tuple(dict.fromkeys(map(int, parts)))


def _skipped(names: Sequence[str], sweep_: bool) -> frozenset[str]:
    """Names of systems to leave out. A sweep is without the decision pipeline: it has no batch and
    no topics, and full prefill says what there is to see over lengths."""
    for name in names:
        if name not in SYSTEMS:
            raise ConfigError("bench", "--skip", name, f"use one of: {', '.join(SYSTEMS)}")
    left = frozenset(names) | ({"decision"} if sweep_ else set())
    if left >= set(SYSTEMS):
        raise ConfigError("bench", "--skip", ", ".join(names), "leaves nothing to measure")
    return left


def _host_policy(folder: Path | None) -> Policy | None:
    if folder is None and not (POLICY / "policy.yaml").is_file():
        return None
    return load_policy(folder or POLICY)


def _check_window(point: Point, window: int) -> None:
    tokens = point.prefix + point.suffix
    if tokens > window:
        remedy = f"{tokens} tokens with the suffix, and the model reads {window}: choose fewer"
        raise ConfigError("bench", "--prefix", point.prefix, remedy)
