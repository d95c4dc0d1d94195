"""A plain twin of `torch.nn.attention.varlen.varlen_attn`, by its documentation, for CPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from processor.engine.attend_plain import attend_plain
from processor.engine.plan import Head

BLOCK = 64


@dataclass
class Varlen:
    """What the kernel does not write is NaN here, so that a use of it shows. `calls`: the windows
    and bounds that were asked for."""

    heads_first: bool = True
    calls: list[tuple[tuple[int, int], int, int]] = field(default_factory=list)

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
        self.calls.append((window_size, max_q, max_k))
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert len(cu_seq_q) == len(cu_seq_k)
        assert max_q > 1
        assert window_size[0] < max_k
        names, heads = query.shape[1], key.shape[1]
        out = torch.full_like(query, float("nan"), memory_format=torch.contiguous_format)
        lse = torch.full(query.shape[:2], float("nan"))
        for (a, b), (c, d) in zip(
            pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True
        ):
            assert b - a <= max_q
            assert d - c <= max_k
            if a == b:
                continue
            seen = visible(b - a, d - c, window_size)
            k, v = key[c:d].transpose(0, 1), value[c:d].transpose(0, 1)
            for first in range(0, b - a, BLOCK):
                some = slice(first, min(first + BLOCK, b - a))
                place = slice(a + some.start, a + some.stop)
                q = query[place].transpose(0, 1).reshape(heads, names // heads, -1, query.shape[2])
                part, part_lse = _block(q, k, v, Head(scale), seen[some])
                out[place] = part.flatten(0, 1).transpose(0, 1).to(query.dtype)
                lse[place] = part_lse.flatten(0, 1).t()
        return out, lse.t().contiguous() if self.heads_first else lse


def _block(q: Tensor, k: Tensor, v: Tensor, head: Head, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of one block, filled up: as on a GPU, a row's bits then depend on it and its keys."""
    rows = q.shape[2]
    q = torch.nn.functional.pad(q, (0, 0, 0, BLOCK - rows))
    seen = torch.nn.functional.pad(seen, (0, 0, 0, BLOCK - rows))
    out, lse = attend_plain(q, k, v, head, seen)
    return out[:, :, :rows], lse[:, :, :rows]


def visible(rows: int, keys: int, window: tuple[int, int]) -> Tensor:
    """Aligned to the bottom right: row i stands at key i + keys - rows."""
    left, right = window
    at = [i + keys - rows for i in range(rows)]
    return torch.tensor(
        [
            [
                (left < 0 or key >= here - left) and (right < 0 or key <= here + right)
                for key in range(keys)
            ]
            for here in at
        ]
    )
