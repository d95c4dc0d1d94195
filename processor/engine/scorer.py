"""PrefixScorer: scores of a micro-batch in one forward pass, and its slow uncached twin."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from processor.core.batch import Ladder, MicroBatch, Suffix
from processor.core.decision import Provenance, Scores
from processor.engine.attend_layout import upload
from processor.engine.forward import run_plan
from processor.engine.labels import LabelTrie
from processor.engine.model import LoadedModel
from processor.engine.plan import EventRows, Plan, Segment
from processor.engine.prefix import FrozenPrefix
from processor.engine.tokenizer import CompiledPolicy
from processor.engine.tree import Owner, PrefixTree

HEAD_TILE = 64  # rows of the label product


@dataclass(frozen=True)
class _Loaded:
    compiled: CompiledPolicy
    prefix: FrozenPrefix
    label_logits: Callable[[Tensor], Tensor]
    columns: tuple[Tensor, ...]  # per branching: its branches' places in `label_logits`

    @property
    def trie(self) -> LabelTrie:
        return self.compiled.trie


class PrefixScorer:
    """Implements `core.pipeline.Scorer`. Not thread-safe: one thread owns the model; others may
    ask for provenance.

    A pass holds the rows of all its events, one event after the other, filled up with rows of
    padding to the next rung of a ladder.
    """

    def __init__(
        self,
        model: LoadedModel,
        policies: Iterable[CompiledPolicy],
        progress: Callable[[str], None] = lambda stage: None,
        tree: PrefixTree | None = None,
    ) -> None:
        self.model = model
        self.tree = tree or PrefixTree(model)
        self.one_by_one = False  # where a chip's products give a batch other bits: see `selfcheck`
        self._loaded: dict[str, _Loaded] = {}  # by `Policy.key`
        self._ladder = Ladder(model.backend.tile)
        policies = list(policies)
        self.tree.plan([(compiled.cut.prefix_ids, _owner(compiled)) for compiled in policies])
        for compiled in policies:
            progress(f"capturing {compiled.policy.name} ({compiled.prefix_tokens} tokens)")
            for _ in self.load_steps(compiled):
                pass

    def load_steps(self, compiled: CompiledPolicy) -> Generator[None, None, None]:
        """Make a policy ready to be scored. Others may be scored wherever this yields; closed
        early, it leaves nothing behind."""
        prefix = yield from self.tree.steps(compiled.cut.prefix_ids, _owner(compiled))
        self._loaded[compiled.policy.key] = _load(self.model, compiled, prefix)

    def drop(self, key: str) -> None:
        """Free a policy's prefix and label rows; nothing under this key is scored any more."""
        self._loaded.pop(key, None)

    def prefix(self, policy: str) -> FrozenPrefix:
        return self._loaded[policy].prefix

    def provenance(self, policy: str) -> Provenance:
        return Provenance(
            model=self.model.name,
            model_fingerprint=self.model.fingerprint,
            numerics_fingerprint=self.model.numerics,
            prefix_tokens=len(self._loaded[policy].prefix),
        )

    @torch.inference_mode()
    def score(self, batch: MicroBatch) -> list[Scores]:
        """Log-probabilities of the labels of each event, in the batch's order."""
        if not len(batch):
            return []
        if self.one_by_one and len(batch) > 1:
            return [self.score(MicroBatch((suffix,)))[0] for suffix in batch.suffixes]
        order = sorted(range(len(batch)), key=lambda i: batch.suffixes[i].policy)
        suffixes = [batch.suffixes[i] for i in order]
        hidden, events = self._forward(suffixes)
        scores: dict[int, Scores] = {}
        begun = 0
        for policy, members in groupby(suffixes, key=lambda suffix: suffix.policy):
            end = begun + len(list(members))
            found = self._label_scores(policy, hidden, events[begun:end])
            scores.update(zip(order[begun:end], found, strict=True))
            begun = end
        return [scores[place] for place in range(len(batch))]

    def rows(self, batch: MicroBatch) -> int:
        """Rows of the pass that scores a batch, label rows and padding included."""
        return self._ladder.rung(
            sum(len(s.token_ids) + self._loaded[s.policy].trie.rows for s in batch.suffixes)
        )

    @torch.inference_mode()
    def label_mass(self, suffix: Suffix) -> float:
        """Probability that the model's next token begins any label at all: how far it answers
        the question. Multiplies the whole head, so it is for checks and samples."""
        hidden, [event] = self._forward([suffix])
        last = hidden[event.stop - event.tail]
        logits = self.model.label_head(slice(None))(last[None])[0]
        first = list(self._loaded[suffix.policy].trie.first_tokens)
        return float(torch.softmax(logits, dim=-1)[first].sum())

    def _forward(self, suffixes: Sequence[Suffix]) -> tuple[Tensor, list[EventRows]]:
        """Last hidden states [R, d], true at the tail rows of each event, and these events."""
        ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for policy, members in groupby(suffixes, key=lambda suffix: suffix.policy):
            loaded, events = self._loaded[policy], []
            for suffix in members:
                start = len(ids)
                row_ids, row_positions = _event_rows(suffix, loaded)
                ids += row_ids
                positions += row_positions
                tree = _tree(loaded.trie, suffix, self.model)
                events.append(EventRows(start, len(ids), 1 + loaded.trie.rows, tree))
            segments.append(Segment(loaded.prefix.spans, events))
        padding = self._ladder.rung(len(ids)) - len(ids)
        ids += [0] * padding
        positions += [0] * padding
        places = upload(positions, self.model.device, torch.int64)
        plan = Plan(segments, places, self.model.backend, self.model.last_layer)
        return run_plan(self.model.body, self.model.tail, ids, plan), list(plan.events)

    def _label_scores(
        self, policy: str, hidden: Tensor, events: Sequence[EventRows]
    ) -> list[Scores]:
        """Scores of events of one policy."""
        loaded = self._loaded[policy]
        behind = [branching.row - loaded.trie.rows for branching in loaded.trie.branchings]
        rows = hidden[[event.stop + row for event in events for row in behind]]
        logits = _tiled(loaded.label_logits, rows)
        return _path_scores(loaded, logits.view(len(events), len(behind), -1))

    @torch.inference_mode()
    def reference_score(self, suffix: Suffix) -> Scores:
        """What `score` computes, from whole prompts: transformers' own attention, no cache, no
        packing, one pass for each branching of the labels."""
        loaded = self._loaded[suffix.policy]
        trie = loaded.trie
        states = []
        with self.model.stock():
            for branching in trie.branchings:
                path = _row_path(trie, branching.row)
                ids = (*loaded.prefix.token_ids, *suffix.token_ids, *path)
                out = self.model.body(
                    input_ids=torch.tensor([ids], device=self.model.device), use_cache=False
                )
                states.append(out.last_hidden_state[0, -1])
        return _path_scores(loaded, loaded.label_logits(torch.stack(states))[None])[0]


