"""The frozen prefix: keys and values of a policy's first tokens, computed once, only read later."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from processor.engine.attention import Capture
from processor.engine.model import LoadedModel


@dataclass(frozen=True)
class FrozenPrefix:
    """`keys` and `values`: per layer [H, P, D], contiguous. `checksum` is theirs at capture."""

    token_ids: tuple[int, ...]
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    checksum: str

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def check_integrity(self) -> bool:
        """Whether every bit is as captured. A stored cache that a later request wrote to is the
        commonest failure of prefix reuse in public (transformers #37078, vllm-mlx #380)."""
        return self.checksum == _checksum(self.keys, self.values)


def capture_prefix(model: LoadedModel, token_ids: Sequence[int]) -> FrozenPrefix:
    """Run the prefix through the model once and keep its keys and values."""
    capture = Capture()
    ids = torch.tensor([list(token_ids)], device=model.device)
    with torch.inference_mode():
        model.body(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1], device=model.device)[None],
            use_cache=False,
            prefix_plan=capture,
        )
    keys, values = tuple(capture.keys), tuple(capture.values)
    return FrozenPrefix(tuple(token_ids), keys, values, _checksum(keys, values))


def _checksum(keys: Sequence[Tensor], values: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in (*keys, *values):
        digest.update(tensor.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
