"""Captured CUDA graphs: a pass over one prefix as a single launch. Not yet run on a GPU.

A decoder of 24 layers is about a thousand launches, each some microseconds of the host's time: for
one event that is longer than the work. A graph replays them at once, and reads what differs from
pass to pass (tokens, positions, where events begin) in buffers that stay in place. It serves passes
over one prefix whose events have no label branches and see all of their prefix; all others run
eagerly.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from processor.engine.attend_layout import STATIC, Layout, PrefixRange, bucket, upload
from processor.engine.forward import TailRows, run_eagerly, run_rows
from processor.engine.plan import Plan, Segment, Span

LIMIT = 256  # graphs; one of some thousand launches takes about a megabyte


class Capture(Protocol):
    def __call__(
        self, function: Callable[[], Tensor], alone: bool
    ) -> tuple[Callable[[], None], Tensor]:
        """Record the work of `function`: what replays it, and the output that a replay fills.
        `alone`: no other graph is alive."""


class CudaCapture:
    """Graphs share a memory pool: one pass runs at a time, and its output is read before the next.
    A pool whose graphs are all gone must not be used again, so then a new one is begun."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(
        self, function: Callable[[], Tensor], alone: bool
    ) -> tuple[Callable[[], None], Tensor]:
        if alone:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # The outer block brings the stream back: torch.cuda.graph does not when capturing fails.
        # Other threads may allocate meanwhile, so only this one is watched for what is unsafe.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            output = function()
        return graph.replay, output


@dataclass(frozen=True)
class Shape:
    """What is fixed in a graph: the spans (by identity), R rows, Q slots of the last layer, and
    the bound of an event's rows. There are at most as many events as slots."""

    spans: tuple[int, ...]
    rows: int
    slots: int
    longest: int


class Inputs:
    """The buffers that a graph reads: all int32 but for the positions, which plans have on the
    device, and filled by one copy."""

    def __init__(self, shape: Shape, prefix_tokens: int, device: torch.device) -> None:
        rows, slots = shape.rows, shape.slots
        self._shape = shape
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        sizes = [rows, slots, slots + 1, slots + 1, 2, 2]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = torch.split(self.buffer, sizes)
        self.ids, self.tails, self.row_bounds, self.tail_bounds = parts[:4]
        self.row_range, self.tail_range = parts[4:]
        self._key_bounds = upload([0, prefix_tokens], device)

    def fill(self, ids: Sequence[int], plan: Plan) -> None:
        values = packed(self._shape, ids, [event.stop for event in plan.events])
        self.buffer.copy_(upload(values, self.buffer.device), non_blocking=True)
        self.positions.copy_(plan.positions)

    def plan(self, like: Plan, spans: Sequence[Span]) -> Plan:
        """A plan whose structure is read from the buffers. Made while capturing: it computes."""
        memo = {
            ("rows", True): (self.tails, self._shape.slots),
            STATIC: {False: self._layout(spans, False), True: self._layout(spans, True)},
        }
        segments = [Segment(spans, ())]
        return Plan(segments, self.positions, like.backend, like.last_layer, memo=memo)

    def _layout(self, spans: Sequence[Span], last: bool) -> Layout:
        device = self.buffer.device
        slots = self._shape.slots if last else self._shape.rows
        own = self.tail_range if last else self.row_range
        return Layout(
            index=self.tails if last else None,
            count=slots,
            dead=torch.arange(slots, device=device)[:, None, None] >= own[1],
            query_bounds=self.tail_bounds if last else self.row_bounds,
            key_bounds=self.row_bounds,
            longest=self._shape.longest,
            ranges=[PrefixRange(0, slots, spans, own, self._key_bounds, bucket(slots))],
            whole=True,
        )


