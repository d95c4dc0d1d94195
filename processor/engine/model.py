"""Loading a causal language model: weights, tokenizer, dtype, device, and what identifies them."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from processor.config import ModelSettings
from processor.engine import attention
from processor.engine.backend import choose_backend
from processor.engine.dtype import choose_dtype
from processor.engine.forward import TailRows, install_tail
from processor.engine.fuse import Switch, fuse
from processor.engine.plan import LOOSE_TILE, TILE, Backend
from processor.engine.source import config_errors, find_weights
from processor.errors import ConfigError

# Decoders that were tested against the whole prompt (tests/engine/test_architectures.py builds a
# tiny random one of each). What is left out carries recurrent state, bypasses the attention
# interface, transforms its head in a way not covered here, or was not tried.
SUPPORTED = frozenset(
    {
        *("arcee", "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
        *("gpt_oss", "granite", "helium", "llama", "ministral", "mistral", "olmo", "olmo2"),
        *("olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"),
        "starcoder2",
    }
)
# Angles that depend on the longest position in the batch would let one event change another.
BATCH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to capture prefixes and score; everything is in eval mode."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    numerics: str
    dtype_note: str
    backend: Backend
    switch: Switch
    tail: TailRows
    last_layer: int | None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def window(self) -> int:
        """The most tokens of prefix and suffix together."""
        return int(self.model.config.max_position_embeddings)

    @property
    def body(self) -> Any:
        """The decoder without its head: (input_ids, ...) -> last_hidden_state [1, R, d]."""
        return self.model.base_model

    @contextmanager
    def stock(self, implementation: str = "eager") -> Iterator[None]:
        """transformers' own attention and torch's own products for a while: the reference."""
        self.model.set_attn_implementation(implementation)
        try:
            with self.switch.off():
                yield
        finally:
            self.model.set_attn_implementation(attention.NAME)

    def label_head(self, token_ids: list[int] | slice) -> Callable[[Tensor], Tensor]:
        """fp32 logits of some tokens: hidden [N, d] -> [N, tokens].

        Only these rows of the head are multiplied; its bias, soft cap (gemma2) and scale
        (granite divides, cohere multiplies) are kept.
        """
        model: Any = self.model
        head = model.get_output_embeddings()
        weight = head.weight[token_ids].float()
        bias = None if getattr(head, "bias", None) is None else head.bias[token_ids].float()
        config = self.model.config
        cap = getattr(config, "final_logit_softcapping", None)
        scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)

        def logits(hidden: Tensor) -> Tensor:
            out = torch.nn.functional.linear(hidden.float(), weight, bias) * scale
            return out if cap is None else cap * torch.tanh(out / cap)

        return logits


def load_model(
    source: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path,
    threads: int = 0,
    kernels: str = "auto",
    revision: str | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> LoadedModel:
    """Load weights from the packaged default (`smollm2`), a local folder, a GGUF file or a hub id.

    Raises `ConfigError` for a source that cannot be found or a model that cannot be served.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if threads:
        torch.set_num_threads(threads)
    place = _device(device)
    progress("finding weights")
    folder = find_weights(source, cache_dir, revision, progress)
    with config_errors(source):
        _refuse_unsupported(source, AutoConfig.from_pretrained(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    progress("choosing the dtype")
    chosen, note = choose_dtype(dtype, place)
    progress("loading weights")
    with config_errors(source):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=chosen,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            output_loading_info=True,
        )
    model, info = loaded
    # transformers fills what a checkpoint lacks with random numbers and a warning.
    if lacking := [*info["missing_keys"], *map(str, info["mismatched_keys"])]:
        remedy = f"no causal language model: {lacking[0]} and {len(lacking) - 1} more are missing"
        raise ConfigError("settings", "model.source", source, remedy)
    progress("hashing weights")
    name = Path(source).name if Path(source).expanduser().exists() else source
    fingerprint = fingerprint_folder(folder)
    model = model.to(place)
    backend = choose_backend(model, kernels, cache_dir)
    return prepare_model(model, tokenizer, name, fingerprint, note, backend)


def load_configured(
    model: ModelSettings, progress: Callable[[str], None] = lambda stage: None
) -> LoadedModel:
    """`load_model` as the settings say."""
    return load_model(
        model.source,
        dtype=model.dtype,
        device=model.device,
        cache_dir=model.cache_dir,
        threads=model.threads,
        kernels=model.kernels,
        revision=model.revision,
        progress=progress,
    )


def prepare_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    fingerprint: str,
    dtype_note: str,
    backend: Backend,
) -> LoadedModel:
    """Make a model ready: eval mode, our attention, its back-end, and a last layer that computes
    wanted rows only. Asserts that attention was switched: transformers only warns where a modeling
    file does not use the interface."""
    model.set_attn_implementation(attention.NAME)
    if model.config._attn_implementation != attention.NAME:
        raise ConfigError("settings", "model.source", model.config.model_type, "no attention hook")
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    switch = fuse(model, backend.kernels) if backend.kernels else Switch()
    if backend.tile == LOOSE_TILE and not switch.whole:
        backend = replace(backend, tile=TILE)  # type: ignore[type-var]
    tail, last_layer = install_tail(model)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        numerics=fingerprint_numerics(model, backend),
        dtype_note=dtype_note,
        backend=backend,
        switch=switch,
        tail=tail,
        last_layer=last_layer,
    )


def _refuse_unsupported(source: str, config: Any) -> None:
    kind = config.model_type
    if kind not in SUPPORTED:
        known = ", ".join(sorted(SUPPORTED))
        remedy = f"architecture {kind!r} is not supported; use one of: {known}"
        raise ConfigError("settings", "model.source", source, remedy)
    ropes = _rope_types(getattr(config, "rope_parameters", None))
    if bad := ropes & BATCH_DEPENDENT_ROPE:
        remedy = f"RoPE type {bad.pop()!r} gives angles that depend on the batch; use another model"
        raise ConfigError("settings", "model.source", source, remedy)
    if getattr(config, "use_bidirectional_attention", False):
        raise ConfigError("settings", "model.source", source, "not a causal model")


def _rope_types(parameters: Any) -> set[str]:
    """RoPE types in a config's `rope_parameters`, which may be nested by layer type."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values()]
    own = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return own.union(*nested)


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("settings", "model.device", device, "no CUDA device: use auto or cpu")
    return torch.device(device)


def fingerprint_folder(folder: Path) -> str:
    """SHA-256 over the names and contents of configuration, weights and tokenizer."""
    digest = hashlib.sha256()
    kinds = {".json", ".safetensors", ".model", ".txt", ".jinja"}
    for file in sorted(f for f in folder.iterdir() if f.suffix in kinds):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").digest()
        name = file.name.encode()
        digest.update(len(name).to_bytes(8, "big") + name + content)
    return digest.hexdigest()


def fingerprint_numerics(model: PreTrainedModel, backend: Backend) -> str:
    """SHA-256 over what decides bits besides the weights: equal bits are promised within one."""
    chip = (
        torch.cuda.get_device_name(model.device)
        if model.device.type == "cuda"
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )
    facts = {
        "attention": backend.name,
        "tile": backend.tile,
        "chip": chip,
        "device": model.device.type,
        "dtype": str(model.dtype),
        "threads": torch.get_num_threads(),
        "tokenizers": tokenizers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
