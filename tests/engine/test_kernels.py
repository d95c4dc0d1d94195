"""The compiled kernels against torch, their bits, and what happens where they cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from processor.core.batch import MicroBatch
from processor.engine import kernels as module
from processor.engine.attend_flash import FlashBackend
from processor.engine.attend_native import NativeBackend
from processor.engine.fuse import PackedLinear
from processor.engine.kernels import Kernels, load_kernels
from tests.engine.conftest import MakePolicy
from tests.engine.test_architectures import build
from tests.engine.tiny import CACHE, tiny_model

KERNELS = load_kernels(CACHE)
needs_compiler = pytest.mark.skipif(KERNELS is None, reason="needs a C++ compiler: install g++")


@pytest.fixture
def kernels() -> Kernels:
    if KERNELS is None:
        pytest.skip("needs a C++ compiler: install g++")
    return KERNELS


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (7, 33, 5), (200, 96, 577)])
def test_linear(kernels: Kernels, rows: int, columns: int, depth: int, bias: bool) -> None:
    x, w = normal(rows, depth), normal(columns, depth)
    b = normal(columns) if bias else None
    found = kernels.linear(x, kernels.pack(w), b, columns)
    torch.testing.assert_close(found, linear(x, w, b), atol=1e-6 * depth, rtol=1e-5)


def test_gated_linear(kernels: Kernels) -> None:
    x, gate, up = normal(101, 77), normal(37, 77), normal(37, 77)
    found = kernels.gated_linear(x, kernels.pack(gate), kernels.pack(up), 37)
    expected = silu(linear(x, gate)) * linear(x, up)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    few = kernels.gated_linear(x[5:9], kernels.pack(gate), kernels.pack(up), 37)
    assert torch.equal(few, found[5:9])


def test_norm_and_gate(kernels: Kernels) -> None:
    x, w = 30 * normal(9, 50), normal(50)
    expected = rms_norm(x, [50], 1 + w, 1e-6)
    torch.testing.assert_close(kernels.rms_norm(x, w, 1e-6, 1.0), expected)
    gate, up = 60 * normal(3, 7, 11), normal(3, 7, 11)
    gate[0, 0, :3] = torch.tensor([-1e30, 1e30, 0.0])  # exp beyond what fp32 holds
    torch.testing.assert_close(kernels.silu_mul(gate.clone(), up), silu(gate) * up)


def test_norm_and_gate_in_bf16(kernels: Kernels) -> None:
    """Rounded once, where torch rounds after each step."""
    x, w = (30 * normal(9, 50)).bfloat16(), normal(50).bfloat16()
    exact = rms_norm(x.float(), [50], w.float(), 1e-6)
    assert torch.equal(kernels.rms_norm(x, w, 1e-6, 0.0), exact.bfloat16())
    gate, up = (60 * normal(3, 7, 11)).bfloat16(), normal(3, 7, 11).bfloat16()
    gate[0, 0, 0], gate[0, 0, 1] = float("nan"), float("inf")
    found = kernels.silu_mul(gate.clone(), up)
    torch.testing.assert_close(
        found.float(), silu(gate.float()) * up.float(), atol=1e-30, rtol=2**-8, equal_nan=True
    )


def test_a_row_has_the_same_bits_in_any_company_and_on_any_thread(kernels: Kernels) -> None:
    x, w = normal(131, 300), kernels.pack(normal(70, 300))
    whole = kernels.linear(x, w, None, 70)
    wide, up = normal(131, 33), normal(131, 33)
    gated = kernels.silu_mul(wide.clone(), up)
    normed = kernels.rms_norm(wide, up[0], 1e-6, 0.0)
    threads = torch.get_num_threads()
    try:
        for count, rows in ((1, slice(0, 1)), (2, slice(5, 104)), (3, slice(40, 47))):
            torch.set_num_threads(count)
            assert torch.equal(kernels.linear(x[rows], w, None, 70), whole[rows])
            assert torch.equal(kernels.silu_mul(wide[rows].clone(), up[rows]), gated[rows])
            assert torch.equal(kernels.rms_norm(wide[rows], up[0], 1e-6, 0.0), normed[rows])
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi", "gpt_oss", "qwen2"])
def test_a_model_scores_the_same_without_them(kind: str, make_policy: MakePolicy) -> None:
    compiled, suffixes = build(kind, make_policy)
    plain, _ = build(kind, make_policy, backend=FlashBackend())
    assert isinstance(compiled.model.backend, NativeBackend)
    batch = MicroBatch(tuple(suffixes))
    for found, expected in zip(compiled.score(batch), plain.score(batch), strict=True):
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert compiled.model.numerics != plain.model.numerics


@needs_compiler
def test_a_packed_layer_gives_its_weight_back() -> None:
    packed, plain = (tiny_model(backend=b) for b in (None, FlashBackend()))
    layers = {n: m for n, m in packed.body.named_modules() if isinstance(m, PackedLinear)}
    assert len(layers) == 3 * 7
    for name, layer in layers.items():
        assert torch.equal(layer.weight, plain.body.get_submodule(name).weight)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler"):
        assert load_kernels(Path("unused")) is None


@pytest.mark.parametrize("compiler", ["false", "/nowhere/c++"])
def test_with_a_broken_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match="compiled CPU kernels are not used"):
        assert load_kernels(tmp_path) is None


@needs_compiler
def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernels(tmp_path) is not None
    module._load.cache_clear()  # what a second process starts with
    monkeypatch.setattr(module, "_compile", None)
    assert load_kernels(tmp_path) is not None
    assert len(list((tmp_path / "kernels").iterdir())) == 1


@needs_compiler
def test_a_cut_off_file_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    monkeypatch.setattr(module, "_identity", lambda compiler: kernels.identity)
    file = tmp_path / "kernels" / f"{kernels.identity[:16]}.so"
    file.parent.mkdir()
    file.touch()
    assert load_kernels(tmp_path) is not None
    assert file.stat().st_size > 0


def test_no_rows(kernels: Kernels) -> None:
    assert kernels.linear(normal(0, 9), kernels.pack(normal(5, 9)), None, 5).shape == (0, 5)


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match="compiled CPU kernels are not used"):
        assert load_kernels(tmp_path) is None
