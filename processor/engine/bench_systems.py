"""The systems that `processor bench` times: ours, and what transformers offers for the same work.

The stock ones run on a copy of the model that is loaded by transformers alone, with its fastest
attention, so that nothing of ours can slow them down: our compiled kernels hold weights in an order
of their own, which the model would have to undo at every use.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from processor.core.batch import MicroBatch, Suffix
from processor.core.policy import Policy, PolicySpec
from processor.engine.labels import build_trie
from processor.engine.model import LoadedModel
from processor.engine.prompt import Cut
from processor.engine.scorer import PrefixScorer
from processor.engine.selfcheck import ordinary_tokens
from processor.engine.tokenizer import CompiledPolicy

# Distinct events; larger batches repeat them. No system looks for equal events, so this changes no
# time, and it lets every place of a large batch be checked against a smaller one.
DISTINCT = 16

StockModel = PreTrainedModel


@dataclass(frozen=True, slots=True)
class Work:
    """Token ids of the prompts: a prefix per topic, and events that take turns among the topics.
    `labels`: the two tokens whose probabilities are asked for."""

    prefixes: tuple[tuple[int, ...], ...]
    suffixes: tuple[tuple[int, ...], ...]
    labels: tuple[int, int]

    def event(self, place: int) -> tuple[int, tuple[int, ...]]:
        """Topic and suffix of the event at a place of a batch."""
        return place % len(self.prefixes), self.suffixes[place % len(self.suffixes)]

    def key(self, place: int) -> str:
        return f"{place % len(self.suffixes)} of topic {place % len(self.prefixes)}"


class System(Protocol):
    """One way to score events. Answers wait for the device, so a call can be timed as it is."""

    @property
    def name(self) -> str: ...

    def key(self, place: int) -> str:
        """Which event is at a place; equal keys of two systems mean the same tokens."""

    def score(self, places: Sequence[int]) -> list[tuple[float, ...]]:
        """Log-probabilities of the labels of each event, in one batch."""


def random_work(
    loaded: LoadedModel, prefix: int, suffix: int, topics: int = 1, seed: int = 0
) -> Work:
    """Ordinary token ids, drawn at random: `topics` prefixes of `prefix` tokens and events of
    `suffix` tokens each."""
    ordinary = ordinary_tokens(loaded)
    draw = random.Random(f"{seed} {prefix} {suffix} {topics}")
    first, second = draw.sample(ordinary, 2)
    return Work(
        tuple(tuple(draw.choices(ordinary, k=prefix)) for _ in range(topics)),
        tuple(tuple(draw.choices(ordinary, k=suffix)) for _ in range(DISTINCT)),
        (first, second),
    )


def load_stock(loaded: LoadedModel) -> PreTrainedModel:
    """The same weights again, loaded by transformers alone, in the same dtype and place."""
    build: Any = AutoModelForCausalLM
    folder = str(loaded.model.name_or_path)
    options = {"dtype": loaded.model.dtype, "use_safetensors": True}
    try:
        model = build.from_pretrained(folder, attn_implementation="sdpa", **options)
    except (ValueError, ImportError):  # attention that sdpa cannot compute (gpt_oss)
        model = build.from_pretrained(folder, attn_implementation="eager", **options)
    stock: PreTrainedModel = model.to(loaded.device).eval().requires_grad_(False)
    return stock


class Ours:
    """PrefixScorer, as `processor run` has it."""

    name = "ours"

    def __init__(self, loaded: LoadedModel, work: Work) -> None:
        self._work = work
        self.key = work.key
        compiled = [_compiled(f"topic-{n}", ids, work) for n, ids in enumerate(work.prefixes)]
        self._topics = [one.policy.key for one in compiled]
        self._scorer = PrefixScorer(loaded, compiled)

    def score(self, places: Sequence[int]) -> list[tuple[float, ...]]:
        events = map(self._work.event, places)
        batch = MicroBatch(tuple(Suffix(self._topics[topic], ids) for topic, ids in events))
        return [scores.logprobs for scores in self._scorer.score(batch)]


class _Stock:
    def __init__(self, loaded: LoadedModel, stock: PreTrainedModel, work: Work) -> None:
        self._work = work
        self.key = work.key
        self._body: Any = stock.base_model
        self._loaded, self._device = loaded, stock.device
        self._head = loaded.label_head(list(work.labels))

    def _ids(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([list(row) for row in rows], device=self._device)


class FullPrefill(_Stock):
    """The whole prompt of each event, one event at a time, no cache; label rows of the head."""

    name = "full"

    def score(self, places: Sequence[int]) -> list[tuple[float, ...]]:
        events = map(self._work.event, places)
        return [self._log_probs((*self._work.prefixes[n], *ids), self._head) for n, ids in events]

    def answer(self, prompt: Sequence[int], labels: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of some labels behind some prompt."""
        return self._log_probs(prompt, self._loaded.label_head(list(labels)))

    @torch.inference_mode()
    def _log_probs(self, prompt: Sequence[int], head: Any) -> tuple[float, ...]:
        out = self._body(input_ids=self._ids([prompt]), use_cache=False)
        return tuple(torch.log_softmax(head(out.last_hidden_state[:, -1]), -1)[0].tolist())


