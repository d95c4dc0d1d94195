"""Who attends to whom in one forward pass. Back-ends of attention read a `Plan`, and nothing else.

Shapes: G query heads share one of H key-value heads of size D; R rows, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from processor.engine.kernels import Kernels

# Prefix tokens are held in spans of whole blocks (but for the last), and kernels walk over keys in
# such blocks: a prefix that is cut elsewhere, or not at all, gives the same bits.
KEY_BLOCK = 128
# Rows of products by torch's libraries come in multiples of TILE. Our own kernels need no tile; a
# loose one, as high as theirs, keeps the number of sizes small.
TILE, LOOSE_TILE = 64, 6


class Span(Protocol):
    """A run of prefix tokens. Per layer: keys and values [H, n, D], contiguous, never written."""

    @property
    def keys(self) -> Sequence[Tensor]: ...
    @property
    def values(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True, slots=True)
class EventRows:
    """Rows start..stop-1 are one event: its suffix, then its label branches.

    The last `tail` rows are those whose final state is read. `tree` [rows, rows] (bool) says which
    row sees which; None: each row sees all before it.
    """

    start: int
    stop: int
    tail: int = 1
    tree: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 < self.tail <= self.stop - self.start:
            raise ValueError("an event has a suffix of at least one token")


@dataclass(frozen=True, slots=True)
class Segment:
    """Events that follow one prefix, in adjoining rows. No spans: nothing comes before them."""

    spans: Sequence[Span]
    events: Sequence[EventRows]

    @property
    def prefix_tokens(self) -> int:
        return sum(span.keys[0].shape[1] for span in self.spans)


@dataclass
class Capture:
    """Keys and values of a pass, per layer [H, R, D], contiguous. For sliding-window layers too:
    a cache object would drop what has left the window, which an event with a short suffix needs."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@dataclass
class Plan:
    """`positions` [R] are the rows' true positions; rows behind the last event are padding.

    In layer `last_layer` only the tail rows of the events need a result: what follows attention
    there is read nowhere else.
    """

    segments: Sequence[Segment]
    positions: Tensor
    backend: Backend
    last_layer: int | None = None
    capture: Capture | None = None
    memo: dict[Any, Any] = field(default_factory=dict)  # what back-ends derive once per pass

    @property
    def events(self) -> Iterator[EventRows]:
        return (event for segment in self.segments for event in segment.events)

    def first_query(self, event: EventRows, layer: int) -> int:
        return event.stop - event.tail if layer == self.last_layer else event.start

    def wanted_rows(self, layer: int) -> tuple[Tensor, int]:
        """Indices of the rows that a layer computes, filled up with row 0 to a whole tile; and
        how many of them are wanted."""
        memo = ("rows", layer == self.last_layer)
        if memo not in self.memo:
            index = [r for e in self.events for r in range(self.first_query(e, layer), e.stop)]
            filled = index + [0] * (-len(index) % self.backend.tile)
            self.memo[memo] = torch.tensor(filled, device=self.positions.device), len(index)
        rows, count = self.memo[memo]
        return rows, count

    def own_mask(self, event: EventRows, window: int | None) -> Tensor | None:
        """Which of its own rows each row of an event sees, [rows, rows]; None: plain causal."""
        rows = event.stop - event.start
        if window is None or rows <= window:
            return event.tree
        own = self.positions[event.start : event.stop]
        seen = causal(rows, own.device) if event.tree is None else event.tree
        return seen & (own[:, None] - own[None, :] < window)


@dataclass(frozen=True, slots=True)
class Head:
    """What a layer's attention does besides softmax(q k^T) v. `sinks` [H, G]: logits that take
    part in the denominator and have no value."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


class Backend(Protocol):
    """One way to compute attention over a plan."""

    @property
    def name(self) -> str:
        """Part of the numerics fingerprint; changes when bits may."""

    @property
    def kernels(self) -> Kernels | None:
        """Compiled ones for what surrounds attention, where they are to be used."""

    @property
    def tile(self) -> int:
        """Products over a multiple of so many rows give each row bits that depend on it alone."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, head: Head, plan: Plan, layer: int) -> Tensor:
        """q [H, G, R, D] over the plan's prefixes and k, v [H, R, D]: [H, G, R, D]. Rows that the
        plan does not ask for are 0."""


def causal(rows: int, device: torch.device) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
