"""Prefixes that begin alike share tensors, no score shows it, and no other tenant can tell."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from processor.engine import tree as tree_module
from processor.engine.attend_flash import FlashBackend
from processor.engine.forward import run_plan
from processor.engine.model import LoadedModel
from processor.engine.plan import KEY_BLOCK, Backend, EventRows, Plan, Segment
from processor.engine.prefix import FrozenPrefix, PrefixSpan, capture_prefix
from processor.engine.tree import Owner, PrefixTree
from processor.errors import ConfigErrors
from tests.core.builders import make_policy
from tests.engine.tiny import WINDOW, tiny_model

OWNER = Owner()
BLOCK = KEY_BLOCK


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 500) for _ in range(count))


@cache
def small_model() -> LoadedModel:
    return tiny_model(num_hidden_layers=1)


def cuts(prefix: FrozenPrefix) -> list[int]:
    return [span.end for span in prefix.spans]


def bits(prefix: FrozenPrefix) -> list[bytes]:
    """Keys and values of all tokens, layer by layer."""
    layers = range(len(prefix.spans[0].keys))
    return [
        torch.cat([part[layer] for part in parts], 1).numpy().tobytes()
        for parts in ([s.keys for s in prefix.spans], [s.values for s in prefix.spans])
        for layer in layers
    ]


def hidden(model: LoadedModel, prefixes: Sequence[FrozenPrefix]) -> Tensor:
    """Final states [rows, d] of one pass: three events after each prefix."""
    ids: list[int] = []
    positions: list[int] = []
    segments = []
    for prefix in prefixes:
        events = []
        for length in (1, 7, 20):
            start = len(ids)
            ids += tokens(length, seed=len(ids))
            positions += range(len(prefix), len(prefix) + length)
            events.append(EventRows(start, len(ids)))
        segments.append(Segment(prefix.spans, events))
    padding = -len(ids) % model.backend.tile
    places = torch.tensor(positions + [0] * padding)
    plan = Plan(segments, places, model.backend, model.last_layer)
    with torch.inference_mode():
        out = run_plan(model.body, model.tail, ids + [0] * padding, plan)
    return out[[event.stop - 1 for event in plan.events]]


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("backend", [None, FlashBackend()], ids=["auto", "flash"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_no_bit_shows_where_a_prefix_is_cut(kind: str, backend: Backend | None) -> None:
    """Events of four policies in one pass, over shared spans and over prefixes of their own; and
    in a model some layers of which see a window only."""
    assert WINDOW < BLOCK
    model = tiny_model(kind, backend=backend)
    base = tokens(300)
    whole = [base + tokens(n, seed) for seed, n in ((1, 60), (2, 140))]
    whole += [base[:150] + tokens(20, 3), base]
    tree = PrefixTree(model)
    tree.plan((ids, OWNER) for ids in whole)
    shared = [tree.capture(ids, OWNER) for ids in whole]
    assert [cuts(p) for p in shared] == [
        [128, 256, 360],
        [128, 256, 440],
        [128, 170],
        [128, 256, 300],
    ]
    assert len({id(p.spans[0]) for p in shared}) == 1
    own = [capture_prefix(model, ids) for ids in whole]
    assert [bits(p) for p in shared] == [bits(p) for p in own]
    expected = hidden(model, own)
    assert torch.equal(hidden(model, shared), expected)
    for place, prefix in enumerate(shared):  # and it is the prefixes that decide
        others = [*own[:place], own[place - 1], *own[place + 1 :]]
        rows = slice(3 * place, 3 * place + 3)
        assert not torch.equal(hidden(model, others)[rows], expected[rows]), prefix


def test_two_hundred_policies_with_one_base_fit_in_a_third_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def empty(_: LoadedModel, base: Sequence[PrefixSpan], ids: Sequence[int]) -> list[PrefixSpan]:
        before = base[-1].path if base else ()
        keys = [torch.zeros(1, len(ids), 1)]
        return [PrefixSpan((*before, *ids), len(before), keys, keys, "")]

    monkeypatch.setattr(tree_module, "capture_steps", empty)
    base = tokens(1500)
    whole = [base + tokens(500, seed) for seed in range(1, 201)]
    tree = PrefixTree(small_model())
    tree.plan((ids, OWNER) for ids in whole)
    prefixes = [tree.capture(ids, OWNER) for ids in whole]
    assert {tuple(cuts(prefix)) for prefix in prefixes} == {(1408, 2000)}
    assert len({id(span) for prefix in prefixes for span in prefix.spans}) == 201
    separate = sum(prefix.nbytes for prefix in prefixes)
    assert separate == 200 * 2000 * 8
    assert tree.nbytes / separate == (1408 + 200 * 592) / (200 * 2000) < 0.35


def test_steps_yield_between_blocks_and_share_nothing_before_the_end() -> None:
    model, ids = small_model(), tokens(3 * BLOCK + 1)
    tree = PrefixTree(model)
    steps = tree.steps(ids, OWNER)
    for _ in range(4):
        next(steps)
    assert tree.nbytes == 0
    other = tree.capture(tokens(40, seed=1), OWNER)  # events or another prefix in between
    prefix = tree.capture(ids, OWNER)
    next(steps)
    with pytest.raises(StopIteration) as done:
        next(steps)
    assert bits(done.value.value) == bits(prefix)
    assert tree.nbytes == 2 * prefix.nbytes + other.nbytes
    repeated = tree.steps(ids, OWNER)
    with pytest.raises(StopIteration) as done:  # nothing to do, nothing to wait for
        next(repeated)
    assert done.value.value.spans == prefix.spans


def test_a_late_prefix_copies_once_what_it_has_in_common_with_a_live_span() -> None:
    model = small_model()
    tree = PrefixTree(model)
    ids = tokens(5 * BLOCK)
    old = tree.capture(ids, OWNER)
    assert cuts(old) == [5 * BLOCK]
    new_ids = ids[: 3 * BLOCK + 5] + tokens(50, seed=1)
    steps = tree.steps(new_ids, OWNER)
    assert len(list(steps)) == 1 + 2  # the copy; one block and the end of its span
    new = tree.capture(new_ids, OWNER)
    assert cuts(new) == [3 * BLOCK, 3 * BLOCK + 55]
    assert bits(new) == bits(capture_prefix(model, new_ids))
    assert new.check_integrity()
    third = tree.capture(ids[: 3 * BLOCK] + tokens(9, seed=2), OWNER)
    assert third.spans[0] is new.spans[0]
    inside = tree.capture(ids[: 4 * BLOCK] + tokens(9, seed=3), OWNER)  # copies the fourth block
    assert cuts(inside) == [3 * BLOCK, 4 * BLOCK, 4 * BLOCK + 9]
    again = tree.capture(ids, OWNER)  # the span in one piece, not the pieces
    assert again.spans == old.spans
    own = sum(p.spans[-1].nbytes for p in (new, third, inside))
    assert tree.nbytes == old.nbytes * (1 + 4 / 5) + own


def test_a_copy_out_of_a_span_that_follows_another() -> None:
    model = small_model()
    tree = PrefixTree(model)
    ids, other = tokens(4 * BLOCK), tokens(9, seed=1)
    tree.plan([(ids, OWNER), (ids[:BLOCK] + other, OWNER)])
    old = tree.capture(ids, OWNER)
    new_ids = ids[: 3 * BLOCK] + other
    new = tree.capture(new_ids, OWNER)
    assert (cuts(old), cuts(new)) == ([BLOCK, 4 * BLOCK], [BLOCK, 3 * BLOCK, 3 * BLOCK + 9])
    assert new.spans[0] is old.spans[0]
    assert bits(new) == bits(capture_prefix(model, new_ids))


def test_a_prefix_that_is_the_beginning_of_another_shares_whole_blocks_only() -> None:
    """The rows of its last block are the result of a shorter pass than the other's."""
    tree = PrefixTree(small_model())
    ids = tokens(2 * BLOCK + 100)
    long = tree.capture(ids, OWNER)
    short = tree.capture(ids[: BLOCK + 10], OWNER)
    assert cuts(long) == [2 * BLOCK + 100]
    assert cuts(short) == [BLOCK, BLOCK + 10]
    longer = tree.capture((*ids, 7), OWNER)  # the live span ends inside a block
    assert cuts(longer) == [BLOCK, 2 * BLOCK, 2 * BLOCK + 101]
    assert longer.spans[0] is short.spans[0]


