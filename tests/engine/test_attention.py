"""The flash back-end against the plain one, and rows that see nothing."""

from __future__ import annotations

import pytest
import torch

from processor.engine.attention import _HIDDEN, ROW_TILE, Head, attend, attend_plain

H, G, D = 2, 3, 16
NOISE = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.01}


def tensors(rows: int, keys: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    shapes = ((H, G, rows, D), (H, keys, D), (H, keys, D))
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)


@pytest.mark.parametrize("dtype", list(NOISE))
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (7, 40), (64, 513), (193, 100)])
def test_flash_is_the_plain_one(rows: int, keys: int, dtype: torch.dtype) -> None:
    q, k, v = tensors(rows, keys, dtype)
    seen = torch.rand(rows, keys, generator=torch.Generator().manual_seed(1)) < 0.7
    seen[:, 0] = True
    seen[0] = False  # sees nothing: what its prefix has left the window looks like
    mask = torch.zeros(rows, keys).masked_fill(~seen, _HIDDEN)
    head = Head(scale=0.3)
    for options in ({}, {"mask": mask}, {"causal": True}):
        if options.get("causal") and rows != keys:
            continue
        out, lse = attend(q, k, v, head, **options)
        expected, expected_lse = attend_plain(q, k, v, head, **options)
        shown = slice(1, None) if "mask" in options else slice(None)
        torch.testing.assert_close(
            out[:, :, shown], expected[:, :, shown], atol=NOISE[dtype], rtol=0
        )
        torch.testing.assert_close(
            lse[:, :, shown], expected_lse[:, :, shown], atol=NOISE[dtype], rtol=1e-2
        )
        if "mask" in options:  # of no weight in any merge, and finite
            assert bool((lse[:, :, 0] < -1e4).all())
            assert bool(out.isfinite().all())


def test_rows_of_whole_tiles_have_equal_bits() -> None:
    q, k, v = tensors(5 * ROW_TILE, 700, torch.float32)
    head = Head(scale=0.2)
    whole = attend(q, k, v, head)
    for start in (0, ROW_TILE, 3 * ROW_TILE):
        rows = slice(start, start + ROW_TILE)
        part = attend(q[:, :, rows], k, v, head)
        assert torch.equal(part[0], whole[0][:, :, rows])
        assert torch.equal(part[1], whole[1][:, :, rows])
