"""How far each partition is: lag by position, and partitions that stand still."""

from __future__ import annotations

from processor.broker.transaction import Clock, RecordSource, TopicPartition
from processor.errors import ExitProcess
from processor.runtime.ledger import Ledger
from processor.runtime.telemetry import Counters, Lag

EVERY_S = 2.0


class Progress:
    """Looks every two seconds. Lag counts what has no published outcome yet, up to the last
    stable offset: behind it read_committed readers see nothing, so nothing can be done there
    (softwaremill/klag-exporter#104).

    A partition stands still where records wait and none of them comes, though it is not paused
    and nothing of it is in flight. Clients have been seen to stop fetching a single partition in
    silence (quixio/quix-streams#1124); a new process is what helps.
    """

    def __init__(
        self,
        source: RecordSource,
        ledger: Ledger,
        counters: Counters,
        stall_s: float,
        clock: Clock,
    ) -> None:
        self._source = source
        self._ledger = ledger
        self._counters = counters
        self._stall_s = stall_s
        self._clock = clock
        self._due = clock()
        self._seen: dict[TopicPartition, tuple[int, float]] = {}  # position, since when

    def step(self, paused: bool) -> None:
        """Raises `ExitProcess` for a partition that has stood still for too long."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + EVERY_S
        positions, ends = self._source.positions(), self._source.ends()
        firsts = self._ledger.first_unpublished()
        lags: dict[TopicPartition, Lag] = {}
        for partition in self._ledger.partitions & ends.keys():
            at = firsts.get(partition, positions.get(partition))
            if at is not None:
                end = ends[partition]
                lags[partition] = Lag(max(0, end.stable - at), end.high - end.stable)
        self._counters.lagging(lags, self._source.records_lost())
        if paused:
            self._seen.clear()
            return
        waiting = {p for p, lag in lags.items() if lag.records and p not in firsts}
        self._seen = {p: self._since(p, positions[p], now) for p in waiting if p in positions}
        for partition, (position, since) in self._seen.items():
            if now - since > self._stall_s:
                raise ExitProcess(
                    f"{partition[0]}[{partition[1]}]: no record since offset {position} for "
                    f"{now - since:.0f} s, though {lags[partition].records} wait"
                )

    def _since(self, partition: TopicPartition, position: int, now: float) -> tuple[int, float]:
        before = self._seen.get(partition)
        return before if before is not None and before[0] == position else (position, now)
