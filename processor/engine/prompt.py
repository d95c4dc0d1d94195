"""How a policy's prompt is put together for one tokenizer, and where the prefix is cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend

from processor.core.policy import Policy
from processor.engine.token_backends import Backends
from processor.errors import ConfigError

_EVENT, _LABEL = "\u2063event\u2063", "\u2063label\u2063"  # stand-ins while a template is rendered
# Some templates write today's date. A replay next month must have the same prefix.
_SAME_DAY = "{% macro strftime_now(format) %}1 January 2026{% endmacro %}"
# Texts that begin and end with what tokenizers like to merge: digits, spaces, letters, marks.
PROBES = (
    '{"text":"hello"}',
    '{"amount":1234.5,"items":[1,2]}',
    '{"a":" leading","b":"trailing "}',
    '{"emoji":"😀","mark":"e\u0301","cjk":"日本"}',
    '{"nested":{"x":null,"y":[]}}',
    "{}",  # an event that has none of the chosen fields
)


@dataclass(frozen=True, slots=True)
class PromptText:
    """The literal text around an event and a label: before the event, after it, between it and
    the label, and after the label."""

    head: str
    tail: str
    before_label: str
    end: str
    adds_bos: bool


def prompt_text(policy: Policy, tokens: Backends) -> PromptText:
    """Raises `ConfigError` where style `chat` meets a tokenizer without a fit chat template."""
    prompt = policy.spec.prompt
    if prompt.style == "plain":
        head = f"{policy.prefix}\n\n{prompt.lead}"
        return PromptText(head, f"\n{prompt.cue}", " ", "\n", adds_bos=True)
    try:
        return _chat_text(policy, tokens)
    except (TemplateError, _UnfitTemplate) as error:
        remedy = f"{error}: use plain"
        raise ConfigError(str(policy.path), "prompt.style", "chat", remedy) from None


class _UnfitTemplate(Exception):
    """Why the chat template cannot be used."""


def _chat_text(policy: Policy, tokens: Backends) -> PromptText:
    if not tokens.source.chat_template:
        raise _UnfitTemplate("this model has no chat template")
    messages = [
        {"role": "system", "content": policy.prefix},
        {"role": "user", "content": policy.spec.prompt.lead + _EVENT},
    ]
    text = _render(tokens, messages, add_generation_prompt=True)
    head, found, tail = text.partition(_EVENT)
    if not found or policy.prefix not in head:
        raise _UnfitTemplate("the model's chat template drops the system or the user message")
    if not tokens.controls.intersection(tokens.whole.encode(tail, add_special_tokens=False).ids):
        # An event could write the words that end its turn and begin another.
        raise _UnfitTemplate("the turns of the model's chat template are plain text")
    answered = _render(tokens, [*messages, {"role": "assistant", "content": _LABEL}])
    _, _, end = answered.partition(_LABEL)
    return PromptText(head, tail, "", end or tokens.source.eos_token or "\n", adds_bos=False)


def _render(tokens: Backends, messages: Sequence[dict[str, str]], **options: Any) -> str:
    source: Any = tokens.source
    template = _SAME_DAY + str(source.get_chat_template())
    return str(
        source.apply_chat_template(
            list(messages), tokenize=False, chat_template=template, **options
        )
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """The prefix's tokens, the text between them and the event, and what follows the event:
    text that is tokenized with it, then fixed tokens."""

    prefix_ids: tuple[int, ...]
    lead: str
    tail: str
    tail_ids: tuple[int, ...]


def cut_prefix(policy: Policy, tokens: Backends, text: PromptText) -> Cut:
    """Cut as late as the tokenizer allows without changing a token.

    In general tokens(a + b) is not tokens(a) + tokens(b). The cut begins where the prompts of the
    probes begin to differ and moves back until each whole prompt is the prefix's tokens followed
    by the suffix's. Raises `ConfigError` where there is no such place near the end.
    """
    tail, tail_ids = _split_tail(tokens, text.tail)
    whole = [full_ids(tokens, text, probe) for probe in PROBES]
    common = _common_length([ids for ids, _ in whole])
    ids, starts = whole[0]
    for cut in range(common, max(0, common - 64), -1):
        lead = text.head[starts[cut] :]
        if len(text.head) - starts[cut] > 400:
            break
        if all(
            tuple(rest[cut:]) == (*encode_plain(tokens.events, lead + probe + tail), *tail_ids)
            for (rest, _), probe in zip(whole, PROBES, strict=True)
        ):
            return Cut(tuple(ids[:cut]), lead, tail, tail_ids)
    remedy = "the tokenizer merges the prefix with what follows: change the end of the prefix text"
    raise ConfigError(str(policy.path), "prefix", policy.spec.prefix, remedy)


def full_ids(
    tokens: Backends, text: PromptText, event: str, label: str = ""
) -> tuple[list[int], list[int]]:
    """Tokens of a whole prompt as the model's own tokenizer makes them, and the character at
    which each starts in it."""
    encoding: Any = tokens.whole.encode(
        text.head + event + text.tail + label, add_special_tokens=False
    )
    bos = list(tokens.bos) if text.adds_bos else []
    return bos + encoding.ids, [0] * len(bos) + [start for start, _ in encoding.offsets]


def encode_plain(events: Backend, text: str) -> list[int]:
    return list(events.encode(text, add_special_tokens=False).ids)


def encode_many(events: Backend, texts: Sequence[str]) -> list[list[int]]:
    """As `encode_plain`, on all cores and without the offsets of characters."""
    found = events.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in found]


def _split_tail(tokens: Backends, tail: str) -> tuple[str, tuple[int, ...]]:
    """The tail up to its first control token, and the ids from there on."""
    encoding: Any = tokens.whole.encode(tail, add_special_tokens=False)
    for position, index in enumerate(encoding.ids):
        if index in tokens.controls:
            return tail[: encoding.offsets[position][0]], tuple(encoding.ids[position:])
    return tail, ()


def _common_length(sequences: Sequence[Sequence[int]]) -> int:
    length = 0
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return length
