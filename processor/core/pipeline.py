"""Read this file first: records in, outcomes out.

    record --decode--> event --render--> text --encode--> suffix       (any thread but the model's)
    suffixes --pack--> micro-batch --score--> scores                   (the model's thread)
    scores --finish--> decision | rejection                            (any thread)

Live, replay, benchmark, demo and tests all run this one class; they differ in where records come
from, where outcomes go, and who reads the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from processor.core.batch import Budget, MicroBatch, Suffix, pack
from processor.core.decision import (
    Outcome,
    Provenance,
    Rejection,
    Scores,
    Timings,
    Tombstone,
    coordinates,
    decide,
    policy_reference,
    reject,
)
from processor.core.encode import MaxBytes, OutputRecord, attempts, encode_outcome
from processor.core.event import Record, decode_event
from processor.core.policy import Policy, render_suffix
from processor.errors import ConfigError, RejectRecord

TokenIds = tuple[int, ...]


class Tokenizer(Protocol):
    """`policy` is a `Policy.key`, here and in `Scorer`: two versions of a policy may be in use."""

    def encode_all(self, policy: str, texts: Sequence[str]) -> list[TokenIds | RejectRecord]:
        """The suffix tokens of rendered events, or why there are none (`control_token`,
        `too_long`). Many at once, for libraries that use all cores then."""

    def rows(self, policy: str, tokens: int) -> int:
        """Rows that a suffix of so many tokens takes in a forward pass, label rows included."""


class Scorer(Protocol):
    def score(self, batch: MicroBatch) -> list[Scores]:
        """Scores of each event, in order; depends on nothing but the event and its policy."""

    def provenance(self, policy: str) -> Provenance: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A record that is ready for the tokenizer: what the model sees of it, as text."""

    record: Record
    policy: Policy
    text: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A record that is ready for the model."""

    record: Record
    policy: Policy
    suffix: Suffix
    rows: int


Ready = Prepared | Rejection | Tombstone


class Pipeline:
    """Policies, tokenizer and scorer put together. Topics are told apart by their policy."""

    def __init__(
        self,
        policies: Iterable[Policy],
        tokenizer: Tokenizer,
        scorer: Scorer,
        budget: Budget | None = None,
    ) -> None:
        self.policies: Mapping[str, Policy] = by_input_topic(policies)
        self.tokenizer = tokenizer
        self.scorer = scorer
        self.budget = budget or Budget()

    def prepare(self, record: Record) -> Ready:
        return self.prepare_all([record])[0]

    def prepare_all(self, records: Sequence[Record]) -> list[Ready]:
        """What is to be scored of some records, and the outcomes of the others; in their order."""
        read = [self.read(record) for record in records]
        tokens = iter(self.encode_all([item for item in read if isinstance(item, Rendered)]))
        return [self.fit(r, next(tokens)) if isinstance(r, Rendered) else r for r in read]

    def read(self, record: Record) -> Rendered | Rejection | Tombstone:
        """The text that the model sees of a record, under the policy of its topic."""
        policy = self.policies[record.topic]  # a source is given these topics and no others
        if record.value is None and (treatment := policy.spec.event.tombstones) != "reject":
            return Tombstone(
                passed=treatment == "pass",
                event=coordinates(record),
                policy=policy_reference(policy),
            )
        try:
            event = decode_event(record, policy.validate, policy.spec.event.max_bytes)
        except RejectRecord as error:
            return reject(record, error, policy, attempts(record))
        return Rendered(record, policy, render_suffix(policy, event.data))

    def encode_all(self, rendered: Sequence[Rendered]) -> list[TokenIds | RejectRecord]:
        """The suffix tokens of each, or why there are none. Touches the tokenizer only."""
        by_policy: dict[str, list[int]] = {}
        for position, item in enumerate(rendered):
            by_policy.setdefault(item.policy.key, []).append(position)
        found: dict[int, TokenIds | RejectRecord] = {}
        for policy, positions in by_policy.items():
            encoded = self.tokenizer.encode_all(policy, [rendered[p].text for p in positions])
            found |= zip(positions, encoded, strict=True)
        return [found[position] for position in range(len(rendered))]

    def fit(self, item: Rendered, ids: TokenIds | RejectRecord) -> Prepared | Rejection:
        """What fits a micro-batch."""
        record, policy = item.record, item.policy
        if isinstance(ids, RejectRecord):
            return reject(record, ids, policy, attempts(record))
        rows, most = self.tokenizer.rows(policy.key, len(ids)), self.budget.max_rows
        if rows > most:
            error = RejectRecord("too_long", f"{rows} rows, batch.max_rows is {most}")
            return reject(record, error, policy, attempts(record))
        return Prepared(record, policy, Suffix(policy.key, ids), rows)

    def swap(self, policy: Policy) -> None:
        """Prepare records under this version of a policy from now on. What was prepared before
        keeps its version to the end, so tokenizer and scorer must know both until then.

        Raises `ConfigError` where the version is no successor of the one in use."""
        topic = policy.spec.topics.input
        if topic not in self.policies:
            raise ConfigError(str(policy.path), "topics.input", topic, "is not read: restart")
        check_successor(self.policies[topic], policy)
        self.policies = {**self.policies, topic: policy}  # replaced whole, for other readers

    def pack(self, prepared: Sequence[Prepared]) -> list[Sequence[Prepared]]:
        ranges = pack([item.rows for item in prepared], self.budget)
        return [prepared[r.start : r.stop] for r in ranges]

    def score(self, prepared: Sequence[Prepared]) -> list[Scores]:
        return self.scorer.score(MicroBatch(tuple(item.suffix for item in prepared)))

    def control(self, item: Prepared) -> Prepared:
        """The least that any event of the policy has, its first token: a scorer that fails on
        this too fails for no fault of the event."""
        suffix = Suffix(item.suffix.policy, item.suffix.token_ids[:1])
        return replace(item, suffix=suffix)

    def finish(self, item: Prepared, scores: Scores, timings: Timings) -> Outcome:
        try:
            return decide(
                item.policy,
                item.record,
                scores,
                self.scorer.provenance(item.policy.key),
                len(item.suffix.token_ids),
                timings,
            )
        except RejectRecord as error:
            return self.reject(item, error)

    def reject(self, item: Prepared, error: RejectRecord) -> Rejection:
        return reject(item.record, error, item.policy, attempts(item.record))

    def encode(
        self, outcome: Outcome, record: Record, max_bytes: MaxBytes
    ) -> tuple[Outcome, OutputRecord | None]:
        """See `encode_outcome`."""
        return encode_outcome(outcome, record, self.policies[record.topic].spec.topics, max_bytes)

    def run(self, records: Sequence[Record], now: Callable[[], float]) -> list[Outcome]:
        """All outcomes of some records, in their order, in one thread. `now` gives seconds."""
        begun = now()
        outcomes: list[Outcome | Prepared] = [*self.prepare_all(records)]
        waiting = [item for item in outcomes if isinstance(item, Prepared)]
        finished: list[Outcome] = []
        for batch in self.pack(waiting):
            start = now()
            scores = self.score(batch)
            timings = Timings(
                wait_ms=1e3 * (start - begun),
                score_ms=1e3 * (now() - start),
                batch_events=len(batch),
            )
            finished += [
                self.finish(item, s, timings) for item, s in zip(batch, scores, strict=True)
            ]
        decided = iter(finished)
        return [next(decided) if isinstance(item, Prepared) else item for item in outcomes]


def check_successor(old: Policy, new: Policy) -> None:
    """Raises `ConfigError` where a version changes what only a start can change: topics are
    subscribed to and checked then, and whose it is decides what it may share memory with."""
    before = _fixed_at_start(old)
    for key, value in _fixed_at_start(new).items():
        if value != before[key]:
            raise ConfigError(str(new.path), key, value, f"was {before[key]!r}: needs a restart")


def _fixed_at_start(policy: Policy) -> dict[str, object]:
    spec = policy.spec
    topics = {f"topics.{kind}": topic for kind, topic in spec.topics.model_dump().items()}
    return {"name": spec.name, "tenant": spec.tenant, "share_prefix": spec.share_prefix, **topics}


def by_input_topic(policies: Iterable[Policy]) -> dict[str, Policy]:
    """Raises `ConfigError` where two policies share a name or an input topic, for one of the two
    would never be asked; and where what is published comes back: a rejection would be rejected
    again for ever."""
    found: dict[str, Policy] = {}
    names: set[str] = set()
    for policy in policies:
        topic = policy.spec.topics.input
        if policy.name in names:
            remedy = "another policy has this name: rename one"
            raise ConfigError(str(policy.path), "name", policy.name, remedy)
        if topic in found:
            remedy = f"policy {found[topic].name!r} reads this topic: one policy per topic"
            raise ConfigError(str(policy.path), "topics.input", topic, remedy)
        found[topic] = policy
        names.add(policy.name)
    for policy in found.values():
        _check_no_way_back(policy, found)
    return found


def _check_no_way_back(policy: Policy, by_input: Mapping[str, Policy]) -> None:
    topics = policy.spec.topics
    if reader := by_input.get(topics.dead_letter):
        remedy = f"policy {reader.name!r} reads this topic: dead letters need one of their own"
        raise ConfigError(str(policy.path), "topics.dead_letter", topics.dead_letter, remedy)
    follower, passed = by_input.get(topics.output), {policy.name}
    while follower is not None:
        if follower.name in passed:
            remedy = f"its decisions come back through policy {follower.name!r}: break the circle"
            raise ConfigError(str(policy.path), "topics.output", topics.output, remedy)
        passed.add(follower.name)
        follower = by_input.get(follower.spec.topics.output)
