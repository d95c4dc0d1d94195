"""Attention by torch's variable-length flash kernel for GPUs (`torch.nn.attention.varlen`), in bf16
and fp16. Not yet run on a GPU: on CPUs, tests put a plain twin in the kernel's place.

Facts about the kernel, from its docstring and flash_api.cpp (`mha_varlen_fwd`) of torch 2.13:

- Rows and heads are strided, only the last dimension is contiguous: keys [H, P, D] are read in
  place, and query heads share key-value heads without copies.
- Causal order is aligned to the bottom right: the last query sees the last key. A window (left, 0)
  shows a row `left` keys before its own, one less than the models' `sliding_window` counts.
- `max_q` 1 chooses another kernel (query heads folded into rows), and a window that is not below
  `max_k` is dropped. Both are upper bounds only, so they are given such that no event's kernel
  depends on its batch mates; nor do its splits over keys, with `num_splits=1`.
- Rows that no sequence covers are not written: they hold whatever was there.
- The log-sum-exp is [H, R] by the source and [R, H] by the docstring; the probe finds out which.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from processor.engine.attend_layout import (
    CutEvents,
    Layout,
    PlainEvent,
    PrefixRange,
    layout_of,
    upload,
)
from processor.engine.attend_plain import attend_plain
from processor.engine.plan import TILE, Head, Plan, Span

_HIDDEN = -1e30  # log-sum-exp of no keys; finite, so that differences of two are no NaN
_TOLERANCE = 0.03  # of the probe: values of size 1 in bf16, rounded a few times
_FULL, _CAUSAL = (-1, -1), (-1, 0)


class Kernel(Protocol):
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """query [Q, N, D] and key, value [K, H, D] of sequences that begin at `cu_seq_q` and
        `cu_seq_k` (int32): output [Q, N, D] and log-sum-exp, [N, Q] or [Q, N] in fp32."""


@dataclass(frozen=True)
class _Work:
    """One layer's attention: queries [Q, N, D] over k, v [H, R, D] and the layout's prefixes."""

    queries: Tensor
    k: Tensor
    v: Tensor
    head: Head
    layer: int
    layout: Layout

    def gathered(self, cut: CutEvents) -> tuple[Tensor, Tensor]:
        """Keys and values [K, H, D] of cut events, one event after the other."""
        tails = [_joined(source.spans, self.layer, source.visible) for source in cut.sources]
        keys = torch.cat([*(tail[0] for tail in tails), self.k], 1).transpose(0, 1)
        values = torch.cat([*(tail[1] for tail in tails), self.v], 1).transpose(0, 1)
        return keys[cut.index], values[cut.index]


@dataclass
class CudaBackend:
    """`graphed`: what runs whole passes in place of `forward.run_eagerly`, if anything.

    The spans of a prefix are joined for one call: merging one call per span would give other bits
    than a prefix in one piece, and an event's bits must not depend on who shares its prefix.
    """

    kernel: Kernel
    heads_first: bool = True  # the log-sum-exp is [N, Q]
    graphed: Callable[..., Tensor] | None = field(default=None, repr=False)
    name: str = "varlen/1"
    tile: int = TILE
    kernels: None = None  # ours are for CPUs

    def attend(self, q: Tensor, k: Tensor, v: Tensor, head: Head, plan: Plan, layer: int) -> Tensor:
        layout = layout_of(plan, layer, head.window)
        rows = q.flatten(0, 1).transpose(0, 1)  # [R, N, D]
        queries = rows if layout.index is None else rows[layout.index]
        work = _Work(queries, k, v, head, layer, layout)
        merged = self._merged(work).masked_fill_(layout.dead, 0)
        if layout.index is not None:
            some = merged
            merged = merged.new_zeros(rows.shape)
            merged[layout.index[: layout.count]] = some[: layout.count]
        return merged.view(rows.shape[0], *q.shape[:2], -1).permute(1, 2, 0, 3)

    def _merged(self, work: _Work) -> Tensor:
        """[Q, N, D] in fp32, from prefix and own rows: o1 + sigmoid(lse2 - lse1) * (o2 - o1)."""
        out, lse = self._own(work)
        if work.layout.ranges:
            before, lse1 = self._prefix(work)
            out = torch.lerp(before, out, torch.sigmoid(lse - lse1)[..., None])
            lse = torch.logaddexp(lse, lse1) if work.head.sinks is not None else lse
        if work.head.sinks is not None:
            out = out * torch.sigmoid(lse - work.head.sinks.flatten())[..., None]
        return out

    def _own(self, work: _Work) -> tuple[Tensor, Tensor]:
        """All events over their own rows; cut events over what they see of the prefix, too."""
        head, layout, queries = work.head, work.layout, work.queries
        window, max_k = _CAUSAL, layout.longest
        if head.window is not None:
            window, max_k = (head.window - 1, 0), layout.longest + head.window
        keys, values = work.k.transpose(0, 1), work.v.transpose(0, 1)
        bounds = layout.query_bounds, layout.key_bounds
        out, lse = self._call(queries, keys, values, bounds, layout.longest, max_k, head, window)
        if (cut := layout.cut) is not None:
            keys, values = work.gathered(cut)
            some, bounds = queries[cut.slots], (cut.query_bounds, cut.key_bounds)
            part = self._call(some, keys, values, bounds, layout.longest, max_k, head, window)
            out[cut.slots], lse[cut.slots] = part
        for event in layout.plain:
            place = slice(event.slot, event.slot + event.rows)
            out[place], lse[place] = _plain(work, event)
        return out, lse

    def _prefix(self, work: _Work) -> tuple[Tensor, Tensor]:
        """The rows that see all of their prefix, over it; without a mask, so without a window."""
        ranges = work.layout.ranges
        if work.layout.whole:
            return self._range(work.queries, ranges[0], work)
        rows, names, _ = work.queries.shape
        out = work.queries.new_zeros(work.queries.shape, dtype=torch.float32)
        lse = out.new_full((names, rows), _HIDDEN).t()
        for part in ranges:
            place = slice(part.start, part.stop)
            out[place], lse[place] = self._range(work.queries[place], part, work)
        return out, lse

    def _range(self, queries: Tensor, part: PrefixRange, work: _Work) -> tuple[Tensor, Tensor]:
        keys, values = (t.transpose(0, 1) for t in _joined(part.spans, work.layer))
        bounds = part.query_bounds, part.key_bounds
        return self._call(queries, keys, values, bounds, part.longest, len(keys), work.head, _FULL)

    def _call(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        bounds: tuple[Tensor, Tensor],
        max_q: int,
        max_k: int,
        head: Head,
        window: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """Output [Q, N, D] and log-sum-exp [Q, N], in fp32."""
        out, lse = self.kernel(
            queries, keys, values, *bounds, max_q, max_k, scale=head.scale, window_size=window
        )
        rows_first = tuple(queries.shape[:2])
        if tuple(lse.shape) != (rows_first[::-1] if self.heads_first else rows_first):
            raise RuntimeError(f"log-sum-exp of shape {list(lse.shape)} over {rows_first}")
        return out.float(), lse.t() if self.heads_first else lse


def _joined(spans: Sequence[Span], layer: int, visible: int | None = None) -> tuple[Tensor, Tensor]:
    """Keys and values [H, P, D] of a prefix, or of its last `visible` tokens. A prefix in one piece
    is read in place; spans that nobody sees are left out."""
    sizes = [span.keys[layer].shape[1] for span in spans]
    first, skip = 0, 0 if visible is None else sum(sizes) - visible
    while first < len(spans) - 1 and skip >= sizes[first]:
        skip -= sizes[first]
        first += 1
    keys = [span.keys[layer] for span in spans[first:]]
    values = [span.values[layer] for span in spans[first:]]
    joined = (t[0] if len(t) == 1 else torch.cat(t, 1) for t in (keys, values))
    k, v = (t[:, skip:] for t in joined)
    return k, v


def _plain(work: _Work, event: PlainEvent) -> tuple[Tensor, Tensor]:
    """An event with label branches, as it is written on paper: [rows, N, D] and [rows, N]."""
    keys, values = work.k[:, event.own], work.v[:, event.own]
    if event.source is not None:
        before = _joined(event.source.spans, work.layer, event.source.visible)
        keys, values = torch.cat([before[0], keys], 1), torch.cat([before[1], values], 1)
    queries = work.queries[event.slot : event.slot + event.rows].transpose(0, 1)
    bare = Head(work.head.scale)  # sinks come in at the merge, the window is in the mask
    grouped = queries.reshape(len(keys), -1, *queries.shape[1:])
    out, lse = attend_plain(grouped, keys, values, bare, event.seen)
    return out.flatten(0, 1).transpose(0, 1), lse.flatten(0, 1).t()


def load_cuda_backend(
    heads: int, groups: int, size: int, dtype: torch.dtype, device: torch.device
) -> CudaBackend | None:
    """The back-end for `heads` key-value heads of `size`, each shared by `groups` query heads. None
    for fp32, which the kernel does not compute; None and a warning where it is missing or wrong."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        # Imported here: it pulls in seconds' worth of modules that nothing else needs.
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        kernel: Any = partial(
            varlen_attn, return_aux=AuxRequest(lse=True), enable_gqa=True, num_splits=1
        )
        return CudaBackend(kernel, probe(kernel, heads, groups, size, dtype, device))
    except (ImportError, RuntimeError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        message = f"no flash attention on this GPU for this model, which is slow: {reason}"
        warnings.warn(message, stacklevel=2)
        return None


def probe(
    kernel: Kernel, heads: int, groups: int, size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Try a kernel on what will be asked of it: whether its log-sum-exp is [N, Q]. Raises
    `RuntimeError` where it differs from attention as it is written on paper."""
    names = heads * groups
    queries, keys = (0, 3, 3 + names), (0, 7, 9 + names)  # more rows than heads: shapes tell apart
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(queries[-1], names, size, generator=draw).to(device, dtype)
    k, v = (torch.randn(heads, keys[-1], size, generator=draw).to(device, dtype) for _ in range(2))
    head = Head(size**-0.5)
    bounds = upload(queries, device), upload(keys, device)
    orders = set()
    for window in (_FULL, _CAUSAL, (2, 0)):
        turned = (k.transpose(0, 1), v.transpose(0, 1), *bounds)
        out, lse = kernel(q, *turned, 64, 64, scale=head.scale, window_size=window)
        orders.add(tuple(lse.shape))
        lse = lse.t() if lse.shape[0] == names else lse
        for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
            seen = _seen(b - a, d - c, window).to(device)
            grouped = q[a:b].transpose(0, 1).reshape(heads, groups, b - a, size)
            expected = attend_plain(grouped, k[:, c:d], v[:, c:d], head, seen)
            found = out[a:b].transpose(0, 1), lse[a:b].t()
            for one, other in zip(found, expected, strict=True):
                error = float((one.float() - other.flatten(0, 1)).abs().max())
                if not error <= _TOLERANCE:  # NaN is wrong too
                    raise RuntimeError(f"it is wrong by {error:.2g} for window {window}")
    if orders not in ({(names, queries[-1])}, {(queries[-1], names)}):
        raise RuntimeError(f"its log-sum-exp has the shapes {orders}")
    return (names, queries[-1]) in orders


def _seen(rows: int, keys: int, window: tuple[int, int]) -> Tensor:
    """Which keys the kernel shows each row, [rows, keys]."""
    behind = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    left, right = window
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        seen &= behind <= left
    if right >= 0:
        seen &= behind >= -right
    return seen
