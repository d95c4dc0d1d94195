"""How a policy's prompt is put together for one tokenizer, and where the prefix is cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from processor.core.policy import Policy
from processor.errors import ConfigError

_EVENT = "\u2063event\u2063"  # stands for the event while a chat template is rendered
# Texts that begin and end with what tokenizers like to merge: digits, spaces, letters, marks.
PROBES = (
    '{"text":"hello"}',
    '{"amount":1234.5,"items":[1,2]}',
    '{"a":" leading","b":"trailing "}',
    '{"emoji":"😀","mark":"e\u0301","cjk":"日本"}',
    '{"nested":{"x":null,"y":[]}}',
)


@dataclass(frozen=True, slots=True)
class PromptText:
    """The literal text around an event: before it, after it, and between it and the label."""

    head: str
    tail: str
    before_label: str
    adds_bos: bool


def prompt_text(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> PromptText:
    """Raises `ConfigError` where style `chat` meets a tokenizer without a chat template."""
    prompt = policy.spec.prompt
    if prompt.style == "plain":
        head = f"{policy.prefix}\n\n{prompt.lead}"
        return PromptText(head, f"\n{prompt.cue}", " ", adds_bos=True)
    if not tokenizer.chat_template:
        remedy = "this model has no chat template: use plain"
        raise ConfigError(str(policy.path), "prompt.style", "chat", remedy)
    messages = [
        {"role": "system", "content": policy.prefix},
        {"role": "user", "content": prompt.lead + _EVENT},
    ]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    head, found, tail = text.partition(_EVENT)
    if not found or policy.prefix not in head:
        remedy = "the model's chat template drops the system or user message: use plain"
        raise ConfigError(str(policy.path), "prompt.style", "chat", remedy)
    return PromptText(head, tail, "", adds_bos=False)


def event_backend(tokenizer: PreTrainedTokenizerBase) -> Backend:
    """A tokenizer for text that comes from events: it knows no control token.

    A copy, because the flag is shared state in the original (transformers #47085), with every
    added token marked as special: the flag leaves the others alone, and "<tool_call>" in an event
    must be eleven characters as much as "<|im_end|>". Suffixes do not begin a text, so what
    tokenizers put in front of one (a space, mostly) is left out.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = True
    content["post_processor"] = None
    content["pre_tokenizer"] = _never_prepend(content["pre_tokenizer"])
    content["normalizer"] = _never_prepend(content["normalizer"])
    backend = Backend.from_str(json.dumps(content))
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of all added tokens but runs of white space, which mean nothing but themselves."""
    return frozenset(
        index for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """The prefix's tokens, the text between them and the event, and what follows the event:
    text that is tokenized with it, then fixed tokens."""

    prefix_ids: tuple[int, ...]
    lead: str
    tail: str
    tail_ids: tuple[int, ...]


def cut_prefix(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, text: PromptText, events: Backend
) -> Cut:
    """Cut as late as the tokenizer allows without changing a token.

    In general tokens(a + b) is not tokens(a) + tokens(b). The cut begins where the prompts of the
    probes begin to differ and moves back until each whole prompt is the prefix's tokens followed
    by the suffix's. Raises `ConfigError` where there is no such place near the end.
    """
    tail, tail_ids = _split_tail(tokenizer, text.tail)
    whole = [full_ids(tokenizer, text, probe) for probe in PROBES]
    common = _common_length([ids for ids, _ in whole])
    ids, starts = whole[0]
    for cut in range(common, max(0, common - 64), -1):
        lead = text.head[starts[cut] :]
        if len(text.head) - starts[cut] > 400 or not ids[:cut]:
            break
        if all(
            tuple(rest[cut:]) == (*encode_plain(events, lead + probe + tail), *tail_ids)
            for (rest, _), probe in zip(whole, PROBES, strict=True)
        ):
            return Cut(tuple(ids[:cut]), lead, tail, tail_ids)
    remedy = "the tokenizer merges the prefix with what follows: change the end of the prefix text"
    raise ConfigError(str(policy.path), "prefix", policy.spec.prefix, remedy)


def full_ids(
    tokenizer: PreTrainedTokenizerBase, text: PromptText, event: str, label: str = ""
) -> tuple[list[int], list[int]]:
    """Tokens of a whole prompt as transformers makes them, and the character at which each
    starts in it."""
    encoding: Any = tokenizer.backend_tokenizer.encode(
        text.head + event + text.tail + label, add_special_tokens=False
    )
    bos = _bos(tokenizer) if text.adds_bos else []
    return bos + encoding.ids, [0] * len(bos) + [start for start, _ in encoding.offsets]


def encode_plain(events: Backend, text: str) -> list[int]:
    return list(events.encode(text, add_special_tokens=False).ids)


def _bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that this tokenizer puts in front of every text; what it puts behind is not
    wanted in front of a label."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    dressed = tokenizer.encode("a", add_special_tokens=True)
    return list(dressed[: dressed.index(bare[0])]) if bare and bare[0] in dressed else []


def _split_tail(tokenizer: PreTrainedTokenizerBase, tail: str) -> tuple[str, tuple[int, ...]]:
    """The tail up to its first control token, and the ids from there on."""
    controls = control_ids(tokenizer)
    encoding: Any = tokenizer.backend_tokenizer.encode(tail, add_special_tokens=False)
    for position, index in enumerate(encoding.ids):
        if index in controls:
            return tail[: encoding.offsets[position][0]], tuple(encoding.ids[position:])
    return tail, ()


def _common_length(sequences: Sequence[Sequence[int]]) -> int:
    length = 0
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return length


def _never_prepend(part: Any) -> Any:
    """A (pre-)tokenizer's JSON without the space that it puts in front of a text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence":
        name = "pretokenizers" if "pretokenizers" in part else "normalizers"
        return part | {name: list(_kept(part[name]))}
    if part.get("type") == "Prepend":
        return None
    changes = {"prepend_scheme": "never"} if "prepend_scheme" in part else {}
    if part.get("type") == "ByteLevel":
        changes["add_prefix_space"] = False  # type: ignore[assignment]
    return part | changes


def _kept(parts: Sequence[Any]) -> Iterator[Any]:
    return (kept for part in parts if (kept := _never_prepend(part)) is not None)
