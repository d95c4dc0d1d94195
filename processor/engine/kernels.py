"""Compiling and loading `kernels.cpp`: once per machine, cached on disk, and never a failure where
there is no compiler.

Plain C functions through ctypes rather than a torch extension: they compile in seconds, need no
headers of torch, and one file serves every version of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from processor.engine.plan import KEY_BLOCK

SOURCE = Path(__file__).with_name("kernels.cpp")
# Contracting a * b + c to one instruction is GCC's default and wanted: it is what a matrix product
# consists of. Nothing that reorders sums (-ffast-math) may be here.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno")
_TIMEOUT_S = 120
_int, _ptr = ctypes.c_int64, ctypes.c_void_p


class CSpan(ctypes.Structure):
    _fields_ = (("k", _ptr), ("v", _ptr), ("n", _int))


class CEvent(ctypes.Structure):
    _fields_ = (
        ("first", _int),
        ("start", _int),
        ("stop", _int),
        ("spans", ctypes.POINTER(CSpan)),
        ("span_count", _int),
        ("tree", _ptr),
    )


class CAttention(ctypes.Structure):
    _fields_ = (
        *((name, _ptr) for name in ("q", "k", "v", "out")),
        *((name, _int) for name in ("q_head", "q_row", "k_head", "k_row", "v_head", "v_row")),
        *((name, _int) for name in ("H", "G", "D", "window")),
        ("scale", ctypes.c_float),
        ("sinks", _ptr),
        ("positions", _ptr),
        ("events", ctypes.POINTER(CEvent)),
        ("event_count", _int),
    )


@dataclass(frozen=True)
class Kernels:
    """The compiled functions. `identity` names source, flags, compiler and chip. All tensors are
    on the CPU and contiguous; fp32, and for what is element by element also bf16."""

    library: ctypes.CDLL
    identity: str

    @property
    def columns(self) -> int:
        """Columns of a packed panel."""
        return int(self.library.panel_columns())

    def pack(self, weight: Tensor) -> Tensor:
        """[N, K] to panels [ceil(N / columns), K, columns], filled up with 0."""
        wide = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % self.columns))
        return wide.view(-1, self.columns, weight.shape[1]).transpose(1, 2).contiguous()

    def linear(self, x: Tensor, panels: Tensor, bias: Tensor | None, columns: int) -> Tensor:
        """x [..., K] times packed weights: [..., columns]."""
        x = x.contiguous()
        depth = x.shape[-1]
        out = x.new_empty(*x.shape[:-1], columns)
        offset = None if bias is None else bias.data_ptr()
        self.library.linear(
            *map(_ptr, (x.data_ptr(), panels.data_ptr(), offset, out.data_ptr())),
            *map(_int, (x.numel() // depth, columns, depth)),
        )
        return out

    def gated_linear(self, x: Tensor, gate: Tensor, up: Tensor, columns: int) -> Tensor:
        """silu(x gate^T) * (x up^T), both weights packed: [..., columns]."""
        x = x.contiguous()
        depth = x.shape[-1]
        out = x.new_empty(*x.shape[:-1], columns)
        self.library.gated_linear(
            *map(_ptr, (x.data_ptr(), gate.data_ptr(), up.data_ptr(), out.data_ptr())),
            *map(_int, (x.numel() // depth, columns, depth)),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension."""
        x = x.contiguous()
        size, out = x.shape[-1], torch.empty_like(x)
        self.library.rms_norm(
            *map(_ptr, (x.data_ptr(), weight.data_ptr(), out.data_ptr())),
            *map(_int, (x.numel() // size, size)),
            ctypes.c_float(eps),
            ctypes.c_float(offset),
            _int(x.dtype == torch.bfloat16),
        )
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, written over `gate`."""
        narrow = _int(gate.dtype == torch.bfloat16)
        self.library.silu_mul(
            _ptr(gate.data_ptr()), _ptr(up.data_ptr()), _int(gate.numel()), narrow
        )
        return gate

    def attend(self, arguments: CAttention) -> None:
        self.library.attend(ctypes.byref(arguments))


def load_kernels(cache_dir: Path) -> Kernels | None:
    """Compile unless that was done before. None, with one warning, where it cannot be done."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        _warn("there is no C++ compiler (c++, g++ or $CXX)")
        return None
    return _load(cache_dir, compiler)


@cache
def _load(cache_dir: Path, compiler: str) -> Kernels | None:
    try:
        identity = _identity(compiler)
        file = cache_dir / "kernels" / f"{identity[:16]}.so"
        if not file.exists():
            _compile(compiler, file)
        try:
            library = ctypes.CDLL(str(file))
        except OSError:  # cut off by a crash or a full disk: once more
            _compile(compiler, file)
            library = ctypes.CDLL(str(file))
        return Kernels(library, identity)
    except (OSError, subprocess.SubprocessError) as error:
        detail = str(getattr(error, "stderr", None) or error)
        _warn(next(iter(detail.strip().splitlines()), type(error).__name__))
        return None


def _identity(compiler: str) -> str:
    """SHA-256 over what decides the compiled code; -march=native depends on the chip."""
    version = _run([compiler, "--version"])
    target = _run([compiler, "-march=native", "-Q", "--help=target"], check=False)
    digest = hashlib.sha256()
    chip = (platform.machine(), torch.backends.cpu.get_cpu_capability())
    for part in (SOURCE.read_text(), *FLAGS, str(KEY_BLOCK), *chip, version, target):
        digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
    return digest.hexdigest()


def _compile(compiler: str, file: Path) -> None:
    """Several processes may do this at once: each writes its own file and moves it there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        built = Path(folder) / file.name
        _run([compiler, *FLAGS, f"-DKEY_BLOCK={KEY_BLOCK}", str(SOURCE), "-o", str(built)])
        built.replace(file)


def _run(command: list[str], check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=check, timeout=_TIMEOUT_S)
    return done.stdout


def _warn(why: str) -> None:
    message = f"the compiled CPU kernels are not used, torch's own are (slower): {why}"
    warnings.warn(message, stacklevel=4)
