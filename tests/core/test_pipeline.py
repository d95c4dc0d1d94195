"""The pipeline with stand-ins for the model: one outcome per record, in order."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.core.batch import Budget, MicroBatch
from processor.core.decision import Decision, Outcome, Rejection, Scores
from processor.core.event import Record
from processor.core.pipeline import Pipeline, Prepared
from processor.core.policy import Policy
from processor.errors import ConfigError, RejectRecord
from tests.core.builders import CharTokenizer, LengthScorer, any_size, make_policy, record

VALUES: list[tuple[Any, str]] = [
    (b'{"id": 1}', "allow"),
    (b'{"id": 1, "note": "ab"}', "allow"),
    (None, "tombstone"),
    (b"", "empty_payload"),
    (b'{"id": 1, "id": 2}', "duplicate_key"),
    (b'{"id": "x"}', "schema"),
    (b'{"id": 1, "amount": 1e999}', "not_finite"),
    (b'{"id": 1, "note": "' + b"x" * 100 + b'"}', "too_long"),
    (b'{"id": 1, "note": "#"}', "control_token"),
    (b'{"id": 1, "note": "?"}', "scores_not_finite"),
]


class StrictTokenizer(CharTokenizer):
    """Takes `#` for a control token."""

    def encode(self, policy: str, text: str) -> tuple[int, ...]:
        if "#" in text:
            raise RejectRecord("control_token", "the text holds a control token")
        return super().encode(policy, text)


class SickScorer(LengthScorer):
    """Returns NaN for an event that holds a `?`."""

    def score(self, batch: MicroBatch) -> list[Scores]:
        good = super().score(batch)
        nan = Scores((float("nan"),) * 3)
        return [
            nan if ord("?") in suffix.token_ids else scores
            for suffix, scores in zip(batch.suffixes, good, strict=True)
        ]


def make_pipeline(*policies: Policy, budget: Budget | None = None) -> Pipeline:
    return Pipeline(policies, StrictTokenizer(), SickScorer(), budget or Budget(100, 3))


def run(pipeline: Pipeline, records: list[Record]) -> list[Outcome]:
    clock = itertools.count()
    return pipeline.run(records, lambda: float(next(clock)))


def kind(outcome: Outcome) -> str:
    return outcome.reason if isinstance(outcome, Rejection) else "decision"


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=[v[1] for v in VALUES])
def test_each_kind_of_record_has_its_outcome(policy: Policy, value: Any, expected: str) -> None:
    (outcome,) = run(make_pipeline(policy), [record(value)])
    assert kind(outcome) == ("decision" if expected == "allow" else expected)
    assert outcome.policy is not None
    assert outcome.policy.fingerprint == policy.fingerprint


@given(st.lists(st.sampled_from(VALUES), max_size=20), st.integers(1, 4))
def test_one_outcome_per_record_in_order(
    policy: Policy, values: list[tuple[Any, str]], max_events: int
) -> None:
    records = [record(value, offset=i) for i, (value, _) in enumerate(values)]
    pipeline = make_pipeline(policy, budget=Budget(100, max_events))
    outcomes = run(pipeline, records)
    assert [outcome.event.offset for outcome in outcomes] == list(range(len(records)))
    assert [kind(outcome) for outcome in outcomes] == [
        "decision" if expected == "allow" else expected for _, expected in values
    ]
    for source, outcome in zip(records, outcomes, strict=True):
        _, output = pipeline.encode(outcome, source, any_size)
        assert output is not None
        dead = isinstance(outcome, Rejection)
        assert output.topic == ("dead" if dead else "out")
        assert output.key == source.key
        assert not dead or output.value == source.value


def test_an_outcome_does_not_depend_on_its_batch_mates(policy: Policy) -> None:
    records = [record({"id": i, "note": "n" * i}, offset=i) for i in range(9)]

    def decisions(max_events: int) -> list[dict[str, Any]]:
        outcomes = run(make_pipeline(policy, budget=Budget(100, max_events)), records)
        return [outcome.model_dump(exclude={"timings"}) for outcome in outcomes]

    assert decisions(1) == decisions(2) == decisions(9)


def test_micro_batches_keep_to_the_budget(policy: Policy) -> None:
    scorer = LengthScorer()
    pipeline = Pipeline([policy], CharTokenizer(), scorer, Budget(30, 2))
    run(pipeline, [record({"id": i}, offset=i) for i in range(5)])
    assert [len(batch) for batch in scorer.batches] == [2, 2, 1]


def test_the_row_budget_is_inclusive(policy: Policy) -> None:
    rows = len('{"id":1}') + CharTokenizer.label_rows
    assert isinstance(make_pipeline(policy, budget=Budget(rows)).prepare(record()), Prepared)
    rejection = make_pipeline(policy, budget=Budget(rows - 1)).prepare(record())
    assert isinstance(rejection, Rejection)
    assert rejection.detail == f"{rows} rows, batch.max_rows is {rows - 1}"


def test_timings_are_of_the_micro_batch(policy: Policy) -> None:
    outcomes = run(make_pipeline(policy), [record(offset=i) for i in range(4)])
    timings = [o.timings.model_dump() for o in outcomes if isinstance(o, Decision)]
    first = {"wait_ms": 1000.0, "score_ms": 1000.0, "batch_events": 3}
    assert timings == [first] * 3 + [{"wait_ms": 3000.0, "score_ms": 1000.0, "batch_events": 1}]


def test_each_topic_has_its_policy(tmp_path: Path, policy: Policy) -> None:
    topics = {"input": "in2", "output": "out2", "dead_letter": "dead2"}
    other = make_policy(tmp_path, name="other", topics=topics)
    pipeline = make_pipeline(policy, other)
    records = [record(), record(topic="in2"), record(None, topic="in2")]
    outcomes = run(pipeline, records)
    assert [outcome.policy.name for outcome in outcomes] == ["orders", "other", "other"]
    outputs = [pipeline.encode(*pair, any_size)[1] for pair in zip(outcomes, records, strict=True)]
    assert [output.topic for output in outputs if output] == ["out", "out2", "dead2"]


def test_two_policies_must_differ_in_name_and_input(tmp_path: Path, policy: Policy) -> None:
    same_topic = make_policy(tmp_path / "a", name="other")
    with pytest.raises(ConfigError, match=r"topics\.input = 'in': policy 'orders' reads this"):
        make_pipeline(policy, same_topic)
    topics = {"input": "in2", "output": "out2", "dead_letter": "dead2"}
    same_name = make_policy(tmp_path / "b", topics=topics)
    with pytest.raises(ConfigError, match="name = 'orders': another policy has this name"):
        make_pipeline(policy, same_name)


def test_nothing_in_nothing_out(policy: Policy) -> None:
    assert run(make_pipeline(policy), []) == []
