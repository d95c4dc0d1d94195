"""What the encoder publishes says which record it is about; nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from processor.core.decision import (
    Scores,
    Tombstone,
    coordinates,
    decide,
    policy_reference,
    reject,
)
from processor.core.encode import REJECTION_HEADER, TOMBSTONE_HEADER
from processor.core.event import Record
from processor.core.policy import Policy
from processor.core.verify import Published, outcome_of
from processor.errors import RejectRecord
from tests.core.builders import PROVENANCE, TIMINGS, make_policy, published, record


def read_back(output: Any) -> Published:
    return outcome_of(Record(output.topic, 2, 9, output.key, output.value, output.headers))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(tmp_path_factory.mktemp("policy"))


def test_a_decision_names_its_record(policy: Policy) -> None:
    source = record(offset=7, partition=3)
    made = decide(policy, source, Scores((0.0, -1.0, -2.0)), PROVENANCE, 3, TIMINGS)
    assert read_back(published(made, source)) == Published("out", 2, 9, "in", 3, 7, "decided")


def test_a_rejection_names_its_record_whatever_its_value_says(policy: Policy) -> None:
    misleading = json.dumps({"event": {"topic": "x", "partition": 1, "offset": 1}}).encode()
    source = record(misleading, offset=7, partition=3)
    made = reject(source, RejectRecord("schema", "no"), policy)
    assert read_back(published(made, source)) == Published("dead", 2, 9, "in", 3, 7, "rejected")


def test_a_tombstone_names_its_record(policy: Policy) -> None:
    source = record(None, offset=7, partition=3)
    made = Tombstone(passed=True, event=coordinates(source), policy=policy_reference(policy))
    assert read_back(published(made, source)) == Published("out", 2, 9, "in", 3, 7, "tombstone")


@pytest.mark.parametrize(
    ("value", "headers"),
    [
        (None, ()),
        (b"", ()),
        (b"\xff", ()),
        (b"[1]", ()),
        (b'{"event": 7}', ()),
        (b'{"event": {"topic": "in", "partition": 0}}', ()),
        (b'{"event": {"topic": "in", "partition": "0", "offset": 1}}', ()),
        (b'{"event": {"topic": "in", "partition": true, "offset": 1}}', ()),
        (b'{"event": {"topic": null, "partition": 0, "offset": 1}}', ()),
        (b'{"event": {"topic": "in", "partition": 0, "offset": -1}}', ()),
        (b'{"event": {"topic": "in", "partition": 0, "offset": 99999999999999999999}}', ()),
        (b"{}", ((REJECTION_HEADER, None),)),
        (b"{}", ((REJECTION_HEADER, b"{"),)),
        (None, ((TOMBSTONE_HEADER, b"x"),)),
    ],
)
def test_anything_else_is_foreign(value: bytes | None, headers: Any) -> None:
    found = outcome_of(Record("out", 1, 2, b"k", value, headers))
    assert found == Published("out", 1, 2, "", -1, -1, "foreign")
