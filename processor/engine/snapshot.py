"""Captured spans on disk: a restart maps them into memory instead of running the model.

A snapshot is never needed: whatever is wrong with a file or its folder, the span is captured anew
and written again. Files are replaced as a whole, never changed, so several processes may read and
write one folder; whoever comes last wins, with the same bits. On CPUs the tensors stay in the
mapped file: processes on one machine share the memory, and as the mapping is private, no write to
a tensor could reach the file. A file that something else shortens in place would end the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from processor.engine.model import LoadedModel
from processor.engine.plan import KEY_BLOCK
from processor.engine.prefix import PrefixSpan, checksum

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 64  # bytes, as torch's allocator gives: matrix libraries may round by it


class Snapshots:
    """The snapshots of one model in a folder; those of other models there are left alone."""

    def __init__(self, folder: Path, model: LoadedModel) -> None:
        self._folder = folder
        self._model = model
        self._warned: set[str] = set()

    def load(self, path: tuple[int, ...], start: int, scope: str) -> PrefixSpan | None:
        """The span of tokens `start` to the end of `path`; None if there is no good file of it."""
        identity = self._identity(path, start, scope)
        file = self._file(identity)
        try:
            with safe_open(file, "pt") as content:
                span = self._read(content, identity, path, start)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            self._warn("read", file, error)
            return None
        with suppress(OSError):
            os.utime(file)  # what `prune` goes by
        return span

    def save(self, span: PrefixSpan, scope: str) -> None:
        """Write a span; a failure is a warning."""
        identity = self._identity(span.path, span.start, scope)
        file = self._file(identity)
        try:
            _write(file, identity, span)
        except OSError as error:
            self._warn("write", file, error)

    def prune(self, days: float) -> int:
        """Delete what was not used for so long, of this model or another. Returns the count."""
        count = 0
        for file in self._folder.glob("*.safetensors*"):
            with suppress(OSError):  # another process was first, say
                if file.stat().st_mtime < time.time() - days * 86400:
                    file.unlink()
                    count += 1
        return count

    def _read(
        self, content: Any, identity: dict[str, Any], path: tuple[int, ...], start: int
    ) -> PrefixSpan:
        """Raises `ValueError` unless all is as it was written, by this model, for these tokens."""
        metadata = content.metadata() or {}
        if json.loads(metadata["identity"]) != identity:
            raise ValueError("it holds another span")
        config = self._model.model.config
        layers = int(config.num_hidden_layers)
        tensors = [_aligned(content.get_tensor(name)) for name in _names(layers)]
        for tensor in tensors:
            if tensor.shape[:2] != (config.num_key_value_heads, len(path) - start):
                raise ValueError(f"it holds tensors of shape {list(tensor.shape)}")
            if tensor.dtype != self._model.model.dtype:
                raise ValueError(f"it holds tensors of {tensor.dtype}")
        keys, values = tensors[:layers], tensors[layers:]
        if checksum(keys, values) != metadata["checksum"]:
            raise ValueError("its content does not match its checksum")
        keys, values = ([t.to(self._model.device) for t in part] for part in (keys, values))
        return PrefixSpan(path, start, tuple(keys), tuple(values), metadata["checksum"])

    def _identity(self, path: tuple[int, ...], start: int, scope: str) -> dict[str, Any]:
        """All that decides the bits of a span, and who may know that it exists. The tokenizer's
        content is in the model's fingerprint."""
        tokenizer = self._model.tokenizer
        return {
            "format": f"1, captured in blocks of {KEY_BLOCK}",
            "model": self._model.fingerprint,
            "tokenizer": f"{type(tokenizer).__name__} of {len(tokenizer)}",
            "dtype": str(self._model.model.dtype),
            "numerics": self._model.numerics,
            "scope": scope,
            "start": start,
            "tokens": list(path),
        }

    def _file(self, identity: dict[str, Any]) -> Path:
        return self._folder / f"{digest(identity)}.safetensors"

    def _warn(self, kind: str, file: Path, error: Exception) -> None:
        """Once of a kind: a full disk would say the same of every policy."""
        if kind not in self._warned:
            self._warned.add(kind)
            message = f"cannot {kind} prefix snapshot {file}, capturing anew: {error}"
            warnings.warn(message, stacklevel=3)


def digest(identity: dict[str, Any]) -> str:
    """SHA-256 over the length-framed fields."""
    found = hashlib.sha256()
    for key, value in identity.items():
        for part in (key.encode(), json.dumps(value).encode()):
            found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


def _names(layers: int) -> list[str]:
    """In the order of the file and of the checksum, which so reads from front to back."""
    return [f"{kind}.{layer:04}" for kind in ("keys", "values") for layer in range(layers)]


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _write(file: Path, identity: dict[str, Any], span: PrefixSpan) -> None:
    """Atomically. Readable by its owner alone: a prefix can be guessed from its values."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = [*span.keys, *span.values]
    metadata = {"identity": json.dumps(identity), "checksum": span.checksum}
    handle, temporary = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(_header(metadata, tensors))
            for tensor in tensors:
                stream.write(tensor.cpu().view(torch.uint8).numpy().data)
            stream.flush()
            os.fsync(handle)
        os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _header(metadata: dict[str, str], tensors: Sequence[Tensor]) -> bytes:
    """A safetensors header (length, JSON, filled up with spaces); the library's own writer would
    start the data at a multiple of 8 bytes only, and copies it once."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in zip(_names(len(tensors) // 2), tensors, strict=True):
        offsets = [at, at := at + tensor.nbytes]
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
