"""From scores to a decision, and from an outcome to a record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from processor.core.decision import (
    Decision,
    Scores,
    Timings,
    calibrated,
    coordinates,
    decide,
    reject,
)
from processor.core.encode import REJECTION_HEADER
from processor.core.policy import Policy
from processor.errors import RejectRecord
from tests.core.builders import PROVENANCE, TIMINGS, make_policy, published, record

NAN, INF = math.nan, math.inf


def decided(policy: Policy, *logprobs: float) -> Decision:
    return decide(policy, record(), Scores(logprobs), PROVENANCE, 5, TIMINGS)


def logs(*scores: float) -> list[float]:
    return [math.log(score) if score else -INF for score in scores]


def test_a_decision_says_everything(policy: Policy) -> None:
    decision = decide(
        policy, record(offset=9, timestamp_ms=12), Scores((-3.0, 0.0, -INF)), PROVENANCE, 5, TIMINGS
    )
    top = 1 / (1 + math.exp(-3))
    assert decision.label == decision.action == "block"
    assert decision.scores == pytest.approx({"allow": 1 - top, "block": top, "hold": 0.0})
    assert list(decision.scores) == ["allow", "block", "hold"]
    assert decision.margin == pytest.approx(2 * top - 1)
    assert decision.event == coordinates(record(offset=9, timestamp_ms=12))
    assert decision.policy.model_dump() == {
        "name": "orders",
        "version": "1",
        "fingerprint": policy.fingerprint,
    }
    assert decision.model.model_dump() == {
        "name": "tiny",
        "fingerprint": "m" * 64,
        "numerics": "n" * 64,
    }
    assert (decision.prefix_tokens, decision.suffix_tokens) == (7, 5)
    assert decision.timings == TIMINGS


ACTIONS: list[tuple[str, dict[str, Any], list[float], str, str]] = [
    ("clear", {}, logs(0.1, 0.8, 0.1), "block", "block"),
    ("tie of two: the first named", {}, logs(0.4, 0.4, 0.2), "allow", "review"),
    ("tie of the last two", {}, logs(0.2, 0.4, 0.4), "block", "review"),
    ("tie of all", {}, [0.0, 0.0, 0.0], "allow", "review"),
    ("tie, but every margin is enough", {"thresholds": {"review_below_margin": 0}},
     [0.0, 0.0, -INF], "allow", "allow"),
    ("a margin equal to the threshold is enough", {"thresholds": {"review_below_margin": 1.0}},
     logs(1.0, 0.0, 0.0), "allow", "allow"),
    ("a margin below it is not", {"thresholds": {"review_below_margin": 0.51}},
     logs(0.75, 0.25, 0.0), "allow", "review"),
    ("the review action has a name", {"thresholds": {"review_action": "ask"}},
     [0.0, 0.0, 0.0], "allow", "ask"),
    ("a score equal to the label's minimum is enough",
     {"labels": [{"name": "a", "min_score": 1.0}, "b"]}, logs(1.0, 0.0), "a", "a"),
    ("a score below it is not",
     {"labels": [{"name": "a", "min_score": 0.76}, "b"]}, logs(0.75, 0.25), "a", "review"),
    ("the other label's minimum does not count",
     {"labels": [{"name": "a", "min_score": 1.0}, "b"]}, logs(0.25, 0.75), "b", "b"),
    ("the action is not the label",
     {"labels": [{"name": "a", "action": "call"}, "b"]}, logs(0.75, 0.25), "a", "call"),
    ("a bias moves the decision", {"calibration": {"bias": {"hold": 9.0}}},
     logs(0.4, 0.4, 0.2), "hold", "hold"),
    ("a high temperature takes the margin away", {"calibration": {"temperature": 100.0}},
     logs(0.75, 0.2, 0.05), "allow", "review"),
    ("a tiny temperature leaves one label", {"calibration": {"temperature": 1e-320}},
     logs(0.4, 0.4001, 0.1999), "block", "block"),
    ("one label that is possible", {}, [-INF, -INF, -700.0], "hold", "hold"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "logprobs", "label", "action"),
    [c[1:] for c in ACTIONS],
    ids=[c[0] for c in ACTIONS],
)
def test_label_and_action(
    tmp_path: Path, changes: dict[str, Any], logprobs: list[float], label: str, action: str
) -> None:
    decision = decided(make_policy(tmp_path, **changes), *logprobs)
    assert (decision.label, decision.action) == (label, action)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("others", [0.0, -INF, INF, NAN])
@pytest.mark.parametrize("value", [NAN, INF])
def test_scores_that_are_not_finite_are_rejected(
    policy: Policy, value: float, others: float, place: int
) -> None:
    logprobs = [others] * 3
    logprobs[place] = value
    with pytest.raises(RejectRecord) as caught:
        decided(policy, *logprobs)
    assert caught.value.reason == "scores_not_finite"


def test_some_label_must_be_possible(policy: Policy) -> None:
    with pytest.raises(RejectRecord, match="scores_not_finite"):
        decided(policy, -INF, -INF, -INF)


def test_a_score_for_each_label_is_needed(policy: Policy) -> None:
    with pytest.raises(ValueError, match="zip"):
        decided(policy, 0.0, 0.0)


@given(
    st.lists(st.floats(-200, 0) | st.just(-INF), min_size=3, max_size=3),
    st.floats(0.05, 20),
    st.lists(st.floats(-5, 5), min_size=3, max_size=3),
)
def test_calibration_is_a_softmax(
    tmp_path_factory: pytest.TempPathFactory,
    logprobs: list[float],
    temperature: float,
    bias: list[float],
) -> None:
    assume(max(logprobs) > -INF)
    names = ["allow", "block", "hold"]
    calibration = {"temperature": temperature, "bias": dict(zip(names, bias, strict=True))}
    policy = make_policy(tmp_path_factory.mktemp("p"), calibration=calibration)
    values = (np.array(logprobs) + np.array(bias)) / temperature
    weights = np.exp(values - values.max())
    assert calibrated(policy, logprobs) == pytest.approx(list(weights / weights.sum()), abs=1e-12)


@given(st.lists(st.floats(-1e308, 0) | st.just(-INF), min_size=3, max_size=3))
def test_decisions_are_sane_for_all_finite_scores(policy: Policy, logprobs: list[float]) -> None:
    assume(max(logprobs) > -INF)
    decision = decided(policy, *logprobs)
    scores = list(decision.scores.values())
    assert math.fsum(scores) == pytest.approx(1)
    assert all(0 <= score <= 1 for score in scores)
    assert decision.scores[decision.label] == max(scores)
    assert decision.margin == max(scores) - sorted(scores)[-2] >= 0
    assert decided(policy, *logprobs) == decision


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", ["scores", "margin", "timings"])
def test_what_json_cannot_say_cannot_be_built(policy: Policy, place: str, value: float) -> None:
    good = decided(policy, 0.0, -1.0, -2.0)
    bad: dict[str, Any] = {
        "scores": {"allow": value},
        "margin": value,
        "timings": {"wait_ms": value, "score_ms": 0.0, "batch_events": 1},
    }
    with pytest.raises(ValidationError, match="finite"):
        Decision.model_validate(good.model_dump() | {place: bad[place]})


def test_timings_are_finite() -> None:
    with pytest.raises(ValidationError, match="finite"):
        Timings(wait_ms=NAN, score_ms=0.0, batch_events=1)


def test_an_unknown_reason_is_a_bug(policy: Policy) -> None:
    with pytest.raises(ValidationError):
        reject(record(), RejectRecord("dislike", "no"), policy)


KEYS = [
    (None, None, "utf-8"),
    (b"", "", "utf-8"),
    (b"order-1", "order-1", "utf-8"),
    ("é\0".encode(), "é\0", "utf-8"),
    (b"\x83", "gw==", "base64"),
    (b"\xed\xa0\x80", "7aCA", "base64"),
]


@pytest.mark.parametrize(("key", "text", "encoding"), KEYS, ids=range(len(KEYS)))
def test_keys_are_text_or_base64_in_json_and_bytes_in_kafka(
    policy: Policy, key: bytes | None, text: str | None, encoding: str
) -> None:
    source = record(key=key)
    decision = decide(policy, source, Scores((0.0, -1.0, -2.0)), PROVENANCE, 5, TIMINGS)
    assert (decision.event.key, decision.event.key_encoding) == (text, encoding)
    assert published(decision, source).key == key
    rejection = reject(source, RejectRecord("tombstone", "none"), policy)
    assert published(rejection, source).key == key


HEADERS = (("trace", b"\xff\0"), ("trace", b"2"), ("empty", None))
STALE = (REJECTION_HEADER, b"an earlier reason")


def test_a_decision_carries_headers_over(policy: Policy) -> None:
    source = record(headers=(*HEADERS, STALE))
    decision = decided(policy, 0.0, -1.0, -2.0)
    output = published(decision, source)
    assert (output.topic, output.headers) == ("out", HEADERS)
    assert output.value is not None
    assert Decision.model_validate_json(output.value) == decision


@pytest.mark.parametrize("value", [None, b"", b"\xff\xfe", b'{"a":NaN}', b"\0" * 1000])
def test_a_dead_letter_keeps_the_bytes_and_says_why(policy: Policy, value: bytes | None) -> None:
    source = record(value, headers=(STALE, *HEADERS), offset=3)
    rejection = reject(source, RejectRecord("not_json", "why: é"), policy)
    output = published(rejection, source)
    assert (output.topic, output.value, output.headers[:-1]) == ("dead", value, HEADERS)
    name, why = output.headers[-1]
    assert name == REJECTION_HEADER
    assert why is not None
    assert json.loads(why) == {
        "reason": "not_json",
        "detail": "why: é",
        "event": coordinates(source).model_dump(),
        "policy": {"name": "orders", "version": "1", "fingerprint": policy.fingerprint},
        "attempts": 1,
        "value_omitted": False,
    }
