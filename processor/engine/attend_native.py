"""Attention by our own compiled kernel: fp32, on CPUs.

One online softmax over prefix and own keys, so nothing is merged; spans are walked over in place.
A row's bits depend on its event alone, so no tile of rows is needed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from processor.engine.kernels import CAttention, CEvent, CSpan, Kernels
from processor.engine.plan import LOOSE_TILE, Head, Plan, Segment


@dataclass(frozen=True)
class NativeBackend:
    kernels: Kernels
    tile: int = LOOSE_TILE

    @property
    def name(self) -> str:
        return f"native/{self.kernels.identity}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, head: Head, plan: Plan, layer: int) -> Tensor:
        heads, groups, rows, size = q.shape
        out = torch.zeros(rows, heads, groups, size)
        spans, events = _events(plan, layer)
        arguments = CAttention(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            out=out.data_ptr(),
            q_head=q.stride(1),
            q_row=q.stride(2),
            k_head=k.stride(0),
            k_row=k.stride(1),
            v_head=v.stride(0),
            v_row=v.stride(1),
            H=heads,
            G=groups,
            D=size,
            window=head.window or 0,
            scale=head.scale,
            sinks=None if head.sinks is None else head.sinks.data_ptr(),
            positions=plan.positions.data_ptr(),
            events=ctypes.cast(events, ctypes.POINTER(CEvent)),
            event_count=len(events),
        )
        self.kernels.attend(arguments)
        del spans
        return out.permute(1, 2, 0, 3)


def _events(plan: Plan, layer: int) -> tuple[list[Any], ctypes.Array[CEvent]]:
    """The plan of one layer in C; the spans are returned to be kept alive during the call."""
    kept, events = [], []
    for segment in plan.segments:
        spans = _spans(segment, layer)
        kept.append(spans)
        for event in segment.events:
            tree = None if event.tree is None else event.tree.data_ptr()
            first = plan.first_query(event, layer)
            events.append(CEvent(first, event.start, event.stop, spans, len(segment.spans), tree))
    return kept, (CEvent * len(events))(*events)


def _spans(segment: Segment, layer: int) -> ctypes.Array[CSpan]:
    """At least one entry, for its address is what tells segments apart."""
    spans = [
        CSpan(s.keys[layer].data_ptr(), s.values[layer].data_ptr(), s.keys[layer].shape[1])
        for s in segment.spans
    ]
    return (CSpan * max(1, len(spans)))(*spans)
