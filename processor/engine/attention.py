"""Attention over a frozen prefix, plugged into transformers by name.

Every row of a micro-batch attends to two key sets: the frozen prefix of its policy, all of it, and
the rows of its own event that come before it. Both parts are computed apart, each with its
log-sum-exp, and merged in fp32 (Hydragen, arXiv:2402.05099; FlashAttention's split rule,
arXiv:2205.14135, section 3.1):

    out = o1 + sigmoid(lse2 - lse1) * (o2 - o1)

so the prefix is read in place: no copy per event, no repeated key-value heads, no mask over it.
transformers hands any unknown keyword of a model call down to the attention function; the plan of
a micro-batch arrives that way (`prefix_plan=`).

Shapes: G query heads share one of H key-value heads of size D; R rows, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "frozen_prefix"
REVISION = 2  # part of the numerics fingerprint: raise it when a change here can change bits
# Matrix libraries choose kernels by the number of rows, and small or odd numbers get others, with
# other roundings. All products run over multiples of this many rows, so that an event's bits do not
# depend on its batch mates.
ROW_TILE = 64
_HIDDEN = -1e30  # finite, so that a row that sees no key has a finite (and weightless) result


class PrefixTensors(Protocol):
    """Per layer: keys and values of the prefix, each [H, P, D], contiguous, never written."""

    @property
    def keys(self) -> Sequence[Tensor]: ...
    @property
    def values(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start..stop-1 follow one prefix."""

    prefix: PrefixTensors
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class EventRows:
    """Rows start..stop-1 are one event: its suffix, then its label branches.

    `tree` [rows, rows] (bool) says which row sees which; None: each row sees all before it.
    """

    start: int
    stop: int
    tree: Tensor | None = None


@dataclass
class Plan:
    """Who attends to whom in one forward pass. `positions` [R] are the rows' true positions."""

    segments: Sequence[Segment]
    events: Sequence[EventRows]
    positions: Tensor
    _masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)

    def own_mask(self, index: int, window: int | None) -> Tensor | None:
        """Additive fp32 mask of one event over itself; None where plain causal order holds."""
        key = (index, window)
        if key not in self._masks:
            event = self.events[index]
            rows = event.stop - event.start
            seen = event.tree
            if window is not None and rows > window:
                own = self.positions[event.start : event.stop]
                near = own[:, None] - own[None, :] < window
                seen = (_causal(rows, own.device) if seen is None else seen) & near
            self._masks[key] = None if seen is None else _additive(seen)
        return self._masks[key]


@dataclass
class Capture:
    """Plan of the pass that reads the prefix itself: plain causal attention whose keys and
    values are kept, for sliding-window layers too (a cache object would drop what has left the
    window, and a longer suffix may not need it, but an event with a shorter one does)."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def frozen_prefix_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    prefix_plan: Plan | Capture,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function registered as `frozen_prefix`: query [1, H*G, R, D], key and value
    [1, H, R, D], all with positions applied; returns [1, R, H*G, D]."""
    if attention_mask is not None or dropout:
        raise ValueError("frozen_prefix takes its structure from the plan alone")
    heads = key.shape[1]
    q = query[0].view(heads, -1, *query.shape[2:])  # [H, G, R, D]
    k, v = key[0], value[0]
    head = Head(scaling, softcap, sliding_window)
    if isinstance(prefix_plan, Capture):
        prefix_plan.keys.append(k.clone(memory_format=torch.contiguous_format))
        prefix_plan.values.append(v.clone(memory_format=torch.contiguous_format))
        out, lse1 = _causal_attention(q, k, v, head)
        lse2 = lse1.new_full((), _HIDDEN)
    else:
        layer: Any = module
        out, lse1, lse2 = _planned_attention(q, k, v, head, prefix_plan, int(layer.layer_idx))
    if s_aux is not None:  # a sink takes part in the denominator and has no value
        sink = s_aux.float().view(heads, -1, 1)
        out = out * torch.sigmoid(torch.logaddexp(lse1, lse2) - sink)[..., None]
    return out.to(query.dtype).permute(2, 0, 1, 3).flatten(1, 2)[None].contiguous(), None


AttentionInterface.register(NAME, frozen_prefix_attention)


@dataclass(frozen=True, slots=True)
class Head:
    """What a layer's attention does besides softmax(q k^T) v."""

    scale: float
    softcap: float | None = None
    window: int | None = None


