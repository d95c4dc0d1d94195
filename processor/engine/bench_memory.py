"""The memory that this process holds now, and a wait for what the device still does."""

from __future__ import annotations

import resource

import torch


def memory(device: torch.device) -> dict[str, int]:
    """Bytes: resident set, and what torch has allocated and reserved on a GPU (0 without one)."""
    cuda = device.type == "cuda"
    return {
        "rss": _rss(),
        "cuda_allocated": int(torch.cuda.memory_allocated(device)) if cuda else 0,
        "cuda_reserved": int(torch.cuda.memory_reserved(device)) if cuda else 0,
    }


def _rss() -> int:
    """0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