def test_a_damaged_span_is_captured_anew_not_copied() -> None:
    model = small_model()
    tree = PrefixTree(model)
    ids = tokens(3 * BLOCK)
    old = tree.capture(ids, OWNER)
    with torch.inference_mode():
        old.spans[0].values[0][1, 5, 3] += 1e-3
    new_ids = ids[: 2 * BLOCK] + tokens(5, seed=1)
    assert bits(tree.capture(new_ids, OWNER)) == bits(capture_prefix(model, new_ids))


@pytest.mark.usefixtures("no_gc")
def test_the_last_prefix_that_has_a_span_frees_it() -> None:
    tree = PrefixTree(small_model())
    ids = tokens(3 * BLOCK)
    whole = [ids + tokens(5, seed=1), ids + tokens(6, seed=2), ids[:BLOCK] + tokens(7, seed=3)]
    tree.plan((each, OWNER) for each in whole[:2])
    prefixes = [tree.capture(each, OWNER) for each in whole]
    base, rest, copied = (
        weakref.ref(tensor)
        for tensor in (
            prefixes[0].spans[0].keys[0],
            prefixes[0].spans[1].values[0],
            prefixes[2].spans[0].keys[0],
        )
    )
    del prefixes[0]
    assert (base() is None, rest() is None) == (False, True)
    del prefixes[0]
    assert (base() is None, copied() is None) == (True, False)  # a copy keeps no original
    assert copied().untyped_storage().nbytes() == copied().nbytes  # type: ignore[union-attr]
    left = prefixes[0].nbytes
    assert tree.nbytes == left
    prefixes.clear()
    assert copied() is None
    assert tree.nbytes == 0
    tree.plan([])
    assert cuts(tree.capture(whole[2], OWNER)) == [BLOCK + 7]  # nor is it remembered


