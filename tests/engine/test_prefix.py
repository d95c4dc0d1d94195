"""The frozen prefix is read-only, and an event's scores do not remember other events."""

from __future__ import annotations

import random

import torch

from processor.core.batch import MicroBatch, Suffix
from processor.engine.scorer import PrefixScorer
from processor.engine.tokenizer import SuffixTokenizer
from tests.engine.conftest import MakePolicy
from tests.engine.tiny import tiny_model


def test_a_thousand_events_change_no_bit(make_policy: MakePolicy) -> None:
    """First, second and thousandth event of the same content score equally (the stored caches of
    transformers #37078 and vllm-mlx #380 grew or mixed with every hit)."""
    model = tiny_model("llama")
    policies = [make_policy("orders"), make_policy("other", ("ok", "fraud"), prefix="Be brief.")]
    tokenizer = SuffixTokenizer(model, policies)
    scorer = PrefixScorer(model, tokenizer.policies.values())
    orders, other = (policy.key for policy in policies)
    [span] = scorer.prefix(orders).spans
    before = [t.clone() for t in (*span.keys, *span.values)]
    same = Suffix(orders, tokenizer.encode(orders, '{"text":"hello"}'))
    rng = random.Random(7)
    seen = []
    for _ in range(100):
        mates = [
            Suffix(name, tokenizer.encode(name, '{"text":"' + "ab " * rng.randrange(9) + '"}'))
            for name in rng.choices([orders, other], k=9)
        ]
        place = rng.randrange(10)
        batch = [*mates[:place], same, *mates[place:]]
        seen.append(scorer.score(MicroBatch(tuple(batch)))[place])
    [alone] = scorer.score(MicroBatch((same,)))
    assert all(scores == alone for scores in seen)
    after = (*span.keys, *span.values)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert scorer.prefix(orders).check_integrity()
    assert scorer.prefix(other).check_integrity()


def test_integrity_check_sees_one_changed_value(make_policy: MakePolicy) -> None:
    model = tiny_model("llama")
    tokenizer = SuffixTokenizer(model, [make_policy()])
    [key] = tokenizer.policies
    prefix = PrefixScorer(model, tokenizer.policies.values()).prefix(key)
    assert prefix.nbytes == 2 * 3 * 2 * len(prefix) * 8 * 4  # k and v, layers, heads, P, D, fp32
    with torch.inference_mode():
        prefix.spans[0].values[1][0, 3, 2] += 1e-3
    assert not prefix.check_integrity()


def test_label_mass_is_a_probability(make_policy: MakePolicy) -> None:
    model = tiny_model("llama")
    tokenizer = SuffixTokenizer(model, [make_policy()])
    scorer = PrefixScorer(model, tokenizer.policies.values())
    [key] = tokenizer.policies
    mass = scorer.label_mass(Suffix(key, tokenizer.encode(key, '{"text":"a"}')))
    assert 0 < mass < 1
