"""What the measurements that run as modules share: arguments, a scorer of random events, a file."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from processor.config import load_settings
from processor.core.batch import Budget
from processor.engine import bench_chip
from processor.engine.bench_systems import Ours, Work, random_work
from processor.engine.model import LoadedModel, load_configured

_DISTINCT = 1024  # events; larger runs repeat them, which changes no time


def arguments(description: str, events: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="smollm2, a hub id, a folder or a .gguf file")
    parser.add_argument("--prefix", type=int, default=2000, help="tokens of the prefix")
    parser.add_argument("--suffix", type=int, default=150, help="tokens of an event, in the mean")
    parser.add_argument("--events", type=int, default=events)
    parser.add_argument("--max-events", type=int, default=32, help="in one pass")
    parser.add_argument("--max-rows", type=int, default=2048, help="in one pass")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    return parser


def budget(options: argparse.Namespace) -> Budget:
    return Budget(max_rows=options.max_rows, max_events=options.max_events)


def load(source: str | None) -> LoadedModel:
    """The model as settings in the environment say; `source` overrides theirs."""
    model = load_settings(None, os.environ).model
    return load_configured(model.model_copy(update={"source": source or model.source}))


def random_events(
    loaded: LoadedModel, prefix: int, shortest: int, longest: int, seed: int
) -> tuple[Ours, list[int]]:
    """A scorer of random events by their place, and their lengths in tokens, place by place."""
    work = random_work(loaded, prefix, longest, seed=seed)
    ordinary = [token for ids in (*work.prefixes, *work.suffixes) for token in ids]
    draw = random.Random(seed)
    lengths = [draw.randint(shortest, longest) for _ in range(_DISTINCT)]
    suffixes = tuple(tuple(draw.choices(ordinary, k=length)) for length in lengths)
    return Ours(loaded, Work(work.prefixes, suffixes, work.labels)), lengths


def facts(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": loaded.name,
        "chip": bench_chip.chip_name(loaded.device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "threads": bench_chip.threads(),
        "backend": loaded.backend.name,
        "versions": bench_chip.versions(),
        **{name: getattr(options, name) for name in ("prefix", "suffix", "events", "seed")},
    }


def report(result: dict[str, Any], lines: Sequence[str], file: Path | None) -> None:
    for line in lines:
        print(line)
    if file is not None:
        file.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n")
