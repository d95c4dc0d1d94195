"""Tiny random models and a tiny tokenizer: every architecture that the engine serves, in
milliseconds and without a file from elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from processor.config import load_settings
from processor.engine.backend import choose_backend
from processor.engine.model import LoadedModel, prepare_model
from processor.engine.plan import Backend

CORPUS = [
    "Approve the order unless a rule below says otherwise. Decision: approve decline review",
    '{"amount":12.5,"country":"NL","items":["book","lamp"],"text":"hello world, see you"}',
    "events.find events.buy movies.find movies.showtimes approve_with_review Label: fraud ok",
    "system user assistant Event: Order: Message: Query: 0123456789",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WINDOW = 12
CACHE = load_settings(None, {}).model.cache_dir
CONTEXT = 1024

_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What makes an architecture special must be on, or the test would not see it.
SPECIAL_FEATURES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": None},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": 3, "layer_types": None},
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 5,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_oss": {
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,  # all: a choice among experts would jump with the last bit
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granite": {
        "attention_multiplier": 0.7,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "ministral": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral": {"sliding_window": WINDOW},
    "olmo3": {"sliding_window": WINDOW, "layer_types": None},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "starcoder2": {"sliding_window": WINDOW},
}


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=508,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    build: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = build(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )
    # An added token that is not special, as Qwen's <tool_call>: a second way into control.
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    return tokenizer


def tiny_config(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **(_BASE | SPECIAL_FEATURES.get(kind, {}) | changes))


def tiny_model(
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    backend: Backend | None = None,
    **changes: Any,
) -> LoadedModel:
    model = random_model(kind, seed, **changes).to(dtype)
    backend = backend or choose_backend(model, "auto", CACHE)
    name = f"tiny-{kind}"
    return prepare_model(model, tiny_tokenizer(), name, "0" * 64, "", backend)


def random_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    build: Any = AutoModelForCausalLM
    model = build.from_config(tiny_config(kind, **changes))
    if kind == "gpt_oss":  # uninitialised in a random model, and a sink of 0 hardly shows
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def save_tiny_model(folder: Path, **changes: Any) -> Path:
    """A model folder as a hub id would give one."""
    random_model("llama", **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
