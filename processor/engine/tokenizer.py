"""SuffixTokenizer: from an event's text to the tokens that follow its policy's frozen prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from processor.core.policy import Label, Policy
from processor.engine.labels import LabelTrie, build_trie
from processor.engine.model import LoadedModel
from processor.engine.prompt import (
    PROBES,
    Cut,
    PromptText,
    cut_prefix,
    encode_many,
    full_ids,
    prompt_text,
)
from processor.engine.token_backends import Backends, copy_backends
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
    """Implements `core.pipeline.Tokenizer`. `policies` by their `key`. All may be called in any
    thread; of `add` and `drop` one at a time."""

    def __init__(self, model: LoadedModel, policies: Iterable[Policy]) -> None:
        self._tokens = copy_backends(model.tokenizer)
        self._window = model.window
        self.policies: dict[str, CompiledPolicy] = {}
        for policy in policies:
            self.add(self.compile(policy))

    def compile(self, policy: Policy) -> CompiledPolicy:
        """A policy that `add` takes. Raises `ConfigError` where it cannot be served."""
        compiled = compile_policy(self._tokens, policy)
        _check_room(compiled, self._window)
        return compiled

    def add(self, compiled: CompiledPolicy) -> None:
        self.policies[compiled.policy.key] = compiled

    def drop(self, key: str) -> None:
        self.policies.pop(key, None)

    def encode(self, policy: str, text: str) -> tuple[int, ...]:
        """The suffix tokens of one event. Raises `RejectRecord`."""
        [found] = self.encode_all(policy, [text])
        if isinstance(found, RejectRecord):
            raise found
        return found

    def encode_all(self, policy: str, texts: Sequence[str]) -> list[tuple[int, ...] | RejectRecord]:
        compiled = self.policies[policy]
        cut = compiled.cut
        whole = [cut.lead + text + cut.tail for text in texts]
        fixed = compiled.prefix_tokens + len(cut.tail_ids) + _depth(compiled.trie)
        return [
            self._judge(ids, cut.tail_ids, fixed) for ids in encode_many(self._tokens.events, whole)
        ]

    def _judge(
        self, ids: list[int], tail: tuple[int, ...], fixed: int
    ) -> tuple[int, ...] | RejectRecord:
        if not self._tokens.controls.isdisjoint(ids):
            why = "the tokenizer makes a control token of the text"
            return RejectRecord("control_token", why)
        if (total := fixed + len(ids)) > self._window:
            return RejectRecord("too_long", f"{total} tokens, the model reads {self._window}")
        return (*ids, *tail)

    def rows(self, policy: str, tokens: int) -> int:
        return tokens + self.policies[policy].trie.rows


def compile_policy(tokens: Backends, policy: Policy) -> CompiledPolicy:
    """Find the prefix boundary and the labels' tokens. Raises `ConfigError`."""
    text = prompt_text(policy, tokens)
    return CompiledPolicy(policy, cut_prefix(policy, tokens, text), _trie(policy, tokens, text))


def _trie(policy: Policy, tokens: Backends, text: PromptText) -> LabelTrie:
    paths: dict[tuple[int, ...], Label] = {}
    for label in policy.spec.labels:
        path = _path(policy, tokens, text, label)
        if path in paths:
            remedy = f"has the same tokens as label {paths[path].name!r}: give it another text"
            raise ConfigError(str(policy.path), f"labels.{label.name}.text", label.text, remedy)
        paths[path] = label
    try:
        return build_trie(list(paths))
    except ValueError:  # one label begins another ("approve", "approve_with_review")
        return build_trie([_ended(policy, tokens, text, label, p) for p, label in paths.items()])


def _path(policy: Policy, tokens: Backends, text: PromptText, label: Label) -> tuple[int, ...]:
    """The label's tokens as they come after an event: what the prompt with it has more than the
    prompt without (tokenizing the word alone gives others, EuroEval #2179)."""
    found = set()
    for probe in PROBES:
        before, _ = full_ids(tokens, text, probe)
        after, _ = full_ids(tokens, text, probe, text.before_label + label.text)
        if after[: len(before)] != before:
            remedy = "its tokens merge with the prompt before it: change prompt.cue or the text"
            raise ConfigError(str(policy.path), f"labels.{label.name}.text", label.text, remedy)
        found.add(tuple(after[len(before) :]))
    path = found.pop()
    if found or not path:
        remedy = "gives no token, or others after other events: choose another text"
        raise ConfigError(str(policy.path), f"labels.{label.name}.text", label.text, remedy)
    return path


def _ended(
    policy: Policy, tokens: Backends, text: PromptText, label: Label, path: tuple[int, ...]
) -> tuple[int, ...]:
    """The label's tokens and the first one of what follows an answer: a line break in a plain
    prompt, the end of the turn in a chat."""
    before, _ = full_ids(tokens, text, PROBES[0])
    after, _ = full_ids(tokens, text, PROBES[0], text.before_label + label.text + text.end)
    ended = tuple(after[len(before) : len(before) + len(path) + 1])
    if ended[:-1] != path:
        remedy = "begins or continues another label, and its last token merges with the end"
        raise ConfigError(str(policy.path), f"labels.{label.name}.text", label.text, remedy)
    return ended


def _check_room(compiled: CompiledPolicy, window: int) -> None:
    """Refuse a prefix that leaves no room for even an empty event."""
    cut, policy = compiled.cut, compiled.policy
    fixed: Sequence[int] = (*cut.prefix_ids, *cut.tail_ids)
    if len(fixed) + _depth(compiled.trie) + 16 > window:
        remedy = f"prefix of {len(cut.prefix_ids)} tokens leaves no room in a window of {window}"
        raise ConfigError(str(policy.path), "prefix", policy.spec.prefix, remedy)


def _depth(trie: LabelTrie) -> int:
    return max(trie.row_depths, default=0)
