"""Attention by torch's flash kernel for CPUs, in any dtype.

Prefix and own rows are computed apart, each with its log-sum-exp, and merged in fp32 (Hydragen,
arXiv:2402.05099; FlashAttention's split rule, arXiv:2205.14135, section 3.1):

    out = o1 + sigmoid(lse2 - lse1) * (o2 - o1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from processor.engine.kernels import Kernels
from processor.engine.plan import TILE, EventRows, Head, Plan, Segment, causal

_HIDDEN = -1e30  # finite, so that a row that sees no key has a finite (and weightless) result


@dataclass(frozen=True)
class FlashBackend:
    """Matrix libraries choose kernels by the number of rows, and small or odd numbers get others,
    with other roundings: the prefix is attended to in whole tiles of rows."""

    kernels: Kernels | None = None
    tile: int = TILE

    @property
    def name(self) -> str:
        return f"flash/3/{self.kernels.identity if self.kernels else 'torch'}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, head: Head, plan: Plan, layer: int) -> Tensor:
        """The merge is one operation over all rows, not one per segment: vectorized loops end in
        scalar ones that round exp otherwise, and where they end must not depend on batch mates."""
        rows, count = plan.wanted_rows(layer)
        wanted = q[:, :, rows]
        o1, lse1 = _buffers(wanted)
        o2, lse2 = _buffers(wanted)
        at = 0
        for segment in plan.segments:
            begun = at
            for event in segment.events:
                place = slice(at, at + event.stop - plan.first_query(event, layer))
                own = slice(event.start, event.stop)
                mask = _own_mask(event, plan, layer, head, q.dtype)
                part = attend_flash(wanted[:, :, place], k[:, own], v[:, own], head, mask)
                o2[:, :, place], lse2[:, :, place] = part
                at = place.stop
            if segment.spans:
                place = slice(begun, at)
                tiles = _tiled(wanted[:, :, place], self.tile)
                part = _over_prefix(segment, tiles, rows[place], head, plan, layer)
                o1[:, :, place], lse1[:, :, place] = (x[:, :, : at - begun] for x in part)
        merged = o1 + torch.sigmoid(lse2 - lse1)[..., None] * (o2 - o1)
        if head.sinks is not None:
            both = torch.logaddexp(lse1, lse2) - head.sinks[..., None]
            merged = merged * torch.sigmoid(both)[..., None]
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        out[:, :, rows[:count]] = merged[:, :, :count]
        return out


def _over_prefix(
    segment: Segment, tiles: Tensor, rows: Tensor, head: Head, plan: Plan, layer: int
) -> tuple[Tensor, Tensor]:
    """The tiles of a segment's rows over its prefix; `rows` are their places in the plan."""
    keys = _joined([span.keys[layer] for span in segment.spans])
    values = _joined([span.values[layer] for span in segment.spans])
    if head.window is None:
        return attend_flash(tiles, keys, values, head, None)
    memo = ("prefix", head.window, segment.events[0].start, layer == plan.last_layer)
    if memo not in plan.memo:
        positions = torch.arange(segment.prefix_tokens, device=rows.device)
        seen = plan.positions[rows, None] - positions < head.window
        plan.memo[memo] = _tiled(_additive(seen, tiles.dtype), tiles.shape[2])
    return attend_flash(tiles, keys, values, head, plan.memo[memo])


def _own_mask(
    event: EventRows, plan: Plan, layer: int, head: Head, dtype: torch.dtype
) -> Tensor | bool:
    """Mask of an event's wanted rows over all of its rows; True where causal order holds."""
    first = plan.first_query(event, layer) - event.start
    memo = ("own", event.start, head.window, first)
    if memo not in plan.memo:
        seen = plan.own_mask(event, head.window)
        if seen is None and first:
            seen = causal(event.stop - event.start, plan.positions.device)
        plan.memo[memo] = True if seen is None else _additive(seen[first:], dtype)
    found: Tensor | bool = plan.memo[memo]
    return found


def _tiled(rows: Tensor, tile: int) -> Tensor:
    """Rows (the last dimension but one) filled up to a multiple of `tile`."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[-2] % tile))


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    hidden = max(_HIDDEN, torch.finfo(dtype).min)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, hidden)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Spans are joined for one call: a merge of one call per span would have other bits than a
    prefix in one piece."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def _buffers(q: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    return out, torch.full(q.shape[:-1], _HIDDEN, device=q.device)


def attend_flash(
    q: Tensor, k: Tensor, v: Tensor, head: Head, mask: Tensor | bool | None
) -> tuple[Tensor, Tensor]:
    """q [H, G, R, D] over k, v [H, S, D]: output and log-sum-exp in fp32. `mask` [R, S] in q's
    dtype is added to the logits; True: causal.

    Key-value heads stand in the batch dimension and are shared by stride 0: nothing is copied.
    """
    groups = q.shape[1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q,
        k[:, None].expand(-1, groups, -1, -1),
        v[:, None].expand(-1, groups, -1, -1),
        0.0,
        mask is True,
        attn_mask=mask if isinstance(mask, Tensor) else None,
        scale=head.scale,
    )
    return out.float(), lse
