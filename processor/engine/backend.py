"""Which attention a loaded model runs on."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from processor.engine.attend_flash import FlashBackend
from processor.engine.attend_native import NativeBackend
from processor.engine.attend_plain import PlainBackend
from processor.engine.kernels import load_kernels
from processor.engine.plan import LOOSE_TILE, TILE, Backend


def choose_backend(model: PreTrainedModel, kernels: str, cache_dir: Path) -> Backend:
    """The fastest back-end that computes what this model asks of it. `kernels`: auto, or torch to
    do without our compiled ones."""
    if model.device.type != "cpu":
        return PlainBackend()
    served = kernels == "auto" and model.dtype in (torch.float32, torch.bfloat16)
    compiled = load_kernels(cache_dir) if served else None
    tile = LOOSE_TILE if compiled and model.dtype == torch.float32 else TILE
    if has_softcap(model):
        return PlainBackend(compiled, tile)
    if compiled and model.dtype == torch.float32:
        return NativeBackend(compiled, tile)
    return FlashBackend(compiled, tile)


def has_softcap(model: PreTrainedModel) -> bool:
    """Soft-capped attention logits (gemma2), which no kernel at hand computes."""
    return getattr(model.config, "attn_logit_softcapping", None) is not None