def _owner(compiled: CompiledPolicy) -> Owner:
    return Owner(compiled.policy.spec.tenant, compiled.policy.spec.share_prefix)


def _load(model: LoadedModel, compiled: CompiledPolicy, prefix: FrozenPrefix) -> _Loaded:
    branchings = compiled.trie.branchings
    tokens = list(dict.fromkeys(token for branching in branchings for token in branching.tokens))
    columns = tuple(
        torch.tensor([tokens.index(token) for token in b.tokens], device=model.device)
        for b in branchings
    )
    return _Loaded(compiled, prefix, model.label_head(tokens), columns)


def _event_rows(suffix: Suffix, loaded: _Loaded) -> tuple[list[int], list[int]]:
    """Token ids and true positions of an event's suffix and of the label rows behind it."""
    first = len(loaded.prefix)
    after = first + len(suffix.token_ids)
    ids = [*suffix.token_ids, *loaded.trie.row_tokens]
    branches = [after + depth - 1 for depth in loaded.trie.row_depths]
    return ids, [*range(first, after), *branches]


def _tree(trie: LabelTrie, suffix: Suffix, model: LoadedModel) -> Tensor | None:
    return trie.tree_mask(len(suffix.token_ids)).to(model.device) if trie.rows else None


def _tiled(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a matrix product to rows, a full tile at a time: always the same product."""
    padding = -len(rows) % HEAD_TILE
    tiles = torch.split(torch.nn.functional.pad(rows, (0, 0, 0, padding)), HEAD_TILE)
    return torch.cat([function(tile) for tile in tiles])[: len(rows)]


def _path_scores(loaded: _Loaded, logits: Tensor) -> list[Scores]:
    """Log-probabilities of the labels from logits [events, branchings, label tokens]."""
    branches = [
        torch.log_softmax(logits[:, place, columns], dim=-1).tolist()
        for place, columns in enumerate(loaded.columns)
    ]
    return [
        Scores(
            tuple(
                sum(branches[b][event][branch] for b, branch in edges)
                for edges in loaded.trie.edges
            )
        )
        for event in range(len(logits))
    ]


def _row_path(trie: LabelTrie, row: int) -> list[int]:
    """The label tokens from the root to a trie row, itself included."""
    path: list[int] = []
    while row >= 0:
        path.insert(0, trie.row_tokens[row])
        row = trie.row_parents[row]
    return path
