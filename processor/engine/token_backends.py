"""Copies of a model's tokenizer: one for prompts as the model makes them, one for event text.

Copies, because the originals hold shared state: a flag that another thread may flip (transformers
#47085), and truncation and padding that a fine-tuning run left in `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from processor.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Backends:
    """`whole` reads control tokens in a text, `events` knows none. `controls`: ids that event text
    must not give. `bos`: what the tokenizer puts in front of every text."""

    source: PreTrainedTokenizerBase
    whole: Backend
    events: Backend
    controls: frozenset[int]
    bos: tuple[int, ...]


def copy_backends(tokenizer: PreTrainedTokenizerBase) -> Backends:
    """Raises `ConfigError` for a tokenizer that would let event text leave its JSON string."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    whole = _plain(Backend.from_str(json.dumps(content)))
    events = _event_backend(content)
    if events.normalizer is not None and '"' in events.normalizer.normalize_str("＂"):
        remedy = "its tokenizer turns other characters into quotes, so an event could forge fields"
        raise ConfigError("settings", "model.source", tokenizer.name_or_path, remedy)
    return Backends(tokenizer, whole, events, _control_ids(tokenizer), _bos(tokenizer))


def _event_backend(content: dict[str, Any]) -> Backend:
    """Every added token is marked as special: the flag leaves the others alone, and
    "<tool_call>" in an event must be eleven characters as much as "<|im_end|>". Suffixes do not
    begin a text, so what tokenizers put in front of one (a space, mostly) is left out."""
    changes = {
        "added_tokens": [token | {"special": True} for token in content["added_tokens"]],
        "post_processor": None,
        "pre_tokenizer": _never_prepend(content["pre_tokenizer"]),
        "normalizer": _never_prepend(content["normalizer"]),
    }
    backend = _plain(Backend.from_str(json.dumps(content | changes)))
    backend.encode_special_tokens = True
    return backend


def _plain(backend: Backend) -> Backend:
    backend.no_truncation()
    backend.no_padding()
    return backend


def _control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of all added tokens but runs of white space, which mean nothing but themselves."""
    return frozenset(
        index for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()
    )


def _bos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts behind a text is not wanted in front of a label."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    dressed = tokenizer.encode("a", add_special_tokens=True)
    return tuple(dressed[: dressed.index(bare[0])]) if bare and bare[0] in dressed else ()


def _never_prepend(part: Any) -> Any:
    """A (pre-)tokenizer's JSON without the space that it puts in front of a text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence":
        name = "pretokenizers" if "pretokenizers" in part else "normalizers"
        return part | {name: list(_kept(part[name]))}
    if part.get("type") == "Prepend":
        return None
    changes: dict[str, Any] = {"prepend_scheme": "never"} if "prepend_scheme" in part else {}
    if part.get("type") == "ByteLevel":
        changes["add_prefix_space"] = False
    return part | changes


def _kept(parts: Sequence[Any]) -> Iterator[Any]:
    return (kept for part in parts if (kept := _never_prepend(part)) is not None)
