"""What is published for an outcome, and what becomes of one that its topic does not take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.core.decision import Decision, Outcome, Rejection, Tombstone
from processor.core.encode import (
    REJECTION_HEADER,
    TOMBSTONE_HEADER,
    OutputRecord,
    attempts,
    encode_outcome,
)
from processor.core.event import Record
from processor.core.pipeline import Pipeline, Prepared, by_input_topic
from processor.core.policy import Policy, Topics
from processor.errors import ConfigError
from tests.core.builders import (
    TIMINGS,
    CharTokenizer,
    LengthScorer,
    any_size,
    make_policy,
    record,
)

TOPICS = Topics(input="in", output="out", dead_letter="dead")


def outcome_of(policy: Policy, source: Record) -> Outcome:
    pipeline = Pipeline([policy], CharTokenizer(), LengthScorer())
    item = pipeline.prepare(source)
    if isinstance(item, Prepared):
        return pipeline.finish(item, pipeline.score([item])[0], TIMINGS)
    return item


def encoded(
    policy: Policy, source: Record, max_bytes: Callable[[str], int] = any_size
) -> tuple[Outcome, OutputRecord | None]:
    return encode_outcome(outcome_of(policy, source), source, TOPICS, max_bytes)


def limits(**sizes: int) -> Callable[[str], int]:
    return lambda topic: sizes.get(topic, 10**9)


def test_c11_a_decision_too_large_for_its_topic_is_rejected(policy: Policy) -> None:
    source = record(key=b"k" * 500)
    _, whole = encoded(policy, source)
    assert whole is not None
    fits, output = encoded(policy, source, limits(out=whole.size))
    assert isinstance(fits, Decision)
    assert output == whole
    outcome, letter = encoded(policy, source, limits(out=whole.size - 1))
    assert isinstance(outcome, Rejection)
    assert (outcome.reason, outcome.value_omitted) == ("output_too_large", False)
    assert outcome.detail == f"a decision of {whole.size} bytes; out takes {whole.size - 1}"
    assert letter is not None
    assert (letter.topic, letter.key, letter.value) == ("dead", source.key, source.value)


@pytest.mark.parametrize(
    "large",
    [{"value": b"x" * 5000}, {"key": b"k" * 5000}, {"headers": (("h", b"x" * 5000),)}],
    ids=["value", "key", "headers"],
)
def test_c13_a_dead_letter_too_large_for_its_topic_says_where_the_record_is(
    policy: Policy, large: dict[str, Any]
) -> None:
    source = record(**{"value": b"{", **large}, offset=7)
    outcome, letter = encoded(policy, source, limits(dead=2000))
    assert letter is not None
    assert letter.size <= 2000
    assert (letter.topic, letter.key, letter.value) == ("dead", None, None)
    [(name, why)] = letter.headers
    assert name == REJECTION_HEADER
    shown = json.loads(why or b"")
    assert shown["value_omitted"]
    assert (shown["event"]["topic"], shown["event"]["offset"]) == ("in", 7)
    assert isinstance(outcome, Rejection)
    assert outcome == Rejection.model_validate(shown)


@given(
    st.binary(max_size=3000),
    st.none() | st.binary(max_size=3000),
    st.lists(st.tuples(st.text(max_size=40), st.none() | st.binary(max_size=400)), max_size=3),
    st.integers(1500, 4000),
)
def test_whatever_comes_in_what_goes_out_fits(
    policy: Policy,
    value: bytes,
    key: bytes | None,
    headers: list[tuple[str, bytes | None]],
    limit: int,
) -> None:
    source = record(value, key=key, headers=tuple(headers))
    outcome, output = encoded(policy, source, lambda _: limit)
    assert output is not None
    assert output.size <= limit
    assert isinstance(outcome, Rejection) == (output.topic == "dead")


@pytest.mark.parametrize(("treatment", "passed"), [("skip", False), ("pass", True)])
def test_c1_a_tombstone_is_skipped_or_passed_on(
    tmp_path: Path, treatment: str, passed: bool
) -> None:
    event = {"schema": "event.json", "fields": ["id"], "tombstones": treatment}
    policy = make_policy(tmp_path, event=event)
    source = record(None, headers=(("h", b"1"),))
    outcome, output = encoded(policy, source)
    assert isinstance(outcome, Tombstone)
    assert outcome.passed == passed
    if not passed:
        assert output is None
        return
    assert output is not None
    assert (output.topic, output.key, output.value) == ("out", source.key, None)
    assert output.headers[0] == ("h", b"1")
    name, text = output.headers[1]
    assert name == TOMBSTONE_HEADER
    assert Tombstone.model_validate_json(text or b"") == outcome


def test_c1_a_tombstone_is_rejected_unless_told_otherwise(policy: Policy) -> None:
    outcome, output = encoded(policy, record(None))
    assert isinstance(outcome, Rejection)
    assert outcome.reason == "tombstone"
    assert output is not None
    assert (output.topic, output.value) == ("dead", None)
    empty, _ = encoded(policy, record(b""))
    assert isinstance(empty, Rejection)
    assert empty.reason == "empty_payload"


@pytest.mark.parametrize(
    ("before", "count"),
    [
        (None, 1),
        (b'{"attempts": 1}', 2),
        (b'{"attempts": 6}', 7),
        (b"{}", 2),
        (b"\xff", 2),
        (b"[]", 2),
        (b'{"attempts": -5}', 2),
        (b'{"attempts": true}', 2),
    ],
)
def test_c14_a_dead_letter_counts_its_attempts(
    policy: Policy, before: bytes | None, count: int
) -> None:
    headers = () if before is None else ((REJECTION_HEADER, before),)
    source = record(b"{", headers=headers)
    assert attempts(source) == count
    outcome, output = encoded(policy, source)
    assert isinstance(outcome, Rejection)
    assert outcome.attempts == count
    assert output is not None
    assert [name for name, _ in output.headers] == [REJECTION_HEADER]


def with_topics(folder: Path, name: str, *topics: str) -> Policy:
    named = dict(zip(("input", "output", "dead_letter"), topics, strict=True))
    return make_policy(folder / name, name=name, topics=named)


def test_c14_dead_letters_do_not_come_back(tmp_path: Path) -> None:
    first = with_topics(tmp_path, "first", "a", "b", "dead")
    reader = with_topics(tmp_path, "reader", "dead", "c", "dead-2")
    with pytest.raises(ConfigError, match=r"dead_letter = 'dead': policy 'reader' reads this"):
        by_input_topic([first, reader])


def test_c14_decisions_may_go_on_but_not_in_a_circle(tmp_path: Path) -> None:
    first = with_topics(tmp_path, "first", "a", "b", "dead-1")
    second = with_topics(tmp_path, "second", "b", "c", "dead-2")
    third = with_topics(tmp_path, "third", "c", "a", "dead-3")
    assert len(by_input_topic([first, second])) == 2
    with pytest.raises(ConfigError, match=r"topics\.output = 'b': its decisions come back"):
        by_input_topic([first, second, third])
