"""Which attention a loaded model runs on."""

from __future__ import annotations

from transformers import PreTrainedModel

from processor.engine.attend_flash import FlashBackend
from processor.engine.attend_plain import PlainBackend
from processor.engine.plan import Backend


def choose_backend(model: PreTrainedModel) -> Backend:
    """The fastest back-end that computes what this model asks of it."""
    if model.device.type != "cpu" or has_softcap(model):
        return PlainBackend()
    return FlashBackend()


def has_softcap(model: PreTrainedModel) -> bool:
    """Soft-capped attention logits (gemma2), which no kernel at hand computes."""
    return getattr(model.config, "attn_logit_softcapping", None) is not None
