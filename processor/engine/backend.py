"""Which attention a loaded model runs on."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from processor.engine.attend_flash import FlashBackend
from processor.engine.attend_native import NativeBackend
from processor.engine.attend_plain import PlainBackend
from processor.engine.kernels import load_kernels
from processor.engine.plan import Backend


def choose_backend(model: PreTrainedModel, kernels: str, cache_dir: Path) -> Backend:
    """The fastest back-end that computes what this model asks of it. `kernels`: auto, or torch to
    do without our compiled ones."""
    if model.device.type != "cpu" or has_softcap(model):
        return PlainBackend()
    if kernels == "auto" and model.dtype == torch.float32:
        compiled = load_kernels(cache_dir)
        if compiled is not None:
            return NativeBackend(compiled)
    return FlashBackend()


def has_softcap(model: PreTrainedModel) -> bool:
    """Soft-capped attention logits (gemma2), which no kernel at hand computes."""
    return getattr(model.config, "attn_logit_softcapping", None) is not None
