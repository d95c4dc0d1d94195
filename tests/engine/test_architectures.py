"""Packed scoring against the frozen prefix equals scoring whole prompts, on every architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from processor.core.batch import MicroBatch, Suffix
from processor.engine.model import SUPPORTED
from processor.engine.plan import Backend
from processor.engine.scorer import PrefixScorer
from processor.engine.tokenizer import SuffixTokenizer
from tests.engine.conftest import MakePolicy
from tests.engine.tiny import WINDOW, tiny_model

# Shorter than the window, at it, beyond it, and around the tile of rows.
TEXTS = [
    "",
    "a",
    "hello world",
    "x" * WINDOW,
    "see you " * 9,
    '"\\\n\t"',
    "日本 😀 e\u0301",
    "9" * 70,
]
TREE = ("events.find", "events.buy", "movies.find", "movies.showtimes", "approve")


def build(
    kind: str,
    make_policy: MakePolicy,
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
) -> tuple[PrefixScorer, list[Suffix]]:
    model = tiny_model(kind, dtype, backend=backend)
    policies = [
        make_policy("orders"),
        make_policy("tools", TREE, prefix="Choose a tool.", lead="Query: "),
    ]
    tokenizer = SuffixTokenizer(model, policies)
    scorer = PrefixScorer(model, tokenizer.policies.values())
    suffixes = [
        Suffix(policy.key, tokenizer.encode(policy.key, f'{{"text":"{text}"}}'))
        for policy in policies
        for text in TEXTS
    ]
    return scorer, suffixes


@pytest.mark.parametrize("kind", sorted(SUPPORTED))
def test_packed_scores_equal_whole_prompts(kind: str, make_policy: MakePolicy) -> None:
    scorer, suffixes = build(kind, make_policy)
    packed = scorer.score(MicroBatch(tuple(suffixes)))
    for suffix, scores in zip(suffixes, packed, strict=True):
        reference = scorer.reference_score(suffix)
        assert scores.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
        assert max(reference.logprobs) - min(reference.logprobs) > 1e-3  # the model has an opinion


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "gpt_oss", "qwen2", "granite"])
def test_bf16_agrees_where_the_reference_is_sure(kind: str, make_policy: MakePolicy) -> None:
    """Against the same weights in fp32: rounding may move a score, not a clear label."""
    exact, suffixes = build(kind, make_policy)
    rounded, _ = build(kind, make_policy, torch.bfloat16)
    for suffix in suffixes:
        [scores] = rounded.score(MicroBatch((suffix,)))
        reference = rounded.reference_score(suffix)
        order = sorted(reference.logprobs, reverse=True)
        margin = torch.tensor(order).exp()[0] - torch.tensor(order).exp()[1]
        if margin > 0.05:
            assert scores.logprobs.index(max(scores.logprobs)) == reference.logprobs.index(order[0])
    assert exact.model.numerics != rounded.model.numerics


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "qwen3"])
def test_scores_do_not_depend_on_batch_mates(kind: str, make_policy: MakePolicy) -> None:
    scorer, suffixes = build(kind, make_policy)
    alone = [scorer.score(MicroBatch((suffix,)))[0] for suffix in suffixes]
    together = scorer.score(MicroBatch(tuple(suffixes)))
    backwards = scorer.score(MicroBatch(tuple(reversed(suffixes))))[::-1]
    assert alone == together == backwards  # every bit


def test_the_reference_needs_the_prefix(make_policy: MakePolicy) -> None:
    """The comparison has power: another prefix gives clearly other scores."""
    scorer, suffixes = build("llama", make_policy)
    other = tiny_model("llama")
    tokenizer = SuffixTokenizer(other, [make_policy("orders", prefix="Something else entirely.")])
    [key] = tokenizer.policies
    changed = PrefixScorer(other, tokenizer.policies.values())
    suffix = suffixes[2]
    assert scorer.reference_score(suffix).logprobs != pytest.approx(
        changed.reference_score(replace(suffix, policy=key)).logprobs, abs=1e-3
    )
