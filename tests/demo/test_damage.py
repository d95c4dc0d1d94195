"""Every damage is rejected for the reason that it is named after."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import orjson
import pytest

from processor.core.event import Reason, Record, decode_event
from processor.core.policy import Policy, load_policy
from processor.demo.damage import DAMAGES, reason
from processor.errors import RejectRecord

POLICIES = Path(__file__).parents[2] / "policies"
# What the pipeline, the tokenizer or the model finds, whatever the producer sends.
NOT_OF_THE_VALUE = {
    *("control_token", "too_long", "scores_not_finite", "scorer_failed", "output_too_large")
}


@pytest.fixture(scope="module", params=["orders", "messages", "telemetry", "tools", "routes"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return load_policy(POLICIES / request.param)


@pytest.fixture(scope="module")
def good(policy: Policy) -> bytes:
    line = (POLICIES / policy.name / "sample.jsonl").read_bytes().splitlines()[0]
    return orjson.dumps(orjson.loads(line)["event"])


def _decode(policy: Policy, value: bytes | None) -> None:
    record = Record(policy.spec.topics.input, 0, 0, b"key", value)
    decode_event(record, policy.validate, policy.spec.event.max_bytes)


def test_the_good_value_is_good(policy: Policy, good: bytes) -> None:
    _decode(policy, good)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_rejected_for_its_reason(policy: Policy, good: bytes, name: str) -> None:
    with pytest.raises(RejectRecord) as caught:
        _decode(policy, DAMAGES[name](good))
    assert caught.value.reason == reason(name)


def test_every_reason_that_a_value_can_cause_has_a_damage() -> None:
    assert {reason(name) for name in DAMAGES} == set(get_args(Reason)) - NOT_OF_THE_VALUE
