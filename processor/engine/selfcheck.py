"""Whether equal events get equal bits on this chip, and how far they are from the reference.

Matrix libraries choose kernels by the shape of a product, and nothing obliges them to round equal
rows equally in two of them (lm-evaluation-harness #704, #1645). So it is tried: before
the first event is served, and at length by `processor engine self-check`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from processor.core.batch import MicroBatch, Suffix
from processor.core.decision import Scores
from processor.engine.model import LoadedModel
from processor.engine.scorer import PrefixScorer

QUICK_EVENTS = 48  # at start: a few passes of short events
QUICK_LENGTH = 24


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """`rungs`: rows of the passes that were run. `differing`: events of which any bit differs from
    the same event scored alone. `max_abs_error` (of a log-probability) and `label_flips`: against
    `references` whole prompts; None without any."""

    rungs: tuple[int, ...]
    events: int
    differing: int
    references: int
    max_abs_error: float | None
    label_flips: int


def ordinary_tokens(model: LoadedModel) -> list[int]:
    """Token ids that event text may give."""
    tokenizer: Any = model.tokenizer
    size = min(len(tokenizer), int(model.model.config.vocab_size))
    control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [token for token in range(size) if token not in control]


def self_check(
    scorer: PrefixScorer,
    policies: Sequence[str],
    *,
    events: int,
    references: int = 0,
    max_length: int = 200,
    max_events: int = 32,
    seed: int = 0,
) -> SelfCheck:
    """Score random events of random lengths alone, then `events` of them in random batches."""
    draw = random.Random(seed)
    ordinary = ordinary_tokens(scorer.model)
    distinct = [
        Suffix(draw.choice(policies), tuple(draw.choices(ordinary, k=draw.randint(1, max_length))))
        for _ in range(max(8, min(events // 20, 400)))
    ]
    alone = {suffix: scorer.score(MicroBatch((suffix,)))[0] for suffix in distinct}
    rungs = {scorer.rows(MicroBatch((suffix,))) for suffix in distinct}
    done = differing = 0
    while done < events:
        count = min(draw.randint(2, max_events), events - done)
        batch = MicroBatch(tuple(draw.choices(distinct, k=count)))
        scores = scorer.score(batch)
        differing += sum(alone[s] != found for s, found in zip(batch.suffixes, scores, strict=True))
        rungs.add(scorer.rows(batch))
        done += count
    compared = [(alone[s], scorer.reference_score(s)) for s in distinct[:references]]
    return SelfCheck(
        rungs=tuple(sorted(rungs)),
        events=events,
        differing=differing,
        references=len(compared),
        max_abs_error=max((_error(*pair) for pair in compared), default=None),
        label_flips=sum(_best(a) != _best(b) for a, b in compared),
    )


def settle(scorer: PrefixScorer, policies: Sequence[str]) -> None:
    """Make sure of equal bits before events are served. Where a batch changes a bit, one warning,
    and from then on each event has a pass of its own, whose shape depends on the event alone."""
    config: Any = scorer.model.model.config
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        scorer.one_by_one = True
        warnings.warn(
            "a mixture of experts multiplies the rows of all events that chose an expert, so bits "
            "would depend on batch mates: events are scored one by one, which is slower",
            stacklevel=2,
        )
        return
    found = self_check(scorer, policies, events=QUICK_EVENTS, max_length=QUICK_LENGTH)
    if found.differing:
        scorer.one_by_one = True
        warnings.warn(
            f"{found.differing} of {found.events} events got other bits in a batch than alone: "
            "events are scored one by one here, which is slower; model.kernels or model.dtype may "
            "choose products that do not do this",
            stacklevel=2,
        )


def _error(found: Scores, reference: Scores) -> float:
    pairs = zip(found.logprobs, reference.logprobs, strict=True)
    return max(abs(a - b) for a, b in pairs)


def _best(scores: Scores) -> int:
    return max(range(len(scores.logprobs)), key=scores.logprobs.__getitem__)
