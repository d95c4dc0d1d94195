"""What one event costs in floating-point operations, and what a frozen prefix can gain at best.

The count is that of a dense decoder: two operations per linear weight and token, and in attention
4 * heads * head_dim per pair of query and key (scores and weighted sum). Norms, activations and
softmax are left out: they are operations of another kind, and below a percent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. `linear_weights`: weights of its linear layers, without embeddings and
    without the head. `hidden`: size of a token's state."""

    layers: int
    heads: int
    head_dim: int
    hidden: int
    linear_weights: int


def event_flops(shape: Shape, prefix: int, suffix: int, labels: int) -> float:
    """FLOPs of one event behind a frozen prefix: its `suffix` tokens, `labels` rows of the head."""
    pairs = suffix * prefix + suffix * (suffix + 1) / 2
    return _flops(shape, suffix, pairs, labels)


def full_flops(shape: Shape, tokens: int, labels: int) -> float:
    """FLOPs of one event whose whole prompt, `tokens` long, is computed."""
    return _flops(shape, tokens, tokens * (tokens + 1) / 2, labels)


def ideal_gain(shape: Shape, prefix: int, suffix: int, labels: int) -> float:
    """How much faster a frozen prefix makes an event on a chip that works equally fast on both."""
    return full_flops(shape, prefix + suffix, labels) / event_flops(shape, prefix, suffix, labels)


def _flops(shape: Shape, tokens: int, pairs: float, labels: int) -> float:
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return 2 * shape.linear_weights * tokens + attention + 2 * shape.hidden * labels
