"""How the rows of a plan are given to a variable-length kernel: which are its sequences, which of
them see a prefix, and which are computed apart. Derived once per pass, and the same for all layers
that have the same window and compute the same rows.

A slot is a place among the queries of a layer: the row itself, but in the last layer, whose queries
are the tail rows alone. R rows, Q slots, N sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from processor.engine.plan import EventRows, Plan, Segment, Span, causal

STATIC = "static layouts"  # in a plan's memo: layouts that a captured graph reads, by last layer
_LEAST = 64


@dataclass(frozen=True)
class PrefixRange:
    """Slots start..stop-1 see all of a prefix. Bounds: int32 [2]."""

    start: int
    stop: int
    spans: Sequence[Span]
    query_bounds: Tensor
    key_bounds: Tensor
    longest: int


@dataclass(frozen=True)
class Source:
    """The last `visible` tokens of a prefix: what a window shows of it at most."""

    spans: Sequence[Span]
    visible: int


@dataclass(frozen=True)
class CutEvents:
    """Events whose window shows part of their prefix. `index`: each event's keys, in those of
    `sources` followed by the plan's own; `slots`: their queries. A window over such a row of keys
    is what the kernel computes, so nothing has to be merged."""

    sources: Sequence[Source]
    index: Tensor
    slots: Tensor
    query_bounds: Tensor
    key_bounds: Tensor


@dataclass(frozen=True)
class PlainEvent:
    """An event with label branches: `seen` [rows, keys] over the keys of `source`, if its window
    cuts the prefix, and its own."""

    slot: int
    rows: int
    own: slice
    source: Source | None
    seen: Tensor


@dataclass(frozen=True)
class Layout:
    """`index` [Q]: the plan's rows, of which the first `count` are wanted; None: all R, in place.
    `dead` [Q, 1, 1]: slots of no event. Bounds: int32 [N + 1]. `whole`: one range holds all."""

    index: Tensor | None
    count: int
    dead: Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    longest: int
    ranges: Sequence[PrefixRange]
    whole: bool
    cut: CutEvents | None = None
    plain: Sequence[PlainEvent] = ()


@dataclass(frozen=True)
class _Placed:
    """An event with its slots; `cut`: its window does not show all of its prefix."""

    event: EventRows
    segment: Segment
    slot: int
    queries: int
    cut: bool


def bucket(rows: int) -> int:
    """An upper bound of a sequence's rows: a power of two, so that few differ; never 1, for which
    the kernel would be another."""
    return max(_LEAST, 1 << (rows - 1).bit_length())


def upload(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """A tensor on the device without waiting for it: a copy out of pageable memory would."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def layout_of(plan: Plan, layer: int, window: int | None) -> Layout:
    last = layer == plan.last_layer
    static: Mapping[bool, Layout] | None = plan.memo.get(STATIC)
    if static is not None:
        return static[last]
    memo = ("layout", last, window)
    if memo not in plan.memo:
        plan.memo[memo] = _layout(plan, layer, window)
    found: Layout = plan.memo[memo]
    return found


def _layout(plan: Plan, layer: int, window: int | None) -> Layout:
    device = plan.positions.device
    placed = list(_place(plan, layer, window))
    index, slots = None, len(plan.positions)
    count = placed[-1].slot + placed[-1].queries
    if layer == plan.last_layer:
        index, count = plan.wanted_rows(layer)
        slots = len(index)
    ranges = _ranges(placed, device)
    return Layout(
        index=index,
        count=count,
        dead=torch.arange(slots, device=device)[:, None, None] >= count,
        query_bounds=upload([0, *(p.slot + p.queries for p in placed)], device),
        key_bounds=upload([0, *(p.event.stop for p in placed)], device),
        longest=bucket(max(p.event.stop - p.event.start for p in placed)),
        ranges=ranges,
        whole=len(ranges) == 1 and (ranges[0].start, ranges[0].stop) == (0, count),
        cut=_cut([p for p in placed if p.cut and p.event.tree is None], window or 0, device),
        plain=[_plain(p, plan, window) for p in placed if p.event.tree is not None],
    )


def _place(plan: Plan, layer: int, window: int | None) -> Iterator[_Placed]:
    slot = row = 0
    for segment in plan.segments:
        before = segment.prefix_tokens
        for event in segment.events:
            if event.start != row:
                raise ValueError("the events of a plan must adjoin, from row 0 on")
            queries = event.stop - plan.first_query(event, layer)
            cut = window is not None and 0 < before > window - (event.stop - event.start)
            yield _Placed(event, segment, slot, queries, cut)
            slot, row = slot + queries, event.stop


def _ranges(placed: Sequence[_Placed], device: torch.device) -> list[PrefixRange]:
    """Neighbours that see all of the same spans; the kernel's blocks then hold rows of several."""
    found = []
    for spans, members in groupby(
        placed, lambda p: () if p.cut else tuple(map(id, p.segment.spans))
    ):
        events = list(members)
        if spans:
            start, stop = events[0].slot, events[-1].slot + events[-1].queries
            segment = events[0].segment
            own = upload([0, stop - start], device)
            keys = upload([0, segment.prefix_tokens], device)
            longest = bucket(stop - start)
            found.append(PrefixRange(start, stop, segment.spans, own, keys, longest))
    return found


def _cut(placed: Sequence[_Placed], window: int, device: torch.device) -> CutEvents | None:
    if not placed:
        return None
    sources: dict[tuple[int, ...], tuple[Source, int]] = {}
    begun = 0
    for p in placed:
        spans = tuple(map(id, p.segment.spans))
        if spans not in sources:
            source = _source(p, window)
            sources[spans] = source, begun
            begun += source.visible
    index, slots, lengths = [], [], []
    for p in placed:
        source, at = sources[tuple(map(id, p.segment.spans))]
        index += [*range(at, at + source.visible)]
        index += [*range(begun + p.event.start, begun + p.event.stop)]
        slots += [*range(p.slot, p.slot + p.queries)]
        lengths.append(source.visible + p.event.stop - p.event.start)
    return CutEvents(
        sources=[source for source, _ in sources.values()],
        index=upload(index, device),
        slots=upload(slots, device, torch.int64),
        query_bounds=upload([0, *accumulate(p.queries for p in placed)], device),
        key_bounds=upload([0, *accumulate(lengths)], device),
    )


def _source(placed: _Placed, window: int) -> Source:
    """The first row of an event sees `window` - 1 tokens before it, and no row sees more."""
    return Source(placed.segment.spans, min(placed.segment.prefix_tokens, window - 1))


def _plain(placed: _Placed, plan: Plan, window: int | None) -> PlainEvent:
    event, device = placed.event, plan.positions.device
    seen = plan.own_mask(event, window)
    if seen is None:
        seen = causal(event.stop - event.start, device)
    source = None
    if placed.cut and window is not None:
        source = _source(placed, window)
        tokens = placed.segment.prefix_tokens
        keys = torch.arange(tokens - source.visible, tokens, device=device)
        before = plan.positions[event.start : event.stop, None] - keys < window
        seen = torch.cat([before, seen], 1)
    own = slice(event.start, event.stop)
    return PlainEvent(placed.slot, placed.queries, own, source, seen[-placed.queries :])
