"""Attention over a plan as it is written on paper, in fp32: what every back-end is tested against,
and what serves logits that no kernel at hand computes (soft-capping)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from processor.engine.kernels import Kernels
from processor.engine.plan import TILE, EventRows, Head, Plan, Segment, causal


@dataclass(frozen=True)
class PlainBackend:
    kernels: Kernels | None = None
    tile: int = TILE

    @property
    def name(self) -> str:
        return f"plain/1/{self.kernels.identity if self.kernels else 'torch'}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, head: Head, plan: Plan, layer: int) -> Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        for segment in plan.segments:
            for event in segment.events:
                first = plan.first_query(event, layer)
                rows, own = slice(first, event.stop), slice(event.start, event.stop)
                keys = [*(span.keys[layer] for span in segment.spans), k[:, own]]
                values = [*(span.values[layer] for span in segment.spans), v[:, own]]
                seen = _seen(segment, event, first, plan, head.window)
                out[:, :, rows] = attend_plain(
                    q[:, :, rows], torch.cat(keys, 1), torch.cat(values, 1), head, seen
                )[0]
        return out


def _seen(segment: Segment, event: EventRows, first: int, plan: Plan, window: int | None) -> Tensor:
    """Which keys, prefix and own, the rows first..stop-1 of an event see."""
    device = plan.positions.device
    own = plan.own_mask(event, window)
    if own is None:
        own = causal(event.stop - event.start, device)
    prefix = own.new_ones(event.stop - first, segment.prefix_tokens)
    if window is not None:
        rows = plan.positions[first : event.stop, None]
        prefix = rows - torch.arange(segment.prefix_tokens, device=device) < window
    return torch.cat([prefix, own[first - event.start :]], 1)


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, head: Head, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q [H, G, R, D] over k, v [H, S, D]: output [H, G, R, D] and log-sum-exp [H, G, R], in fp32.
    `seen` [R, S] (bool); a row that sees nothing has output 0 and log-sum-exp -inf."""
    logits = torch.einsum("hgrd,hsd->hgrs", q.float(), k.float()) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    if seen is not None:
        logits = logits.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    if head.sinks is not None:
        lse = torch.logaddexp(lse, head.sinks[..., None])
    weights = torch.exp(logits - lse[..., None]).nan_to_num()
    return torch.einsum("hgrs,hsd->hgrd", weights, v.float()), lse