@pytest.mark.parametrize(
    ("one", "two", "shared"),
    [
        (Owner(), Owner(), True),
        (Owner("a"), Owner("a"), True),
        (Owner("a"), Owner("a", share=True), True),
        (Owner("a", share=True), Owner("b", share=True), True),
        (Owner("a", share=True), Owner(share=True), True),
        (Owner("a"), Owner("b"), False),
        (Owner("a"), Owner(), False),
        (Owner("a", share=True), Owner("b"), False),
        (Owner("a"), Owner("b", share=True), False),
    ],
)
def test_tenants_share_only_what_both_allow(one: Owner, two: Owner, shared: bool) -> None:
    """Neither equal tokens, nor a cut, nor the number of steps tells another tenant anything."""
    model, ids = small_model(), tokens(2 * BLOCK)
    tree = PrefixTree(model)
    tree.plan([(ids, one), (ids[:BLOCK] + tokens(3, seed=1), two)])
    first = tree.capture(ids, one)
    assert len(cuts(first)) == (2 if shared else 1)
    steps = len(list(tree.steps(ids, two)))
    assert steps == (0 if shared else 4)  # each block, and the end of each span
    second = tree.capture(ids, two)
    assert (second.spans[0] is first.spans[0]) == shared
    assert bits(second) == bits(first)


def test_a_third_tenant_sees_nothing_through_a_span_that_two_policies_share() -> None:
    tree = PrefixTree(small_model())
    ids = tokens(2 * BLOCK)
    private = tree.capture(ids, Owner("a"))
    public = tree.capture(ids, Owner("a", share=True))
    assert public.spans == private.spans
    stranger = Owner("b", share=True)
    assert tree.capture(ids, stranger).spans == private.spans  # `public` shows it
    del public
    assert tree.capture(ids, stranger).spans != private.spans


def test_every_token_decides_not_a_digest_of_them() -> None:
    tree = PrefixTree(small_model())
    ids = tokens(2 * BLOCK)
    kept = [tree.capture(ids, OWNER)]
    for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK - 1):
        other = (*ids[:place], ids[place] + 1, *ids[place + 1 :])
        kept.append(tree.capture(other, OWNER))
        assert kept[-1].token_ids == other
        assert kept[-1].spans[-1] is not kept[0].spans[-1]
        assert bits(kept[-1]) != bits(kept[0])


def test_the_owner_is_no_part_of_a_policys_fingerprint(tmp_path: Path) -> None:
    """It decides nothing: a policy may change hands in the middle of a replay."""
    one = make_policy(tmp_path / "1")
    two = make_policy(tmp_path / "2", tenant="a", share_prefix=True)
    assert Owner(one.spec.tenant, one.spec.share_prefix) == OWNER
    assert Owner(two.spec.tenant, two.spec.share_prefix) == Owner("a", share=True)
    assert one.fingerprint == two.fingerprint
    with pytest.raises(ConfigErrors, match="tenant"):  # or it would be the scope of no tenant
        make_policy(tmp_path / "3", tenant="")
