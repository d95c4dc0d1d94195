"""The back-end for GPUs, with a plain twin in the place of its kernel. None of this ran on one."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from processor.core.batch import MicroBatch
from processor.engine import backend
from processor.engine.attend_cuda import CudaBackend, load_cuda_backend, probe
from processor.engine.attend_layout import bucket
from processor.engine.attend_plain import PlainBackend
from processor.engine.graphs import GraphedForward
from processor.engine.plan import Head
from tests.engine.conftest import MakePolicy
from tests.engine.test_architectures import build
from tests.engine.test_attention import (
    HEADS,
    LAYER,
    NOISE,
    Tensors,
    make_plan,
    query_key_value,
    span,
)
from tests.engine.tiny import CACHE, tiny_config
from tests.engine.varlen import Varlen

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("head", list(HEADS))
@pytest.mark.parametrize("last_layer", [None, LAYER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_plain_one(
    dtype: torch.dtype, last_layer: int | None, head: str, heads_first: bool
) -> None:
    prefixes = [
        ([span(10, 128, dtype), span(20, 40, dtype)], [(7, 0), (33, 4), (1, 0)]),
        ([span(30, 9, dtype)], [(150, 0), (20, 3), (2, 0), (11, 0), (12, 0)]),
        ([], [(12, 0)]),
        ([span(40, 3, dtype)], [(1, 0), (16, 0), (17, 0)]),
    ]
    cuda = CudaBackend(Varlen(heads_first), heads_first)
    plan = make_plan(cuda, prefixes, last_layer)
    q, k, v = query_key_value(len(plan.positions), dtype)
    found = cuda.attend(q, k, v, HEADS[head], plan, LAYER)
    plain = make_plan(PlainBackend(), prefixes, last_layer)
    expected = PlainBackend().attend(q, k, v, HEADS[head], plain, LAYER)
    torch.testing.assert_close(found.float(), expected, atol=NOISE[dtype], rtol=0)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("last_layer", [None, LAYER])
@pytest.mark.parametrize("prefix", [18, 19, 20, 21])
@pytest.mark.parametrize("rows", [1, 2, 20])
def test_at_the_edge_of_a_window(prefix: int, rows: int, last_layer: int | None) -> None:
    prefixes = [([span(30, prefix, torch.float32)], [(rows, 0)])]
    cuda = CudaBackend(Varlen())
    plan = make_plan(cuda, prefixes, last_layer)
    q, k, v = query_key_value(len(plan.positions), torch.float32)
    found = cuda.attend(q, k, v, HEADS["window"], plan, LAYER)
    plain = make_plan(PlainBackend(), prefixes, last_layer)
    expected = PlainBackend().attend(q, k, v, HEADS["window"], plain, LAYER)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("last_layer", [None, LAYER])
@pytest.mark.parametrize("head", list(HEADS))
def test_equal_bits_in_any_company(head: str, last_layer: int | None) -> None:
    """Alone, among others, with and without label branches, over a prefix in one piece or two."""
    whole = span(10, 300, torch.float32)
    cut = [
        Tensors(*([t[0][:, part].contiguous()] for t in (whole.keys, whole.values)))
        for part in (slice(0, 128), slice(128, None))
    ]
    cuda = CudaBackend(Varlen())
    rng = random.Random(3)
    for size in ((41, 3), (41, 0)):
        event = query_key_value(size[0], torch.float32, seed=50)
        seen = []
        for spans in ([whole], cut):
            for count in (0, 1, 5):
                before = [(rng.randrange(1, 70), 0) for _ in range(count)]
                after = [(rng.randrange(4, 70), 2) for _ in range(count)]
                other = [([span(60, 77, torch.float32)], before)] if before else []
                plan = make_plan(cuda, [*other, (spans, [size, *after])], last_layer)
                q, k, v = query_key_value(len(plan.positions), torch.float32)
                first = sum(n for n, _ in before)
                rows = slice(first, first + size[0])
                q[:, :, rows], k[:, rows], v[:, rows] = event
                found = cuda.attend(q, k, v, HEADS[head], plan, LAYER)
                seen.append(found[:, :, rows].clone())
        assert all(torch.equal(seen[0], other) for other in seen)


def test_a_prefix_is_one_call_and_unseen_spans_are_none() -> None:
    kernel = Varlen()
    cuda = CudaBackend(kernel)
    spans = [span(10, 128, torch.float32), span(20, 40, torch.float32)]
    prefixes = [(spans, [(5, 0)] * 9), (spans, [(6, 0)])]  # two segments over the same spans
    plan = make_plan(cuda, prefixes)
    q, k, v = query_key_value(len(plan.positions), torch.float32)
    cuda.attend(q, k, v, HEADS["plain"], plan, LAYER)
    assert kernel.calls == [((-1, 0), 64, 64), ((-1, -1), 64, 168)]
    kernel.calls.clear()
    cuda.attend(q, k, v, HEADS["window"], plan, LAYER)
    assert kernel.calls == [((19, 0), 64, 84)] * 2  # own rows, and those with the prefix's last 19


def test_bounds_never_choose_another_kernel() -> None:
    assert [bucket(n) for n in (1, 64, 65, 128, 2000)] == [64, 64, 128, 128, 2048]


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "gemma3_text", "gpt_oss", "qwen2", "granite", "olmo3"]
)
def test_packed_scores_equal_whole_prompts(kind: str, make_policy: MakePolicy) -> None:
    scorer, suffixes = build(kind, make_policy, backend=CudaBackend(Varlen()))
    packed = scorer.score(MicroBatch(tuple(suffixes)))
    for suffix, scores in zip(suffixes, packed, strict=True):
        reference = scorer.reference_score(suffix)
        assert scores.logprobs == pytest.approx(reference.logprobs, abs=1e-4)


@pytest.mark.parametrize("heads_first", [True, False])
def test_the_probe_finds_the_order_of_the_log_sum_exp(heads_first: bool) -> None:
    for names in ((2, 7), (1, 3), (4, 1)):
        assert probe(Varlen(heads_first), *names, 16, torch.bfloat16, CPU) is heads_first


class WindowOffByOne(Varlen):
    def __call__(self, *args: Any, window_size: tuple[int, int], **kwargs: Any) -> Any:
        left, right = window_size
        return super().__call__(*args, window_size=(left + (left > 0), right), **kwargs)


class WrongLogSumExp(Varlen):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, lse = super().__call__(*args, **kwargs)
        return out, lse + 0.1


@pytest.mark.parametrize("kernel", [WindowOffByOne(), WrongLogSumExp()])
def test_the_probe_refuses_a_wrong_kernel(kernel: Varlen) -> None:
    with pytest.raises(RuntimeError, match="wrong by"):
        probe(kernel, 2, 3, 16, torch.bfloat16, CPU)


def test_without_the_kernel_there_is_one_warning() -> None:
    """The real kernel, on a CPU: what a chip without it does."""
    with pytest.warns(UserWarning, match="flash attention") as caught:
        assert load_cuda_backend(2, 3, 16, torch.bfloat16, CPU) is None
    assert len(caught) == 1
    assert load_cuda_backend(2, 3, 16, torch.float32, CPU) is None


def test_the_real_kernel_takes_these_arguments() -> None:
    """By its schema and its shapes alone: fake tensors hold no numbers and need no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    kernel: Any = partial(
        varlen_attn, return_aux=AuxRequest(lse=True), enable_gqa=True, num_splits=1
    )
    with FakeTensorMode(), torch.inference_mode():
        cuda = CudaBackend(kernel)
        for head in HEADS.values():
            spans = [span(30, 40, torch.bfloat16)]
            plan = make_plan(cuda, [(spans, [(7, 0), (9, 0)]), ([], [(3, 0)])], LAYER)
            q, k, v = (
                torch.empty(t.shape, dtype=t.dtype) for t in query_key_value(64, torch.bfloat16)
            )
            bare = Head(head.scale, window=head.window)
            out = cuda.attend(q, k, v, bare, plan, LAYER)
            assert out.shape == q.shape


def test_a_model_on_a_gpu_gets_the_kernel_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*arguments: Any) -> CudaBackend:
        asked.append(arguments)
        return CudaBackend(Varlen())

    monkeypatch.setattr(backend, "load_cuda_backend", load)
    config = tiny_config("qwen2")
    device = SimpleNamespace(type="cuda")
    model: Any = SimpleNamespace(config=config, dtype=torch.bfloat16, device=device)
    chosen = backend.choose_backend(model, "auto", CACHE)
    assert isinstance(chosen, CudaBackend)
    assert isinstance(chosen.graphed, GraphedForward)
    assert asked == [(2, 2, 8, torch.bfloat16, device)]
    model.config = tiny_config("gemma2")
    assert isinstance(backend.choose_backend(model, "auto", CACHE), PlainBackend)
    monkeypatch.setattr(backend, "load_cuda_backend", lambda *_: None)
    model.config = config
    assert isinstance(backend.choose_backend(model, "auto", CACHE), PlainBackend)