def packed(shape: Shape, ids: Sequence[int], stops: Sequence[int]) -> list[int]:
    """What the int32 buffer holds for events of one row after the other, up to each of `stops`.

    Bounds are filled up with empty sequences, and tails with other rows, each row once: what is
    computed for those is read by nobody, and no two of them are written to one place.
    """
    count, slots = len(stops), shape.slots
    tails = [stop - 1 for stop in stops]
    taken = set(tails)
    others = (row for row in range(shape.rows) if row not in taken)
    tails += [row for row, _ in zip(others, range(slots - count), strict=False)]
    row_bounds = [0, *stops, *[stops[-1]] * (slots - count)]
    tail_bounds = [*range(count), *[count] * (slots + 1 - count)]
    return [*ids, *tails, *row_bounds, *tail_bounds, 0, stops[-1], 0, count]


@dataclass(frozen=True)
class _Captured:
    inputs: Inputs
    replay: Callable[[], None]
    output: Tensor


class GraphedForward:
    """Runs a pass as `forward.run_plan` does. A shape that comes for the second time is captured:
    its first pass, run eagerly, has warmed up all libraries. The least recently used graph goes
    when there are `LIMIT`; those over a span go with the span, whose memory they read.

    `window`: the model's sliding window, if it has one.
    """

    def __init__(self, capture: Capture, window: int | None = None, limit: int = LIMIT) -> None:
        self._capture = capture
        self._window = window
        self._limit = limit
        self._broken = False
        self._graphs: OrderedDict[Shape, _Captured | None] = OrderedDict()  # None: seen once
        self._watched: set[int] = set()

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(self, body: Any, tail: TailRows, ids: Sequence[int], plan: Plan) -> Tensor:
        shape = None if self._broken else graph_shape(plan, self._window)
        graph = None if shape is None else self._graph(shape, body, tail, plan)
        if graph is None:
            return run_eagerly(body, tail, ids, plan)
        graph.inputs.fill(ids, plan)
        graph.replay()
        return graph.output

    def _graph(self, shape: Shape, body: Any, tail: TailRows, plan: Plan) -> _Captured | None:
        known = shape in self._graphs
        graph = self._graphs.pop(shape, None)
        if not known:
            self._watch(plan.segments[0].spans)
        elif graph is None:
            try:
                graph = self._captured(shape, body, tail, plan)
            except RuntimeError as error:
                self._give_up(error)
                return None
        self._graphs[shape] = graph  # behind all others
        if len(self._graphs) > self._limit:
            self._graphs.popitem(last=False)
        return graph

    def _captured(self, shape: Shape, body: Any, tail: TailRows, plan: Plan) -> _Captured:
        spans = plan.segments[0].spans
        inputs = Inputs(shape, plan.segments[0].prefix_tokens, plan.positions.device)

        def function() -> Tensor:
            return run_rows(body, tail, inputs.ids[None], inputs.plan(plan, spans))

        replay, output = self._capture(function, alone=not len(self))
        return _Captured(inputs, replay, output)

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        self._graphs.clear()
        reason = str(error).partition("\n")[0]
        warnings.warn(
            f"no CUDA graphs for this model: small batches are slow: {reason}", stacklevel=5
        )

    def _watch(self, spans: Sequence[Span]) -> None:
        for span in spans:
            if id(span) not in self._watched:
                self._watched.add(id(span))
                forget = weakref.finalize(span, _forget, self._graphs, self._watched, id(span))
                forget.atexit = False


def _forget(graphs: OrderedDict[Shape, Any], watched: set[int], span: int) -> None:
    watched.discard(span)
    for shape in [shape for shape in graphs if span in shape.spans]:
        del graphs[shape]


def graph_shape(plan: Plan, window: int | None) -> Shape | None:
    """The shape of a pass that a graph can run; None for another."""
    if len(plan.segments) != 1 or plan.capture is not None:
        return None
    [segment] = plan.segments
    if not segment.spans or any(e.tree is not None or e.tail != 1 for e in segment.events):
        return None
    longest = max(event.stop - event.start for event in segment.events)
    if window is not None and segment.prefix_tokens + longest > window:
        return None
    tile = plan.backend.tile
    slots = -(-len(segment.events) // tile) * tile
    rows = len(plan.positions)
    if slots > rows:  # no other rows to fill up with
        return None
    return Shape(tuple(map(id, segment.spans)), rows, slots, bucket(longest))
