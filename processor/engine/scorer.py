"""PrefixScorer: scores of a micro-batch in one forward pass, and its slow uncached twin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from processor.core.batch import MicroBatch, Suffix
from processor.core.decision import Provenance, Scores
from processor.engine import attention
from processor.engine.attention import ROW_TILE, EventRows, Plan, Segment
from processor.engine.labels import LabelTrie
from processor.engine.model import LoadedModel
from processor.engine.prefix import FrozenPrefix, capture_prefix
from processor.engine.tokenizer import CompiledPolicy


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
    """Implements `core.pipeline.Scorer`. Not thread-safe: one thread owns the model.

    A pass holds the rows of all its events, one event after the other, filled up with rows of
    padding to a multiple of `ROW_TILE`.
    """

    def __init__(
        self,
        model: LoadedModel,
        policies: Iterable[CompiledPolicy],
        progress: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.model = model
        self._loaded: dict[str, _Loaded] = {}
        for compiled in policies:
            progress(f"capturing {compiled.policy.name} ({compiled.prefix_tokens} tokens)")
            self._loaded[compiled.policy.name] = _load(model, compiled)

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
        order = sorted(range(len(batch)), key=lambda i: batch.suffixes[i].policy)
        suffixes = [batch.suffixes[i] for i in order]
        hidden, spans = self._forward(suffixes)
        scores = {
            place: self._label_scores(hidden, suffix, span)
            for place, suffix, span in zip(order, suffixes, spans, strict=True)
        }
        return [scores[place] for place in range(len(batch))]

    @torch.inference_mode()
    def label_mass(self, suffix: Suffix) -> float:
        """Probability that the model's next token begins any label at all: how far it answers
        the question. Multiplies the whole head, so it is for checks and samples."""
        hidden, [span] = self._forward([suffix])
        last = hidden[span.start + len(suffix.token_ids) - 1]
        logits = self.model.label_head(slice(None))(last[None])[0]
        first = list(self._loaded[suffix.policy].trie.first_tokens)
        return float(torch.softmax(logits, dim=-1)[first].sum())

    def _forward(self, suffixes: Sequence[Suffix]) -> tuple[Tensor, list[EventRows]]:
        """Last hidden states [R, d] of all rows, and the rows of each event."""
        ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        events: list[EventRows] = []
        for suffix in suffixes:
            start, loaded = len(ids), self._loaded[suffix.policy]
            row_ids, row_positions = _event_rows(suffix, loaded)
            ids += row_ids
            positions += row_positions
            events.append(EventRows(start, len(ids), _tree(loaded.trie, suffix, self.model)))
            if segments and segments[-1].prefix is loaded.prefix:
                start = segments.pop().start
            segments.append(Segment(loaded.prefix, start, len(ids)))
        spans = list(events)
        if padding := -len(ids) % ROW_TILE:  # an event of its own, in the last segment
            events.append(EventRows(len(ids), len(ids) + padding))
            ids += [0] * padding
            positions += range(positions[-1] + 1, positions[-1] + 1 + padding)
            segments[-1] = replace(segments[-1], stop=len(ids))
        device = self.model.device
        places = torch.tensor(positions, device=device)
        out = self.model.body(
            input_ids=torch.tensor([ids], device=device),
            position_ids=places[None],
            use_cache=False,
            prefix_plan=Plan(segments, events, places),
        )
        return out.last_hidden_state[0], spans

    def _label_scores(self, hidden: Tensor, suffix: Suffix, span: EventRows) -> Scores:
        loaded = self._loaded[suffix.policy]
        label_start = span.start + len(suffix.token_ids)
        rows = [label_start + branching.row for branching in loaded.trie.branchings]
        return _path_scores(loaded, _tiled(loaded.label_logits, hidden[rows]))

    @torch.inference_mode()
    def reference_score(self, suffix: Suffix) -> Scores:
        """What `score` computes, from whole prompts: transformers' own attention, no cache, no
        packing, one pass for each branching of the labels."""
        loaded = self._loaded[suffix.policy]
        trie = loaded.trie
        states = []
        with _stock_attention(self.model):
            for branching in trie.branchings:
                path = _row_path(trie, branching.row)
                ids = (*loaded.prefix.token_ids, *suffix.token_ids, *path)
                out = self.model.body(
                    input_ids=torch.tensor([ids], device=self.model.device), use_cache=False
                )
                states.append(out.last_hidden_state[0, -1])
        return _path_scores(loaded, loaded.label_logits(torch.stack(states)))


def _load(model: LoadedModel, compiled: CompiledPolicy) -> _Loaded:
    branchings = compiled.trie.branchings
    tokens = list(dict.fromkeys(token for branching in branchings for token in branching.tokens))
    columns = tuple(
        torch.tensor([tokens.index(token) for token in b.tokens], device=model.device)
        for b in branchings
    )
    prefix = capture_prefix(model, compiled.cut.prefix_ids)
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
    """Apply a matrix product to rows filled up to a tile."""
    padding = -len(rows) % ROW_TILE
    return function(torch.nn.functional.pad(rows, (0, 0, 0, padding)))[: len(rows)]


def _path_scores(loaded: _Loaded, logits: Tensor) -> Scores:
    """Log-probability of each label from the logits [branchings, label tokens]."""
    branches = [
        torch.log_softmax(row[columns], dim=-1).tolist()
        for row, columns in zip(logits, loaded.columns, strict=True)
    ]
    return Scores(
        tuple(sum(branches[b][branch] for b, branch in edges) for edges in loaded.trie.edges)
    )


def _row_path(trie: LabelTrie, row: int) -> list[int]:
    """The label tokens from the root to a trie row, itself included."""
    path: list[int] = []
    while row >= 0:
        path.insert(0, trie.row_tokens[row])
        row = trie.row_parents[row]
    return path


@contextmanager
def _stock_attention(model: LoadedModel) -> Iterator[None]:
    """transformers' own written-out attention for the time of a reference."""
    model.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.model.set_attn_implementation(attention.NAME)
