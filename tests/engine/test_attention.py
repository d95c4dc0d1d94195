"""Back-ends against the plain one, over plans with several prefixes, windows, trees and sinks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from processor.engine.attend_flash import FlashBackend
from processor.engine.attend_native import NativeBackend
from processor.engine.attend_plain import PlainBackend
from processor.engine.kernels import load_kernels
from processor.engine.plan import Backend, EventRows, Head, Plan, Segment
from tests.engine.tiny import CACHE

H, G, D = 2, 3, 16
LAYER = 0
NOISE = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.01}
KERNELS = load_kernels(CACHE)
NATIVE: list[Backend] = [NativeBackend(KERNELS)] if KERNELS else []
CASES = [
    *((FlashBackend(), dtype) for dtype in NOISE),
    *((backend, torch.float32) for backend in NATIVE),
]
HEADS = {
    "plain": Head(scale=0.3),
    "window": Head(scale=0.3, window=20),
    "narrow": Head(scale=0.3, window=4),
    "sinks": Head(scale=0.3, sinks=torch.linspace(-1, 2, H * G).view(H, G)),
}


def case_id(value: object) -> str:
    return str(getattr(value, "name", value)).partition("/")[0]


@dataclass(frozen=True)
class Tensors:
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]


def random_tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def span(seed: int, tokens: int, dtype: torch.dtype) -> Tensors:
    keys, values = (random_tensor(seed + i, H, tokens, D).to(dtype) for i in (0, 1))
    return Tensors([keys], [values])


def tree(rows: int, branches: int) -> torch.Tensor:
    """The last rows are leaves that see all but one another."""
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    seen[-branches:, -branches:] = torch.eye(branches, dtype=torch.bool)
    return seen


def make_plan(
    backend: Backend,
    prefixes: Sequence[tuple[Sequence[Tensors], Sequence[tuple[int, int]]]],
    last_layer: int | None = None,
) -> Plan:
    """Prefixes with their events, each (rows, label branches)."""
    at, positions, segments = 0, [], []
    for spans, sizes in prefixes:
        before = sum(s.keys[0].shape[1] for s in spans)
        events = []
        for rows, branches in sizes:
            mask = tree(rows, branches) if branches else None
            events.append(EventRows(at, at + rows, 1 + branches, mask))
            suffix = rows - branches
            positions += [*range(before, before + suffix), *[before + suffix] * branches]
            at += rows
        segments.append(Segment(spans, events))
    padding = -at % 64
    return Plan(segments, torch.tensor(positions + [0] * padding), backend, last_layer)


def query_key_value(rows: int, dtype: torch.dtype, seed: int = 5) -> tuple[torch.Tensor, ...]:
    q = random_tensor(seed, rows, H * G, D).to(dtype).transpose(0, 1).view(H, G, rows, D)
    k, v = (random_tensor(seed + i, rows, H, D).to(dtype).transpose(0, 1) for i in (1, 2))
    return q, k, v


@pytest.mark.parametrize("head", list(HEADS))
@pytest.mark.parametrize("last_layer", [None, LAYER])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=case_id)
def test_equals_the_plain_one(
    backend: Backend, dtype: torch.dtype, last_layer: int | None, head: str
) -> None:
    prefixes = [
        ([span(10, 128, dtype), span(20, 40, dtype)], [(7, 0), (33, 4), (1, 0)]),
        ([span(30, 9, dtype)], [(150, 0), (20, 3)]),
        ([], [(12, 0)]),
    ]
    plan = make_plan(backend, prefixes, last_layer)
    q, k, v = query_key_value(len(plan.positions), dtype)
    found = backend.attend(q, k, v, HEADS[head], plan, LAYER)
    plain = make_plan(PlainBackend(), prefixes, last_layer)
    expected = PlainBackend().attend(q, k, v, HEADS[head], plain, LAYER)
    torch.testing.assert_close(found.float(), expected, atol=NOISE[dtype], rtol=0)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("head", list(HEADS))
@pytest.mark.parametrize("backend", [FlashBackend(), *NATIVE], ids=case_id)
def test_equal_bits_in_any_company(backend: Backend, head: str) -> None:
    """An event's rows are the same alone, among others, and over a prefix in one piece or two."""
    whole = span(10, 300, torch.float32)
    cut = [
        Tensors(*([t[0][:, part].contiguous()] for t in (whole.keys, whole.values)))
        for part in (slice(0, 128), slice(128, None))
    ]
    rng = random.Random(3)
    size = (41, 3)
    event = query_key_value(size[0], torch.float32, seed=50)
    seen = []
    for spans in ([whole], cut):
        for count in (0, 1, 5):
            before = [(rng.randrange(1, 70), 0) for _ in range(count)]
            after = [(rng.randrange(4, 70), 2) for _ in range(count)]
            other = [([span(60, 77, torch.float32)], before)] if before else []
            plan = make_plan(backend, [*other, (spans, [size, *after])])
            q, k, v = query_key_value(len(plan.positions), torch.float32)
            rows = slice(sum(n for n, _ in before), sum(n for n, _ in before) + size[0])
            q[:, :, rows], k[:, rows], v[:, rows] = event
            seen.append(backend.attend(q, k, v, HEADS[head], plan, LAYER)[:, :, rows].clone())
    assert all(torch.equal(seen[0], other) for other in seen)
