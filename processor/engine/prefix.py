"""The frozen prefix: keys and values of a policy's first tokens, computed once, only read later."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from processor.engine.forward import run_plan
from processor.engine.model import LoadedModel
from processor.engine.plan import KEY_BLOCK, Capture, EventRows, Plan, Segment


@dataclass(frozen=True)
class PrefixSpan:
    """A run of prefix tokens. `keys` and `values`: per layer [H, n, D], contiguous. `checksum` is
    theirs at capture."""

    token_ids: tuple[int, ...]
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    checksum: str

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def check_integrity(self) -> bool:
        return self.checksum == _checksum(self.keys, self.values)


@dataclass(frozen=True)
class FrozenPrefix:
    """The spans of one policy's prefix. Each but the last is a whole number of blocks long, so
    that where it is cut shows in no bit; policies that begin with the same tokens share spans."""

    spans: tuple[PrefixSpan, ...]

    def __len__(self) -> int:
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for span in self.spans for token in span.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of all its spans, shared ones included."""
        return sum(span.nbytes for span in self.spans)

    def check_integrity(self) -> bool:
        """Whether every bit is as captured. A stored cache that a later request wrote to is the
        commonest failure of prefix reuse in public (transformers #37078, vllm-mlx #380)."""
        return all(span.check_integrity() for span in self.spans)


def capture_prefix(model: LoadedModel, token_ids: Sequence[int]) -> FrozenPrefix:
    """Run the prefix through the model once and keep its keys and values."""
    steps = list(capture_steps(model, (), token_ids))
    return FrozenPrefix((join_spans(steps),))


def capture_steps(
    model: LoadedModel, base: Sequence[PrefixSpan], token_ids: Sequence[int]
) -> Iterator[PrefixSpan]:
    """Capture the tokens that follow `base`, one block of `KEY_BLOCK` tokens at a time.

    Blocks lie on a fixed grid, so that a token's keys and values have the same bits whether what
    comes before it was captured for the same policy or for another; and the caller may score
    events between two steps.
    """
    spans = list(base)
    for start in range(0, len(token_ids), KEY_BLOCK):
        span = _capture_block(model, spans, token_ids[start : start + KEY_BLOCK])
        spans.append(span)
        yield span


@torch.inference_mode()
def _capture_block(
    model: LoadedModel, base: Sequence[PrefixSpan], token_ids: Sequence[int]
) -> PrefixSpan:
    count = len(token_ids)
    ids = [*token_ids, *[0] * (-count % model.backend.tile)]
    first = sum(len(span.token_ids) for span in base)
    capture = Capture()
    plan = Plan(
        [Segment(base, [EventRows(0, count)])],
        torch.arange(first, first + len(ids), device=model.device),
        model.backend,
        capture=capture,
    )
    run_plan(model.body, model.tail, ids, plan)
    keys = tuple(t[:, :count].contiguous() for t in capture.keys)
    values = tuple(t[:, :count].contiguous() for t in capture.values)
    return PrefixSpan(tuple(token_ids), keys, values, "")


def join_spans(spans: Sequence[PrefixSpan]) -> PrefixSpan:
    """One span of adjoining ones."""
    keys = tuple(torch.cat(parts, 1) for parts in zip(*(s.keys for s in spans), strict=True))
    values = tuple(torch.cat(parts, 1) for parts in zip(*(s.values for s in spans), strict=True))
    ids = tuple(token for span in spans for token in span.token_ids)
    return PrefixSpan(ids, keys, values, _checksum(keys, values))


def _checksum(keys: Sequence[Tensor], values: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in (*keys, *values):
        digest.update(tensor.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
