"""Finished outcomes into transactions, and the account of what was published."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from processor.broker.transaction import (
    RETRY_PAUSE_S,
    Clock,
    RecordSource,
    State,
    TopicPartition,
    TransactionalSink,
    Transactions,
)
from processor.core.decision import Outcome
from processor.core.event import Record
from processor.core.pipeline import Pipeline
from processor.errors import ExitProcess, RebuildProducer, RetryCall
from processor.runtime.ledger import Finished, Ledger
from processor.runtime.telemetry import Counters

OnOutcome = Callable[[Record, Outcome], None]
Committed = dict[TopicPartition, int | None]


class Publisher:
    """Publishes what the ledger says is finished; each outcome is accounted for once, when it is
    known to be committed."""

    def __init__(
        self,
        pipeline: Pipeline,
        source: RecordSource,
        sink: TransactionalSink,
        ledger: Ledger,
        counters: Counters,
        on_outcome: OnOutcome | None,
        budget_s: float,
        clock: Clock,
    ) -> None:
        self._pipeline = pipeline
        self._source = source
        self._ledger = ledger
        self._counters = counters
        self._on_outcome = on_outcome
        self._budget_s = budget_s
        self._clock = clock
        self._transactions = Transactions(sink, source.group_metadata, budget_s, clock)
        self._uncertain: Finished | None = None  # published, or not: the commit did not say

    @property
    def ready(self) -> bool:
        return self._transactions.state is State.READY

    def start(self) -> Committed | None:
        """Make it ready: the first producer, or a new one for one that was lost. After a loss the
        committed offsets are returned: all lanes have to go back to them."""
        if self._transactions.state is State.NEW:
            self._transactions.start()
            return None
        self._counters.rebuilt()
        self._transactions.rebuild()
        # Only now are the committed offsets final: the new producer has ended what the old left.
        uncertain, self._uncertain = self._uncertain, None
        asked = self._ledger.partitions | (uncertain.offsets.keys() if uncertain else set())
        committed = self._committed(asked)
        # A commit that never answered, and turns out to have happened, is accounted for here.
        if uncertain and all(committed.get(p) == o for p, o in uncertain.offsets.items()):
            self._account(uncertain)
        return committed

    def publish(self, budget_s: float) -> bool:
        """One transaction with all that is finished; False where nothing is."""
        finished = self._ledger.finished()
        if not finished.entries or not self.ready:
            return False
        records = [
            self._pipeline.encode(entry.outcome, entry.record)
            for entry in finished.entries
            if entry.outcome is not None
        ]
        try:
            self._transactions.publish(records, finished.offsets, min(budget_s, self._budget_s))
        except RebuildProducer:
            self._uncertain = finished
            raise
        self._ledger.published(finished)
        self._account(finished)
        return True

    def close(self) -> None:
        self._transactions.close()

    def _committed(self, partitions: Collection[TopicPartition]) -> Committed:
        deadline = self._clock() + self._budget_s
        while partitions:
            try:
                return self._source.committed(partitions, max(0.1, deadline - self._clock()))
            except RetryCall as error:
                if self._clock() >= deadline:
                    raise ExitProcess(f"cannot read the committed offsets: {error}") from error
                time.sleep(RETRY_PAUSE_S)
        return {}

    def _account(self, finished: Finished) -> None:
        outcomes = [entry.outcome for entry in finished.entries if entry.outcome is not None]
        self._counters.published(outcomes)
        if self._on_outcome is not None:
            for entry, outcome in zip(finished.entries, outcomes, strict=True):
                self._on_outcome(entry.record, outcome)
