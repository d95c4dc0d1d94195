"""The check for equal bits: that it sees a leak, what happens then, and 10,000 events without."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest

from processor.core.batch import MicroBatch, Suffix
from processor.engine.attend_flash import FlashBackend
from processor.engine.plan import LOOSE_TILE, TILE, Backend, Plan
from processor.engine.scorer import PrefixScorer
from processor.engine.selfcheck import ordinary_tokens, self_check, settle
from processor.engine.tokenizer import SuffixTokenizer
from tests.engine.conftest import MakePolicy
from tests.engine.test_architectures import TREE
from tests.engine.tiny import tiny_model


@dataclass(frozen=True)
class Leaking(FlashBackend):
    """A chip whose products depend on how many events there are."""

    def attend(self, q: Any, k: Any, v: Any, head: Any, plan: Plan, layer: int) -> Any:
        events = sum(1 for _ in plan.events)
        return super().attend(q, k, v, head, plan, layer) * (1 + 1e-6 * events)


def make_scorer(
    make_policy: MakePolicy, backend: Backend | None = None, kind: str = "llama"
) -> tuple[PrefixScorer, list[str]]:
    model = tiny_model(kind, backend=backend)
    policies = [make_policy("orders"), make_policy("tools", TREE, prefix="Choose a tool.")]
    tokenizer = SuffixTokenizer(model, policies)
    return PrefixScorer(model, tokenizer.policies.values()), [p.key for p in policies]


def test_a_leak_is_seen_and_events_then_go_one_by_one(make_policy: MakePolicy) -> None:
    scorer, keys = make_scorer(make_policy, Leaking())
    found = self_check(scorer, keys, events=60, max_length=9)
    assert 0 < found.differing <= 60
    with pytest.warns(UserWarning, match="scored one by one"):
        settle(scorer, keys)
    assert self_check(scorer, keys, events=60, max_length=9).differing == 0
    batch = MicroBatch((Suffix(keys[0], (5, 6)), Suffix(keys[1], (7,))))
    assert scorer.score(batch) == [scorer.score(MicroBatch((s,)))[0] for s in batch.suffixes]


@pytest.mark.parametrize("backend", [None, FlashBackend()], ids=["default", "flash"])
def test_nothing_is_said_where_bits_are_equal(
    make_policy: MakePolicy, backend: Backend | None
) -> None:
    scorer, keys = make_scorer(make_policy, backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settle(scorer, keys)
    assert not scorer.one_by_one
    found = self_check(scorer, keys, events=300, references=5, max_length=40)
    assert found.differing == found.label_flips == 0
    assert found.max_abs_error is not None
    assert 0 < found.max_abs_error < 1e-4
    assert (found.events, found.references) == (300, 5)
    assert list(found.rungs) == sorted(set(found.rungs))
    assert len(found.rungs) > 3


def test_a_mixture_of_experts_goes_one_by_one(make_policy: MakePolicy) -> None:
    scorer, keys = make_scorer(make_policy, kind="gpt_oss")
    with pytest.warns(UserWarning, match="mixture of experts"):
        settle(scorer, keys)
    assert self_check(scorer, keys, events=60, max_length=9).differing == 0


def test_tiles_stay_where_an_activation_is_torchs(make_policy: MakePolicy) -> None:
    tiles = {kind: tiny_model(kind).backend.tile for kind in ("llama", "gemma3_text", "phi3")}
    assert tiles == {"llama": LOOSE_TILE, "gemma3_text": TILE, "phi3": TILE}


def test_events_are_of_ordinary_tokens() -> None:
    model = tiny_model("llama")
    tokens = set(ordinary_tokens(model))
    assert tokens.isdisjoint(model.tokenizer.added_tokens_decoder)
    assert len(tokens) > 400


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, FlashBackend()], ids=["default", "flash"])
def test_ten_thousand_events(make_policy: MakePolicy, backend: Backend | None) -> None:
    scorer, keys = make_scorer(make_policy, backend)
    assert self_check(scorer, keys, events=10_000, max_length=120, seed=7).differing == 0
    assert all(scorer.prefix(key).check_integrity() for key in keys)
