"""One pass of the decoder over the rows of a plan.

In the last layer only the tail rows of each event are read later, so its attention, output
projection and MLP run over these alone. That is exact, and saves most of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from processor.engine.plan import Plan


class TailRows:
    """The rows that the row-wise modules of the last layer compute; None: all."""

    def __init__(self) -> None:
        self.wanted: tuple[Tensor, int] | None = None

    @contextmanager
    def of(self, plan: Plan) -> Iterator[None]:
        before = self.wanted
        self.wanted = None if plan.last_layer is None else plan.wanted_rows(plan.last_layer)
        try:
            yield
        finally:
            self.wanted = before


def _tail_only(inner: Callable[..., Any], tail: TailRows) -> Callable[..., Any]:
    """A row-wise function of [1, R, d], applied to the wanted rows; the others get 0."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tail.wanted is None:
            return inner(x, *args, **kwargs)
        rows, count = tail.wanted
        some = inner(x[:, rows], *args, **kwargs)
        if isinstance(some, tuple):  # a mixture of experts gives its routing too
            return _spread(some[0], x, rows[:count]), *some[1:]
        return _spread(some, x, rows[:count])

    return forward


def _spread(some: Tensor, like: Tensor, rows: Tensor) -> Tensor:
    out = some.new_zeros(1, like.shape[1], some.shape[2])
    out[:, rows] = some[:, : len(rows)]
    return out


def install_tail(model: PreTrainedModel) -> tuple[TailRows, int | None]:
    """Change the row-wise modules of the last layer that come after its attention. Returns the
    handle that chooses rows, and the layer's index; None where the decoder has no such layer."""
    tail = TailRows()
    body: Any = model.base_model
    last = body.layers[-1]
    attention = last.self_attn
    outputs = [name for name in ("o_proj", "dense") if hasattr(attention, name)]
    if len(outputs) != 1 or not hasattr(last, "mlp"):
        return tail, None
    for module in (getattr(attention, outputs[0]), last.mlp):
        module.forward = _tail_only(module.forward, tail)
    return tail, int(attention.layer_idx)


def run_plan(body: Any, tail: TailRows, ids: Sequence[int], plan: Plan) -> Tensor:
    """Last hidden states [R, d] of the rows `ids` [R]; in the last layer's terms, of tail rows.
    Read them before the next pass: a captured graph writes them to the same place each time."""
    graphed = getattr(plan.backend, "graphed", None)
    hidden: Tensor = (run_eagerly if graphed is None else graphed)(body, tail, ids, plan)
    return hidden


def run_eagerly(body: Any, tail: TailRows, ids: Sequence[int], plan: Plan) -> Tensor:
    """`run_plan`, one operation after the other."""
    return run_rows(body, tail, torch.tensor([list(ids)], device=plan.positions.device), plan)


def run_rows(body: Any, tail: TailRows, ids: Tensor, plan: Plan) -> Tensor:
    """`run_plan` for `ids` [1, R] on the device."""
    with tail.of(plan):
        out = body(
            input_ids=ids,
            position_ids=plan.positions[None],
            use_cache=False,
            prefix_plan=plan,
        )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden
