"""Which attention a loaded model runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from processor.engine.attend_cuda import load_cuda_backend
from processor.engine.attend_flash import FlashBackend
from processor.engine.attend_native import NativeBackend
from processor.engine.attend_plain import PlainBackend
from processor.engine.graphs import CudaCapture, GraphedForward
from processor.engine.kernels import load_kernels
from processor.engine.plan import LOOSE_TILE, TILE, Backend


def choose_backend(model: PreTrainedModel, kernels: str, cache_dir: Path) -> Backend:
    """The fastest back-end that computes what this model asks of it. `kernels`: auto, or torch to
    do without our compiled ones."""
    if model.device.type != "cpu":
        cuda = None if has_softcap(model) else _cuda_backend(model)
        return cuda or PlainBackend()
    served = kernels == "auto" and model.dtype in (torch.float32, torch.bfloat16)
    compiled = load_kernels(cache_dir) if served else None
    tile = LOOSE_TILE if compiled and model.dtype == torch.float32 else TILE
    if has_softcap(model):
        return PlainBackend(compiled, tile)
    if compiled and model.dtype == torch.float32:
        return NativeBackend(compiled, tile)
    return FlashBackend(compiled, tile)


def _cuda_backend(model: PreTrainedModel) -> Backend | None:
    """torch's kernel, and captured graphs; None where it does not serve this model."""
    config: Any = model.config
    names, heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // names
    backend = load_cuda_backend(heads, names // heads, size, model.dtype, model.device)
    if backend is not None and model.device.type == "cuda":
        window = getattr(config, "sliding_window", None)
        backend.graphed = GraphedForward(CudaCapture(), window)
    return backend


def has_softcap(model: PreTrainedModel) -> bool:
    """Soft-capped attention logits (gemma2), which no kernel at hand computes."""
    return getattr(model.config, "attn_logit_softcapping", None) is not None
