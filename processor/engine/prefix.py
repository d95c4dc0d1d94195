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


@dataclass(frozen=True, eq=False)
class PrefixSpan:
    """The tokens of `path` from `start` on, where `path` is all tokens up to the span's end: keys
    and values depend on every one. `keys` and `values`: per layer [H, n, D], contiguous.
    `checksum` is theirs at capture."""

    path: tuple[int, ...]
    start: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    checksum: str

    @property
    def end(self) -> int:
        return len(self.path)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def check_integrity(self) -> bool:
        return self.checksum == checksum(self.keys, self.values)


@dataclass(frozen=True, eq=False)
class FrozenPrefix:
    """The spans of one policy's prefix. Each but the last is a whole number of blocks long, so
    that where it is cut shows in no bit; policies that begin with the same tokens share spans."""

    spans: tuple[PrefixSpan, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.spans[-1].path if self.spans else ()

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
    before = base[-1].path if base else ()
    capture = Capture()
    plan = Plan(
        [Segment(base, [EventRows(0, count)])],
        torch.arange(len(before), len(before) + len(ids), device=model.device),
        model.backend,
        capture=capture,
    )
    run_plan(model.body, model.tail, ids, plan)
    keys = tuple(t[:, :count].contiguous() for t in capture.keys)
    values = tuple(t[:, :count].contiguous() for t in capture.values)
    return PrefixSpan((*before, *token_ids), len(before), keys, values, "")


def join_spans(spans: Sequence[PrefixSpan]) -> PrefixSpan:
    """One span of adjoining ones."""
    keys = tuple(torch.cat(parts, 1) for parts in zip(*(s.keys for s in spans), strict=True))
    values = tuple(torch.cat(parts, 1) for parts in zip(*(s.values for s in spans), strict=True))
    return PrefixSpan(spans[-1].path, spans[0].start, keys, values, checksum(keys, values))


def copy_part(span: PrefixSpan, start: int, end: int) -> PrefixSpan:
    """A part of a span with storage of its own, which does not keep the rest in memory."""
    part = slice(start - span.start, end - span.start)
    keys, values = (
        tuple(t[:, part].clone(memory_format=torch.contiguous_format) for t in tensors)
        for tensors in (span.keys, span.values)
    )
    return PrefixSpan(span.path[:end], start, keys, values, checksum(keys, values))


def checksum(keys: Sequence[Tensor], values: Sequence[Tensor]) -> str:
    """SHA-256 over dtype, shape and bits of each tensor."""
    digest = hashlib.sha256()
    for tensor in (*keys, *values):
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
