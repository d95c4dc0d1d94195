"""SuffixTokenizer: from an event's text to the tokens that follow its policy's frozen prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from processor.core.policy import Policy
from processor.engine.labels import LabelTrie, build_trie
from processor.engine.model import LoadedModel
from processor.engine.prompt import (
    PROBES,
    Cut,
    PromptText,
    control_ids,
    cut_prefix,
    encode_plain,
    event_backend,
    full_ids,
    prompt_text,
)
from processor.errors import ConfigError, RejectRecord


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    """A policy in one model's tokens."""

    policy: Policy
    cut: Cut
    trie: LabelTrie

    @property
    def prefix_tokens(self) -> int:
        return len(self.cut.prefix_ids)


class SuffixTokenizer:
    """Implements `core.pipeline.Tokenizer`. Reads nothing that changes: safe in any thread."""

    def __init__(self, model: LoadedModel, policies: Iterable[Policy]) -> None:
        self._events = event_backend(model.tokenizer)
        self._controls = control_ids(model.tokenizer)
        self._window = model.window
        self.policies = {
            policy.name: compile_policy(model.tokenizer, policy, self._events)
            for policy in policies
        }
        for compiled in self.policies.values():
            _check_room(compiled, model.window)

    def encode(self, policy: str, text: str) -> tuple[int, ...]:
        compiled = self.policies[policy]
        cut = compiled.cut
        ids = encode_plain(self._events, cut.lead + text + cut.tail)
        if not self._controls.isdisjoint(ids):
            raise RejectRecord("control_token", "the tokenizer makes a control token of the text")
        total = compiled.prefix_tokens + len(ids) + len(cut.tail_ids) + _depth(compiled.trie)
        if total > self._window:
            raise RejectRecord("too_long", f"{total} tokens, the model reads {self._window}")
        return (*ids, *cut.tail_ids)

    def rows(self, policy: str, tokens: int) -> int:
        return tokens + self.policies[policy].trie.rows


def compile_policy(
    tokenizer: PreTrainedTokenizerBase, policy: Policy, events: Backend | None = None
) -> CompiledPolicy:
    """Find the prefix boundary and the labels' tokens. Raises `ConfigError`."""
    text = prompt_text(policy, tokenizer)
    cut = cut_prefix(policy, tokenizer, text, events or event_backend(tokenizer))
    return CompiledPolicy(policy, cut, _label_trie(policy, tokenizer, text))


def _label_trie(policy: Policy, tokenizer: PreTrainedTokenizerBase, text: PromptText) -> LabelTrie:
    paths: dict[tuple[int, ...], str] = {}
    for label in policy.spec.labels:
        path = _label_path(policy, tokenizer, text, label.name, label.text)
        if path in paths:
            remedy = f"has the same tokens as label {paths[path]!r}: give it another text"
            raise ConfigError(str(policy.path), f"labels.{label.name}.text", label.text, remedy)
        paths[path] = label.name
    try:
        return build_trie(list(paths))
    except ValueError:  # one label begins another ("approve", "approve_with_review")
        end = _terminator(policy, tokenizer, text)
        return build_trie([(*path, *end) for path in paths])


def _label_path(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    text: PromptText,
    name: str,
    label: str,
) -> tuple[int, ...]:
    """The label's tokens as they come after an event: what the prompt with it has more than the
    prompt without (tokenizing the word alone gives others, EuroEval #2179)."""
    found = set()
    for probe in PROBES:
        before, _ = full_ids(tokenizer, text, probe)
        after, _ = full_ids(tokenizer, text, probe, text.before_label + label)
        if after[: len(before)] != before:
            remedy = "its tokens merge with the prompt before it: change prompt.cue or the text"
            raise ConfigError(str(policy.path), f"labels.{name}.text", label, remedy)
        found.add(tuple(after[len(before) :]))
    path = found.pop()
    if found or not path:
        remedy = "gives no token, or others after other events: choose another text"
        raise ConfigError(str(policy.path), f"labels.{name}.text", label, remedy)
    return path


def _terminator(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, text: PromptText
) -> tuple[int, ...]:
    """What follows a label: a line break in a plain prompt, the end of the turn in a chat."""
    if not text.adds_bos and tokenizer.eos_token_id is not None:
        return (int(tokenizer.eos_token_id),)
    label = policy.spec.labels[0].text
    before, _ = full_ids(tokenizer, text, PROBES[0], text.before_label + label)
    after, _ = full_ids(tokenizer, text, PROBES[0], text.before_label + label + "\n")
    if after[: len(before)] != before or len(after) == len(before):
        remedy = "one label begins another and the tokenizer gives no end: rename one"
        raise ConfigError(str(policy.path), "labels", label, remedy)
    return tuple(after[len(before) :])


def _check_room(compiled: CompiledPolicy, window: int) -> None:
    """Refuse a prefix that leaves no room for even an empty event."""
    cut, policy = compiled.cut, compiled.policy
    fixed: Sequence[int] = (*cut.prefix_ids, *cut.tail_ids)
    if len(fixed) + _depth(compiled.trie) + 16 > window:
        remedy = f"prefix of {len(cut.prefix_ids)} tokens leaves no room in a window of {window}"
        raise ConfigError(str(policy.path), "prefix", policy.spec.prefix, remedy)


def _depth(trie: LabelTrie) -> int:
    return max(trie.row_depths, default=0)
