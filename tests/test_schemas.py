"""The published schemas are those of the types, and what we publish holds to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.config import KafkaSettings, Settings
from processor.core.decision import Decision, Scores, decide, reject
from processor.core.event import Reason
from processor.core.policy import Policy
from processor.errors import RejectRecord
from processor.schema import outdated_schemas, published_schemas, schema_texts, write_schemas
from tests.core.builders import PROVENANCE, SPEC, TIMINGS, make_policy, merged, published, record

FOLDER = Path(__file__).parent.parent / "schemas"


def validator(name: str) -> Any:
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    return jsonschema_rs.Draft202012Validator(json.loads(text), offline=True)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(tmp_path_factory.mktemp("policy"))


def test_the_files_are_up_to_date() -> None:
    assert outdated_schemas(FOLDER) == [], "run `make schemas`"


def test_writing_and_comparing(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert outdated_schemas(folder) == sorted(schema_texts(), key=list(schema_texts()).index)
    write_schemas(folder)
    assert outdated_schemas(folder) == []
    (folder / "policy.json").write_text("{}\n", encoding="utf-8")
    assert outdated_schemas(folder) == ["policy.json"]


@pytest.mark.parametrize("name", ["decision", "rejection", "policy", "settings"])
def test_each_is_a_schema_of_its_draft(name: str) -> None:
    schema = published_schemas()[name]
    jsonschema_rs.Draft202012Validator(schema, offline=True)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"]
    text = schema_texts()[f"{name}.json"]
    assert text.endswith("}\n")
    assert text == json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


@given(
    st.lists(st.floats(-1e300, 0) | st.just(float("-inf")), min_size=2, max_size=2),
    st.none() | st.binary(max_size=20),
    st.integers(-1, 2**63 - 1),
)
def test_decisions_hold_to_their_schema(
    policy: Policy, logprobs: list[float], key: bytes | None, number: int
) -> None:
    source = record(key=key, offset=max(number, 0), timestamp_ms=number)
    scores = Scores((0.0, *logprobs))
    decision = decide(policy, source, scores, PROVENANCE, 5, TIMINGS)
    value = published(decision, source).value
    assert value is not None
    assert b"null" not in value.replace(b'"key":null', b"")
    validator("decision").validate(json.loads(value))
    assert Decision.model_validate_json(value) == decision


@pytest.mark.parametrize("reason", get_args(Reason))
def test_rejections_hold_to_their_schema(policy: Policy, reason: str) -> None:
    rejection = reject(record(None), RejectRecord(reason, "why"), policy)
    (_, why) = published(rejection, record(None)).headers[-1]
    assert why is not None
    validator("rejection").validate(json.loads(why))


POLICIES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"labels": ["a", {"name": "b", "text": "B", "action": "c", "min_score": 0.5}]}, True),
    ({"calibration": {"temperature": 2, "bias": {"allow": -1}}}, True),
    ({"labels": ["a"]}, False),
    ({"labels": ["a", {"nom": "b"}]}, False),
    ({"colour": "red"}, False),
    ({"event": {"schema": None}}, False),
    ({"calibration": {"temperature": 0}}, False),
    ({"topics": {"input": "a b"}}, False),
]


@pytest.mark.parametrize(("changes", "valid"), POLICIES, ids=range(len(POLICIES)))
def test_the_policy_schema_agrees_with_the_loader(changes: dict[str, Any], valid: bool) -> None:
    assert validator("policy").is_valid(merged(SPEC, changes)) == valid


def test_settings_hold_to_their_schema() -> None:
    settings = Settings(kafka=KafkaSettings(client={"sasl.password": "x"}))
    validator("settings").validate(json.loads(settings.model_dump_json()))
    assert not validator("settings").is_valid({"kafak": {}})
    assert not validator("settings").is_valid({"kafka": {"gruop": "x"}})


def test_the_settings_schema_does_not_depend_on_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = schema_texts()["settings.json"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setattr("platform.node", lambda: "processor-7")
    assert schema_texts()["settings.json"] == before
