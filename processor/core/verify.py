"""Whether a group scored its input exactly once: one pure function over what Kafka holds.

A group may be at work while it is audited, so absence proves something only below what had been
committed before the outputs were read, and presence only above what was committed after:

    committed before  ->  outcomes  ->  committed after  ->  input and its ends

A record below the first without an outcome is lost. An outcome at or above the second is of a
transaction that was torn: its offsets are not committed, so it will come again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

import orjson

from processor.core.encode import REJECTION_HEADER, TOMBSTONE_HEADER
from processor.core.event import Record

Kind = Literal["decided", "rejected", "tombstone", "foreign"]
Committed = Mapping[int, int | None]  # next offsets by partition; None: nothing is committed
Bounds = Mapping[int, tuple[int, int]]  # first and next offset by partition

MOST_FINDINGS = 20


class Given(NamedTuple):
    """An input record. `skipped`: a tombstone of a policy that lets them pass without outcome."""

    partition: int
    offset: int
    skipped: bool = False


class Published(NamedTuple):
    """An output record, and the input record that it is about."""

    topic: str
    partition: int
    offset: int
    input_topic: str
    input_partition: int
    input_offset: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Gaps:
    """What is missing for a reason that is known, so that its absence proves nothing."""

    outputs: frozenset[tuple[str, int]] = frozenset()  # their first records were deleted
    compacted: bool = False  # an output topic gives up a key's older records
    started_late: bool = False  # the group was told not to start at the first record
    given: bool = False  # the input topic holds more than is listed, or held more


@dataclass(frozen=True, slots=True)
class Verdict:
    """Input records counted once each: `input` is the sum of decided, rejected, tombstones, lost,
    waiting and unknown."""

    input: int
    decided: int
    rejected: int
    lost: int
    doubled: int
    reordered: int
    committed: bool
    tombstones: int = 0  # passed on or skipped
    waiting: int = 0  # at or above the committed offset, not yet due
    unknown: int = 0  # without an outcome, which may have been deleted (`Gaps`)
    findings: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.reordered)


def outcome_of(record: Record) -> Published:
    """Which input record an output record is about; of kind `foreign` if we did not write it."""
    kind, text = _statement(record)
    try:
        event = orjson.loads(text or b"")["event"]
        topic, partition, offset = event["topic"], event["partition"], event["offset"]
    except (ValueError, LookupError, TypeError):
        return _published(record, "", -1, -1, "foreign")
    if not (isinstance(topic, str) and _is_offset(partition) and _is_offset(offset)):
        return _published(record, "", -1, -1, "foreign")
    return _published(record, topic, partition, offset, kind)


def verify(
    topic: str,
    given: Iterable[Given],
    outcomes: Iterable[Published],
    committed: Committed,
    ends: Bounds,
    committed_after: Committed | None = None,
    gaps: Gaps | None = None,
) -> Verdict:
    """Compare the records of an input topic with the outcomes in the order of their logs.

    `committed` was read before the outcomes and `committed_after` (default: the same) after them;
    `ends` after both. Outcomes of another input topic are another policy's and are passed over.
    """
    after = committed if committed_after is None else committed_after
    audit = _Audit(topic, after, ends, gaps or Gaps())
    audit.take_input(given)
    for outcome in outcomes:
        audit.take(outcome)
    audit.settle(committed)
    # Of the first reading too, so that nothing waits where it is true: of a group that got to the
    # end in between, the last outcomes were not read.
    return audit.verdict(all(_all_committed(moment, ends) for moment in (committed, after)))


def _statement(record: Record) -> tuple[Kind, bytes | None]:
    headers = dict(record.headers)
    # Headers first: the value of a dead letter is the input's own, and may be anything.
    if REJECTION_HEADER in headers:
        return "rejected", headers[REJECTION_HEADER]
    if TOMBSTONE_HEADER in headers:
        return "tombstone", headers[TOMBSTONE_HEADER]
    return "decided", record.value


def _is_offset(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _published(record: Record, topic: str, partition: int, offset: int, kind: Kind) -> Published:
    return Published(record.topic, record.partition, record.offset, topic, partition, offset, kind)


def _all_committed(committed: Committed, ends: Bounds) -> bool:
    """A partition without a record needs no committed offset."""
    return all(
        committed.get(partition) == end or (committed.get(partition) is None and first == end)
        for partition, (first, end) in ends.items()
    )


# What is known of an input record: one entry of a dictionary each, some 90 MB for a million.
_DUE, _SKIPPED, _ANSWERED = 0, 1, 2

_Lane = tuple[str, int, int]  # output topic and partition, input partition


@dataclass(slots=True)
class _Findings:
    """The first few of each kind; a flood of one does not hide the others."""

    texts: dict[str, list[str]] = field(
        default_factory=lambda: {"lost": [], "doubled": [], "reordered": [], "unknown": []}
    )
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if len(self.texts[kind]) < MOST_FINDINGS:
            self.texts[kind].append(f"{kind}: {text}")

    def first(self) -> tuple[str, ...]:
        mixed = [text for row in zip_longest(*self.texts.values()) for text in row if text]
        kept = set(mixed[:MOST_FINDINGS])
        return tuple(text for texts in self.texts.values() for text in texts if text in kept)


class _Audit:
    def __init__(self, topic: str, after: Committed, ends: Bounds, gaps: Gaps) -> None:
        self._topic, self._after, self._ends, self._gaps = topic, after, ends, gaps
        self._state: dict[int, dict[int, int]] = {}
        self._lowest: dict[_Lane, int] = {}
        self._highest: dict[_Lane, int] = {}
        self._counts: Counter[str] = Counter()
        self._findings = _Findings()

    def take_input(self, given: Iterable[Given]) -> None:
        for partition, offset, skipped in given:
            state = self._state.setdefault(partition, {})
            state[offset] = _SKIPPED if skipped else _DUE
        self._counts["input"] = sum(map(len, self._state.values()))

    def take(self, outcome: Published) -> None:
        if outcome.kind == "foreign":
            self._findings.add("doubled", f"{_place(outcome)}: an outcome of nothing: not ours")
        elif outcome.input_topic == self._topic:
            if fault := self._fault(outcome):
                self._findings.add("doubled", f"{_place(outcome)}: {fault}")
            else:
                self._order(outcome)

    def settle(self, committed: Committed) -> None:
        """What has become of the records that no outcome is about."""
        for partition, state in sorted(self._state.items()):
            due_below = committed.get(partition) or 0
            judged_from = self._judged_from(partition)
            for offset, known in state.items():
                if known == _SKIPPED:
                    self._counts["tombstone" if offset < due_below else "waiting"] += 1
                elif known == _DUE:
                    self._miss(partition, offset, due_below, judged_from)

    def verdict(self, committed: bool) -> Verdict:
        counts, found = self._counts, self._findings
        return Verdict(
            input=counts["input"],
            decided=counts["decided"],
            rejected=counts["rejected"],
            lost=found.counts["lost"],
            doubled=found.counts["doubled"],
            reordered=found.counts["reordered"],
            committed=committed,
            tombstones=counts["tombstone"],
            waiting=counts["waiting"],
            unknown=found.counts["unknown"],
            findings=found.first(),
        )

    def _fault(self, outcome: Published) -> str | None:
        """Why this outcome is one too many; counts it if it is not."""
        partition, offset = outcome.input_partition, outcome.input_offset
        where = f"{self._topic}[{partition}]@{offset}"
        state = self._state.setdefault(partition, {})
        known, (first, end) = state.get(offset), self._ends.get(partition, (0, 0))
        deleted = known is None and offset < first
        if known == _ANSWERED:
            return f"one more outcome of {where}"
        if offset >= end or (known is None and not deleted and not self._gaps.given):
            return f"an outcome of nothing: there is no record {where}"
        if not deleted and offset >= (due_below := self._after.get(partition) or 0):
            return (
                f"an outcome of {where}, but {due_below} is committed: a torn transaction, or the "
                "group was set back; the record will be scored again"
            )
        state[offset] = _ANSWERED
        if known is not None:
            self._counts[outcome.kind] += 1
        return None

    def _order(self, outcome: Published) -> None:
        """Of first outcomes only: those that come again are doubled, and nothing else."""
        offset = outcome.input_offset
        lane = (outcome.topic, outcome.partition, outcome.input_partition)
        self._lowest[lane] = min(offset, self._lowest.get(lane, offset))
        highest = self._highest.setdefault(lane, offset)
        if offset < highest:
            input_ = f"{self._topic}[{outcome.input_partition}]"
            text = f"{_place(outcome)}: {input_}@{offset} comes after {input_}@{highest}"
            self._findings.add("reordered", text)
        self._highest[lane] = max(offset, highest)

    def _miss(self, partition: int, offset: int, due_below: int, judged_from: float) -> None:
        where = f"{self._topic}[{partition}]@{offset}"
        if offset >= due_below:
            self._counts["waiting"] += 1
        elif offset < judged_from:
            self._findings.add("unknown", f"{where}: no outcome, or one that was deleted")
        else:
            self._findings.add("lost", f"{where}: no outcome, but {due_below} is committed")

    def _judged_from(self, partition: int) -> float:
        """From which offset on a missing outcome is a loss.

        A lane is in order: what was deleted from its beginning was about records below the first
        one that is left, and about any record where none is left."""
        if self._gaps.compacted:
            return math.inf
        lanes = [(*output, partition) for output in self._gaps.outputs]
        bounds = [self._lowest.get(lane, math.inf) for lane in lanes]
        if self._gaps.started_late:
            own = [low for lane, low in self._lowest.items() if lane[2] == partition]
            bounds.append(min(own, default=math.inf))
        return max(bounds, default=0)


def _place(outcome: Published) -> str:
    return f"{outcome.topic}[{outcome.partition}]@{outcome.offset}"