def _planned_attention(
    q: Tensor, k: Tensor, v: Tensor, head: Head, plan: Plan, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and the log-sum-exp over the prefix and over the event's own rows.

    The merge is one operation over all rows, not one per segment: vectorized loops end in scalar
    ones that round exp otherwise, and where they end must not depend on batch mates.
    """
    o1, lse1 = _over_prefixes(q, head, plan, layer)
    o2, lse2 = _over_own_rows(q, k, v, head, plan)
    weight = torch.sigmoid(lse2 - lse1)[..., None]
    return o1 + weight * (o2 - o1), lse1, lse2


def _over_own_rows(
    q: Tensor, k: Tensor, v: Tensor, head: Head, plan: Plan
) -> tuple[Tensor, Tensor]:
    out, lse = _empty(q)
    for index, event in enumerate(plan.events):
        rows = slice(event.start, event.stop)
        mask = plan.own_mask(index, head.window)
        out[:, :, rows], lse[:, :, rows] = attend(
            q[:, :, rows], k[:, rows], v[:, rows], head, causal=mask is None, mask=mask
        )
    return out, lse


def _over_prefixes(q: Tensor, head: Head, plan: Plan, layer: int) -> tuple[Tensor, Tensor]:
    """Rows that see nothing of their prefix (it has left the window) get weight 0."""
    out, lse = _empty(q)
    for segment in plan.segments:
        rows = slice(segment.start, segment.stop)
        # Whole tiles, with rows of the neighbours whose results are not used.
        tiles = slice(segment.start // ROW_TILE * ROW_TILE, -(-segment.stop // ROW_TILE) * ROW_TILE)
        seen = _visible_prefix(segment, plan.positions, tiles, head.window)
        if seen is None:
            out[:, :, rows], lse[:, :, rows] = 0.0, _HIDDEN
            continue
        first, mask = seen
        keys, values = segment.prefix.keys[layer], segment.prefix.values[layer]
        o1, lse1 = attend(q[:, :, tiles], keys[:, first:], values[:, first:], head, mask=mask)
        if len(plan.segments) == 1:
            return o1, lse1
        inner = slice(segment.start - tiles.start, segment.stop - tiles.start)
        out[:, :, rows], lse[:, :, rows] = o1[:, :, inner], lse1[:, :, inner]
    return out, lse


def _empty(q: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    return out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


def _visible_prefix(
    segment: Segment, positions: Tensor, tiles: slice, window: int | None
) -> tuple[int, Tensor | None] | None:
    """First prefix token that a window leaves visible to any row of the segment, and the mask
    over `tiles` where rows differ; None where no row sees the prefix."""
    prefix = segment.prefix.keys[0].shape[1]
    if window is None:
        return 0, None
    own = positions[segment.start : segment.stop]
    first = max(0, int(own.min()) - window + 1)
    if first >= prefix:
        return None
    if int(own.max()) - window < first:
        return first, None
    keys = torch.arange(first, prefix, device=own.device)
    return first, _additive(positions[tiles, None] - keys[None, :] < window)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    rows = q.shape[2]
    if head.window is None or rows <= head.window:
        return attend(q, k, v, head, causal=True)
    at = torch.arange(rows, device=q.device)
    near = at[:, None] - at[None, :] < head.window
    return attend(q, k, v, head, mask=_additive(_causal(rows, q.device) & near))


def attend(
    q: Tensor, k: Tensor, v: Tensor, head: Head, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q [H, G, R, D] over k, v [H, S, D]: output [H, G, R, D] and log-sum-exp
    [H, G, R], both fp32. `mask` [R, S] is added to the logits; `causal` needs R == S."""
    if q.device.type == "cpu" and head.softcap is None:
        return _attend_flash_cpu(q, k, v, head, causal, mask)
    return attend_plain(q, k, v, head, causal, mask)


def _attend_flash_cpu(
    q: Tensor, k: Tensor, v: Tensor, head: Head, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    # Key-value heads stand in the batch dimension and are shared by stride 0: nothing is copied.
    groups = q.shape[1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q,
        k[:, None].expand(-1, groups, -1, -1),
        v[:, None].expand(-1, groups, -1, -1),
        0.0,
        causal,
        # fp16 has no -1e30; the kernel gives a row of -inf the log-sum-exp of one key
        attn_mask=None if mask is None else mask.clamp(min=torch.finfo(q.dtype).min).to(q.dtype),
        scale=head.scale,
    )
    return out.float(), lse


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, head: Head, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`attend` as it is written on paper, in fp32: what every back-end is tested against, and
    what serves logits that no kernel at hand computes (soft-capping)."""
    logits = torch.einsum("hgrd,hsd->hgrs", q.float(), k.float()) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    if causal:
        mask = _additive(_causal(q.shape[2], q.device))
    if mask is not None:
        logits = logits + mask
    lse = torch.logsumexp(logits, dim=-1)
    return torch.einsum("hgrs,hsd->hgrd", torch.exp(logits - lse[..., None]), v.float()), lse


def _causal(rows: int, device: torch.device) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril()


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, _HIDDEN)
