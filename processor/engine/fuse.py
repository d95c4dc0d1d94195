"""Putting the compiled kernels into a loaded model: its linear layers, and norms and gated
activations where they are of the usual kind, which is found out by trying them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from processor.engine.kernels import Kernels

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest result


class Switch:
    """Whether the kernels are in use. Off: the same model by torch alone, as reference.

    `whole`: all activations are ours. torch splits an element-wise loop among threads wherever the
    number of elements says so, and what is left over at the end of a part is rounded otherwise, so
    elsewhere rows must come in tiles.
    """

    def __init__(self) -> None:
        self.on = True
        self.whole = False

    @contextmanager
    def off(self) -> Iterator[None]:
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


class PackedLinear(torch.nn.Module):
    """A linear layer whose weight is held in panels; `weight` [N, K] is made anew at each use."""

    def __init__(self, linear: torch.nn.Linear, kernels: Kernels, switch: Switch) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("panels", kernels.pack(linear.weight.detach()))
        self.bias: Tensor | None = linear.bias
        self._kernels, self._switch = kernels, switch

    @property
    def packed(self) -> Tensor:
        panels: Any = self.panels
        found: Tensor = panels
        return found

    @property
    def weight(self) -> Tensor:
        wide = self.packed.transpose(1, 2).reshape(-1, self.in_features)
        return wide[: self.out_features]

    def forward(self, x: Tensor) -> Tensor:
        if not self._switch.on:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        return self._kernels.linear(x, self.packed, self.bias, self.out_features)


def fuse(model: PreTrainedModel, kernels: Kernels) -> Switch:
    """Change a model (fp32 or bf16, on the CPU) in place. The head stays as it is, and so do
    linear layers in bf16: chips that are fast in it have units that we do not program."""
    switch = Switch()
    body: Any = model.base_model
    with torch.inference_mode():
        for module in list(body.modules()):
            _fuse_norm(module, kernels, switch)
        gated = [_fuse_gate(module, kernels, switch) for module in list(body.modules())]
        switch.whole = sum(gated) == model.config.num_hidden_layers
        for module in list(body.modules()) if model.dtype == torch.float32 else ():
            for name, child in list(module.named_children()):
                if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
                    setattr(module, name, PackedLinear(child, kernels, switch))
    return switch


def _fuse_norm(module: Any, kernels: Kernels, switch: Switch) -> None:
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
        return
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return
    for offset in (0.0, 1.0):  # gemma scales by 1 + weight
        candidate = _norm(kernels, weight, eps, offset)
        if _same(module, candidate, len(weight)):
            module.forward = _switched(switch, candidate, module.forward, weight.dtype)
            return


def _norm(
    kernels: Kernels, weight: Tensor, eps: float, offset: float
) -> Callable[[Tensor], Tensor]:
    return lambda x: kernels.rms_norm(x, weight, eps, offset)


def _fuse_gate(module: Any, kernels: Kernels, switch: Switch) -> bool:
    """Whether the module is a gated MLP of the usual kind, and now runs on the kernels."""
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(layer) is torch.nn.Linear for layer in layers):
        return False

    def gated(x: Tensor) -> Tensor:
        gate, up = module.gate_proj, module.up_proj
        packed = isinstance(gate, PackedLinear) and isinstance(up, PackedLinear)
        if packed and gate.bias is None and up.bias is None:
            inner = kernels.gated_linear(x, gate.packed, up.packed, gate.out_features)
        else:
            inner = kernels.silu_mul(gate(x), up(x))
        down: Tensor = module.down_proj(inner)
        return down

    if not _same(module, gated, module.gate_proj.in_features):
        return False
    module.forward = _switched(switch, gated, module.forward, module.gate_proj.weight.dtype)
    return True


def _switched(
    switch: Switch,
    ours: Callable[[Tensor], Tensor],
    theirs: Callable[..., Any],
    dtype: torch.dtype,
) -> Callable[..., Any]:
    """Ours for what it was tried with, theirs for anything else."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if switch.on and x.dtype == dtype and not args and not kwargs:
            return ours(x)
        return theirs(x, *args, **kwargs)

    return forward


def _same(module: Any, candidate: Callable[[Tensor], Tensor], size: int) -> bool:
    """Whether the candidate computes what the module does, on random rows."""
    probe = 2 * torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    probe[2] *= 1e-3  # where the epsilon of a norm shows
    probe = probe.to(next(module.parameters()).dtype)
    expected = module(probe)
    if not isinstance(expected, Tensor):
        return False
    far = (candidate(probe) - expected).abs().max()
    return bool(far <= _TOLERANCE[probe.dtype] * expected.abs().max())
