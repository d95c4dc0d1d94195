"""What the broker thread does on both sides of the model: records in, outcomes into the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from processor.broker.transaction import Clock
from processor.core.decision import Timings
from processor.core.event import Record
from processor.core.pipeline import Pipeline, Prepared, Rendered, TokenIds
from processor.errors import RejectRecord
from processor.runtime.ledger import Entry, Ledger
from processor.runtime.model_thread import ModelThread, Scored, prepared
from processor.runtime.telemetry import Counters
from processor.runtime.tokenizing import Tokenizing


class Scoring:
    """Reads records, keeps those that found no place in the model's slot, and turns scores
    into outcomes."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: ModelThread,
        ledger: Ledger,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._pipeline = pipeline
        self._model = model
        self._ledger = ledger
        self._counters = counters
        self._clock = clock
        self._tokenizing = Tokenizing(pipeline)
        self._ready: list[Entry] = []  # prepared, no place in the slot
        self.latest_s = 0.0  # how long the model took for its latest micro-batch

    def take_in(self, records: Sequence[Record]) -> None:
        """Read records, and hand what is tokenized by now to the model.

        In portions of a micro-batch: an idle model need not wait for the whole poll. Where there
        is nothing to read, a portion that is being tokenized is waited for.
        """
        now, portion = self._clock(), self._pipeline.budget.max_events
        added = [self._ledger.add(record, now) for record in records]
        entries = [entry for entry in added if entry is not None]
        for start in range(0, len(entries), portion):
            self._read(entries[start : start + portion])
            self._fit(self._tokenizing.collect())
        if records:
            self._counters.polled(len(records))
        self._fit(self._tokenizing.collect(wait=not records))

    def _read(self, entries: Sequence[Entry]) -> None:
        taken: list[Entry] = []
        texts: list[Rendered] = []
        for entry in entries:
            read = self._pipeline.read(entry.record)
            if isinstance(read, Rendered):
                taken.append(entry)
                texts.append(read)
            else:
                entry.outcome = read
        if taken:
            self._tokenizing.begin(taken, texts)

    def _fit(self, tokenized: Sequence[tuple[Entry, Rendered, TokenIds | RejectRecord]]) -> None:
        for entry, item, tokens in tokenized:
            fitted = self._pipeline.fit(item, tokens)
            if isinstance(fitted, Prepared):
                entry.prepared = fitted
                self._ready.append(entry)
            else:
                entry.outcome = fitted
        if tokenized:
            self.refill()

    @property
    def tokenizing(self) -> bool:
        """Records will be ready for the model without another poll."""
        return self._tokenizing.busy

    def policies(self) -> set[str]:
        """Keys of the policies under which records are in flight."""
        entries = [*self._ledger.unfinished(), *self._model.entries()]
        fitted = {entry.prepared.policy.key for entry in entries if entry.prepared is not None}
        return fitted | self._tokenizing.policies()

    def refill(self) -> None:
        """Put what is ready and still ours into the slot."""
        self._ready = self._model.refill(self._ready, self._ledger.is_live)

    def collect(self) -> None:
        """Note the outcomes of what the model has finished. Raises `ExitProcess` if it failed."""
        for scored in self._model.collect():
            self._finish(scored)
        if self._ready:
            self.refill()

    def close(self) -> None:
        """Give the model nothing more than what it has been given."""
        self._tokenizing.close()
        self._ready.clear()

    def _finish(self, scored: Scored) -> None:
        self.latest_s = scored.ended - scored.begun
        score_ms, events = 1e3 * self.latest_s, len(scored.entries)
        tokens = saved = 0
        for entry, scores in zip(scored.entries, scored.scores, strict=True):
            item = prepared(entry)
            tokens += len(item.suffix.token_ids)
            saved += self._pipeline.scorer.provenance(item.policy.key).prefix_tokens
            if not self._ledger.is_live(entry):
                continue
            if isinstance(scores, RejectRecord):
                self._ledger.finish(entry, self._pipeline.reject(item, scores))
                continue
            timings = Timings(
                wait_ms=1e3 * (scored.begun - entry.polled_at),
                score_ms=score_ms,
                batch_events=events,
            )
            self._ledger.finish(entry, self._pipeline.finish(item, scores, timings))
        self._counters.scored(tokens, saved)
