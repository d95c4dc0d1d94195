"""The packaged model under the example policies: the figures that users will see rest on this."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from processor.config import load_settings
from processor.core.batch import MicroBatch, Suffix
from processor.core.policy import load_policy, render_suffix
from processor.demo.samples import read_samples
from processor.engine.model import load_model
from processor.engine.scorer import PrefixScorer
from processor.engine.tokenizer import SuffixTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
POLICIES = Path(__file__).parents[2] / "policies"
NAMES = ("messages", "orders", "routes", "telemetry", "tools")
EACH = 4


@pytest.fixture(scope="module")
def engine() -> tuple[SuffixTokenizer, PrefixScorer, list[Suffix]]:
    torch.set_num_threads(2)
    settings = load_settings(None, {})
    model = load_model("smollm2", dtype="float32", cache_dir=settings.model.cache_dir)
    policies = [load_policy(POLICIES / name) for name in NAMES]
    tokenizer = SuffixTokenizer(model, policies)
    suffixes = [
        Suffix(p.key, tokenizer.encode(p.key, render_suffix(p, item.event)))
        for p in policies
        for item in read_samples(p, EACH)
    ]
    return tokenizer, PrefixScorer(model, tokenizer.policies.values()), suffixes


def test_equals_the_reference(engine: tuple[SuffixTokenizer, PrefixScorer, list[Suffix]]) -> None:
    _, scorer, suffixes = engine
    for suffix in suffixes[::EACH]:  # one of each policy: a reference costs a whole prompt
        if suffix.policy.startswith("tools@"):  # ten of 3,500 tokens; `routes` has a label tree too
            continue
        [scores] = scorer.score(MicroBatch((suffix,)))
        reference = scorer.reference_score(suffix)
        assert scores.logprobs == pytest.approx(reference.logprobs, abs=1e-4)


def test_equal_bits_in_mixed_batches(
    engine: tuple[SuffixTokenizer, PrefixScorer, list[Suffix]],
) -> None:
    _, scorer, suffixes = engine
    alone = {suffix: scorer.score(MicroBatch((suffix,)))[0] for suffix in suffixes}
    rng = random.Random(3)
    for size in (2, 3, 7, len(suffixes)):
        batch = tuple(rng.sample(suffixes, size))
        assert scorer.score(MicroBatch(batch)) == [alone[suffix] for suffix in batch]
    for key in {suffix.policy for suffix in suffixes}:
        assert scorer.prefix(key).check_integrity()


def test_prefixes_have_the_lengths_that_the_docs_name(
    engine: tuple[SuffixTokenizer, PrefixScorer, list[Suffix]],
) -> None:
    tokenizer, _, _ = engine
    compiled = {each.policy.name: each for each in tokenizer.policies.values()}
    lengths = {name: compiled[name].prefix_tokens for name in NAMES}
    assert lengths["orders"] == pytest.approx(2000, abs=150)
    assert lengths["tools"] == pytest.approx(3500, abs=250)
    assert compiled["tools"].trie.rows > 0  # tool names take several tokens


def test_digits_are_single_tokens(
    engine: tuple[SuffixTokenizer, PrefixScorer, list[Suffix]],
) -> None:
    """As in the model's own tokenizer.json; the GGUF file does not carry that rule."""
    _, scorer, _ = engine
    tokenizer = scorer.model.tokenizer
    assert [tokenizer.decode([i]) for i in tokenizer.encode(" \n 2026")][-4:] == list("2026")
