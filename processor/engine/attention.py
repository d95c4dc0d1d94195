"""Attention over a frozen prefix, plugged into transformers by name.

Every row of a micro-batch attends to two key sets: the frozen prefix of its policy, all of it, and
the rows of its own event that come before it. The prefix is read in place: no copy per event, no
repeated key-value heads, no mask over it. transformers hands any unknown keyword of a model call
down to the attention function; the plan of a micro-batch arrives that way (`prefix_plan=`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from processor.engine.plan import Head, Plan

NAME = "frozen_prefix"


def frozen_prefix_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    prefix_plan: Plan,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function registered as `frozen_prefix`: query [1, H*G, R, D], key and value
    [1, H, R, D], all with positions applied; returns [1, R, H*G, D]."""
    if attention_mask is not None or dropout:
        raise ValueError("frozen_prefix takes its structure from the plan alone")
    layer: Any = module
    k, v = key[0], value[0]
    if (capture := prefix_plan.capture) is not None:
        capture.keys.append(k.clone(memory_format=torch.contiguous_format))
        capture.values.append(v.clone(memory_format=torch.contiguous_format))
    heads = k.shape[0]
    sinks = None if s_aux is None else s_aux.float().view(heads, -1)
    head = Head(scaling, softcap, sliding_window, sinks)
    q = query[0].view(heads, -1, *query.shape[2:])
    out = prefix_plan.backend.attend(q, k, v, head, prefix_plan, int(layer.layer_idx))
    return out.to(query.dtype).permute(2, 0, 1, 3).flatten(1, 2)[None].contiguous(), None


AttentionInterface.register(NAME, frozen_prefix_attention)
