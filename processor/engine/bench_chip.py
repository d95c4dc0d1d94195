"""What `processor bench` asks of the chip: its name, its memory, and its best matrix product."""

from __future__ import annotations

import math
import platform
import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from processor.engine.model import LoadedModel

FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
_LEAST_SECONDS = (
    2e-3  # a product is repeated until it takes as long: launches and clocks are coarse
)
_CPU_SQUARES, _GPU_SQUARES = (1024, 2048), (4096, 8192)


@dataclass(frozen=True)
class Product:
    """A matrix product, ready to be run: `run` returns when it is done. `flops`: of one run."""

    flops: float
    run: Callable[[], None]


def chip_name(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The GPU's name, or the CPU's with the instruction sets that decide how fast products are."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        text = cpuinfo.read_text()
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    listed = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = listed[1].split() if listed else []
    known = [flag for flag in FLAGS if flag in flags]
    return " ".join([name[1].strip() if name else platform.machine(), f"({', '.join(known)})"])


def peak_rss() -> int:
    """The most memory that this process ever held, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if platform.system() == "Darwin" else used * 1024


def peak_cuda(device: torch.device) -> int | None:
    """The most GPU memory that tensors ever took, in bytes; None without a GPU."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def threads() -> int:
    return torch.get_num_threads()


def model_shape(model: PreTrainedModel) -> dict[str, int]:
    """The fields of `bench.flops.Shape`. A linear layer is what has `in_features` and
    `out_features`, torch's or ours."""
    config: Any = model.config
    heads = int(config.num_attention_heads)
    linears = [sizes for m in model.base_model.modules() if (sizes := _sizes(m)) is not None]
    return {
        "layers": int(config.num_hidden_layers),
        "heads": heads,
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        "hidden": int(config.hidden_size),
        "linear_weights": sum(inputs * outputs for inputs, outputs in linears),
    }


def _sizes(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer; None for another module."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return None if None in sizes else (int(sizes[0] or 0), int(sizes[1] or 0))


def uncounted(stock: PreTrainedModel) -> list[str]:
    """What about this model the count of FLOPs gets wrong, as notes."""
    config: Any = stock.config
    notes = []
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        notes.append("sliding-window layers are counted as full attention")
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        notes.append("the weights of experts are not counted")
    return notes


def products(
    loaded: LoadedModel, stock: PreTrainedModel, rows: int, squares: tuple[int, ...] = ()
) -> dict[str, Product]:
    """Products to find the chip's peak with, in the model's dtype: each shape of linear layer over
    `rows` rows, by torch and by our kernels where the model runs on them, and square ones."""
    device, dtype = stock.device, stock.dtype
    cuda = device.type == "cuda"
    found: dict[str, Product] = {}
    for owner, model in (("torch", stock), ("ours", loaded.model)):
        for module in model.base_model.modules():
            sizes = _sizes(module)
            if sizes is None or (owner == "ours" and isinstance(module, torch.nn.Linear)):
                continue
            name = f"{owner} {rows}x{sizes[0]}x{sizes[1]}"
            if name not in found:
                x = torch.randn(1, rows, sizes[0], dtype=dtype, device=device)
                found[name] = _product(2.0 * rows * sizes[0] * sizes[1], module, x, device)
    for size in squares or (_GPU_SQUARES if cuda else _CPU_SQUARES):
        a = torch.randn(size, size, dtype=dtype, device=device)
        found[f"torch {size}x{size}x{size}"] = _product(2.0 * size**3, a.matmul, a, device)
    return found


def _product(
    flops: float, function: Callable[..., Any], x: torch.Tensor, device: torch.device
) -> Product:
    def run(times: int = 1) -> None:
        with torch.inference_mode():
            for _ in range(times):
                function(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()  # kernel choice
    begun = time.perf_counter()
    run()
    seconds = max(time.perf_counter() - begun, 1e-6)
    times = max(1, math.ceil(_LEAST_SECONDS / seconds))
    return Product(flops * times, lambda: run(times))
