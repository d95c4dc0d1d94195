"""Choosing the dtype by measurement: chips differ by a factor of 100 in bf16."""

from __future__ import annotations

import time
import warnings

import torch

from processor.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SLOWER = 2.0  # an explicit choice that is this much slower than the best gets a warning


def choose_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype to run in, and a line that says why.

    `auto` times a small product in each dtype and takes the fastest; fp32 wins within 10 %, since
    it is the more exact. Raises `ConfigError` for a dtype that is none of the above.
    """
    if wanted != "auto" and wanted not in DTYPES:
        remedy = f"use auto, {', '.join(DTYPES)}"
        raise ConfigError("settings", "model.dtype", wanted, remedy)
    candidates = ["float32", "bfloat16"] + (["float16"] if wanted == "float16" else [])
    speeds = {name: product_flops(DTYPES[name], device) for name in candidates}
    best = max(speeds, key=lambda name: speeds[name] * (1.1 if name == "float32" else 1.0))
    chosen = best if wanted == "auto" else wanted
    shown = ", ".join(f"{name} {speed / 1e9:,.1f}" for name, speed in speeds.items())
    note = f"{chosen} (GFLOPS of a product on one thread: {shown})"
    if speeds[chosen] * _SLOWER < speeds[best]:
        warnings.warn(f"model.dtype = {wanted} is slow here: {note}", stacklevel=2)
    return DTYPES[chosen], note


def product_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a square product, the best of what fits in a tenth of a second: a reference loop
    does one in that time, a matrix unit hundreds. On a GPU the product is large, for a small one
    measures how long a launch takes.

    On one thread: the ratio between dtypes is what counts, and threads that wait for each other on
    a busy machine would hide it (1.4 against 0.9 GFLOPS were seen where 130 against 1 is true).
    """
    size = 256 if device.type == "cpu" else 4096
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.ones(size, size, dtype=dtype, device=device)
        (a @ a).sum().item()  # warm-up: kernel choice
        best, begun = float("inf"), time.perf_counter()
        while time.perf_counter() - begun < 0.1 or best == float("inf"):
            start = time.perf_counter()
            (a @ a).sum().item()
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / best