class StockCache(_Stock):
    """transformers with a `DynamicCache` of the prefix, for a batch of suffixes of equal length.

    The cache is taken by reference and expanded as a view: the one copy left is the concatenation
    that `DynamicLayer.update` makes. Documented ways to reuse a prefix (`copy.deepcopy`,
    `batch_repeat_interleave`) copy it once or twice more.
    """

    name = "transformers"

    def __init__(self, loaded: LoadedModel, stock: PreTrainedModel, work: Work) -> None:
        super().__init__(loaded, stock, work)
        self._caches = [self._capture(ids) for ids in work.prefixes]

    @torch.inference_mode()
    def _capture(self, prefix: Sequence[int]) -> DynamicCache:
        cache = DynamicCache()  # without a configuration: sliding layers keep all of the prefix too
        self._body(input_ids=self._ids([prefix]), cache=cache, use_cache=True)
        return cache

    @torch.inference_mode()
    def score(self, places: Sequence[int]) -> list[tuple[float, ...]]:
        """One pass per topic: a cache holds one prefix."""
        found: dict[int, tuple[float, ...]] = {}
        for topic, prefix in enumerate(self._caches):
            members = [n for n, place in enumerate(places) if self._work.event(place)[0] == topic]
            if members:
                suffixes = [self._work.event(places[n])[1] for n in members]
                out = self._pass(_fork(prefix, len(members)), suffixes)
                found.update(zip(members, out, strict=True))
        return [found[n] for n in range(len(places))]

    def _pass(
        self, cache: DynamicCache, suffixes: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        first = cache.get_seq_length()
        positions = torch.arange(first, first + len(suffixes[0]), device=self._device)
        out = self._body(
            input_ids=self._ids(suffixes),
            position_ids=positions.expand(len(suffixes), -1),
            cache=cache,
            use_cache=True,
        )
        logits = self._head(out.last_hidden_state[:, -1])
        return [tuple(row) for row in torch.log_softmax(logits, -1).tolist()]


def _fork(prefix: DynamicCache, batch: int) -> DynamicCache:
    """A cache whose layers begin as views of the prefix; `update` rebinds them and writes nothing
    into it."""
    fork = DynamicCache()
    for layer in prefix.layers:
        own: Any = copy.copy(layer)
        own.keys = own.keys.expand(batch, -1, -1, -1)
        own.values = own.values.expand(batch, -1, -1, -1)
        fork.layers.append(own)
    return fork


def _compiled(name: str, prefix: tuple[int, ...], work: Work) -> CompiledPolicy:
    """A policy that is nothing but a prefix and two labels of one token."""
    spec = PolicySpec.model_validate(
        {
            "name": name,
            "version": "1",
            "event": {"schema": "none", "fields": ["none"]},
            "labels": ["a", "b"],
            "topics": {"input": name, "output": f"{name}.out", "dead_letter": f"{name}.dlq"},
        }
    )
    cut = Cut(prefix, "", "", ())
    return CompiledPolicy(
        Policy(spec, "", {}, Path()), cut, build_trie([(token,) for token in work.labels])
    )
