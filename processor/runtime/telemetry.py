"""Live counters: what the worker counts, as a closed set of names."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from processor.broker.transaction import TopicPartition
from processor.core.decision import Decision, Outcome, Rejection

Reload = Literal["swapped", "refused", "unchanged"]


@dataclass(frozen=True, slots=True)
class Lag:
    """Of one partition. `records` have no published outcome yet, `unstable` stand behind a
    transaction that a producer has left open: nobody can read them before it ends."""

    records: int
    unstable: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Totals since the start of the process, except `queue_depth` and `lag`.

    Outcomes are counted when their transaction has committed, so an event that was scored twice
    after an abort counts once; `tokens_computed` and `tokens_saved` count work, and count it twice.
    """

    records: int = 0  # polled; after a rewind again
    decisions: int = 0
    rejections: dict[str, int] = field(default_factory=dict)  # by reason
    tombstones: int = 0  # skipped or passed on
    decisions_by_policy: dict[str, int] = field(default_factory=dict)
    decisions_by_label: dict[tuple[str, str], int] = field(default_factory=dict)  # policy, label
    tokens_computed: int = 0  # suffix tokens that went through the model
    tokens_saved: int = 0  # prefix tokens that did not, thanks to the frozen prefix
    micro_batches: int = 0
    transactions: int = 0  # committed
    aborts: int = 0
    rebuilds: int = 0  # of the producer
    policy_reloads: dict[str, int] = field(default_factory=dict)  # by `Reload`, of single policies
    records_lost: int = 0  # deleted before they were read, see `kafka.auto_offset_reset`
    queue_depth: int = 0  # records polled and not yet published, now
    lag: dict[TopicPartition, Lag] = field(default_factory=dict)  # of what is assigned, now


class Counters:
    """The worker writes, anybody reads. Reading gives one consistent `Snapshot`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._rejections: Counter[str] = Counter()
        self._policies: Counter[str] = Counter()
        self._labels: Counter[tuple[str, str]] = Counter()
        self._reloads: Counter[str] = Counter()
        self._depth = 0
        self._lag: dict[TopicPartition, Lag] = {}

    def polled(self, records: int) -> None:
        with self._lock:
            self._totals["records"] += records

    def scored(self, tokens_computed: int, tokens_saved: int) -> None:
        with self._lock:
            self._totals.update(
                micro_batches=1, tokens_computed=tokens_computed, tokens_saved=tokens_saved
            )

    def published(self, outcomes: Sequence[Outcome]) -> None:
        with self._lock:
            self._totals["transactions"] += 1
            for outcome in outcomes:
                if isinstance(outcome, Decision):
                    self._totals["decisions"] += 1
                    self._policies[outcome.policy.name] += 1
                    self._labels[outcome.policy.name, outcome.label] += 1
                elif isinstance(outcome, Rejection):
                    self._rejections[outcome.reason] += 1
                else:
                    self._totals["tombstones"] += 1

    def aborted(self) -> None:
        with self._lock:
            self._totals["aborts"] += 1

    def rebuilt(self) -> None:
        with self._lock:
            self._totals["rebuilds"] += 1

    def reloaded(self, outcome: Reload) -> None:
        with self._lock:
            self._reloads[outcome] += 1

    def waiting(self, records: int) -> None:
        with self._lock:
            self._depth = records

    def lagging(self, lag: dict[TopicPartition, Lag], records_lost: int) -> None:
        """Of all partitions that are ours; those that are missing are no longer."""
        with self._lock:
            self._lag = lag
            self._totals["records_lost"] = records_lost

    def revoked(self, partitions: Collection[TopicPartition]) -> None:
        with self._lock:
            self._lag = {p: lag for p, lag in self._lag.items() if p not in partitions}

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(
                **self._totals,
                rejections=dict(self._rejections),
                decisions_by_policy=dict(self._policies),
                decisions_by_label=dict(self._labels),
                policy_reloads=dict(self._reloads),
                queue_depth=self._depth,
                lag=self._lag,
            )
