"""Loading a policy: every mistake is named; the fingerprint holds everything that decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from processor.core.policy import Policy, load_policy, render_suffix
from processor.errors import ConfigError, ConfigErrors, RejectRecord
from tests.core.builders import SCHEMA, SPEC, make_policy, merged, write_policy

NAN, INF = float("nan"), float("inf")


def lines_of(folder: Path) -> list[str]:
    """The lines of the error that loading raises; each must name the file."""
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        load_policy(folder)
    lines = str(caught.value).splitlines()
    assert all(str(folder) in line for line in lines)
    return [line.replace(f"{folder}/", "") for line in lines]


def label(**changes: Any) -> list[Any]:
    return [{"name": "a", **changes}, "b"]


# What is changed in a good policy -> the key, the value and the remedy that the error names.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"colour": "red"}, "colour = 'red': unknown key: remove it"),
    ({"event": {"field": ["id"]}}, "event.field = ['id']: unknown key: remove it"),
    ({"topics": {"dlq": "x"}}, "topics.dlq = 'x': unknown key"),
    ({"labels": label(score=1)}, "labels[0].score = 1: unknown key"),
    ({"name": None}, "name = None: the key is required: add it"),
    ({"topics": {"output": None}}, "topics.output = None: the key is required: add it"),
    ({"name": "Orders"}, "name = 'Orders': String should match pattern"),
    ({"version": 1}, "version = 1: YAML does not read this as a text: put it in quotes"),
    ({"version": ""}, "version = '': String should have at least 1 character"),
    ({"labels": "allow"}, "labels = 'allow': Input should be a valid array"),
    ({"labels": ["allow"]}, "labels = ['allow']: List should have at least 2 items"),
    ({"labels": ["yes", False]}, "labels[1] = False: YAML does not read this as a text"),
    ({"labels": ["a", "a"]}, "labels = 'a': two labels have the same name: rename one"),
    ({"labels": label(text=" b ")}, "labels = 'b': two labels have the same text: reword one"),
    ({"labels": label(text=" ")}, "a label needs a text that the model can say, and an action"),
    ({"labels": label(action="")}, "a label needs a text that the model can say, and an action"),
    ({"labels": label(min_score=1.5)}, "labels[0].min_score = 1.5: Input should be less than"),
    ({"labels": label(min_score=NAN)}, "labels[0].min_score = nan: Input should be"),
    ({"thresholds": {"review_below_margin": NAN}}, "thresholds.review_below_margin = nan: Input"),
    ({"thresholds": {"review_below_margin": -0.1}}, "review_below_margin = -0.1: Input should be"),
    ({"thresholds": {"review_below_margin": "0.1"}}, "review_below_margin = '0.1': Input should"),
    ({"thresholds": {"review_action": ""}}, "thresholds.review_action = '': String should have"),
    ({"calibration": {"temperature": 0}}, "calibration.temperature = 0: Input should be greater"),
    ({"calibration": {"temperature": INF}}, "calibration.temperature = inf: Input should be"),
    ({"calibration": {"bias": {"allow": NAN}}}, "calibration.bias.allow = nan: Input should be"),
    (
        {"calibration": {"bias": {"alow": 1.0}}},
        "calibration.bias = 'alow': names no label: one of allow, block, hold",
    ),
    ({"topics": {"output": "in"}}, "input, output and dead_letter must be three different topics"),
    ({"topics": {"input": "a b"}}, "topics.input = 'a b': String should match pattern"),
    ({"event": {"max_bytes": 2**40}}, "event.max_bytes = 1099511627776: Input should be less"),
    ({"event": {"max_bytes": True}}, "event.max_bytes = True: Input should be a valid integer"),
    ({"event": {"fields": []}}, "event.fields = []: List should have at least 1 item"),
    ({"event": {"fields": ["id", "x"]}}, "event.fields = 'x': not among the properties of event"),
    ({"event": {"schema": "no.json"}}, "event.schema = 'no.json': no such file: correct the path"),
    ({"prefix": "no.md"}, "prefix = 'no.md': no such file: correct the path"),
    ({"prefix": "."}, "prefix = '.': cannot be read: Is a directory"),
    ({"prompt": {"style": "poem"}}, "prompt.style = 'poem': Input should be 'plain' or 'chat'"),
]


@pytest.mark.parametrize(("changes", "expected"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_in_the_policy_is_named(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    (line,) = lines_of(write_policy(tmp_path, **changes))
    assert line.startswith("policy.yaml: ")
    assert expected in line


NOT_POLICIES = [
    ("", "policy = None: Input should be an object"),
    ("- a", "policy = ['a']: Input should be an object"),
    ("a: [", "not YAML: "),
    ("a: 1\na: 2", "not YAML: key 'a' stands twice"),
    ("a: {b: 1, c: 2, b: 3}", "not YAML: key 'b' stands twice"),
    ("a: !!python/object:os.system {}", "not YAML: could not determine a constructor"),
    ("a: &a [*a]", "policy = 'dict': not JSON-like: "),
    ("? [1]\n: 2", "not YAML: "),
    ("2020-01-01: 1", "policy = 'dict': not JSON-like: "),
    ("[" * 1500, "not YAML: "),
    ('a: "\\ud800"', "policy"),
    ("a: \0", "not YAML: "),
]


@pytest.mark.parametrize(("text", "expected"), NOT_POLICIES, ids=range(len(NOT_POLICIES)))
def test_a_file_that_is_no_policy_is_named(tmp_path: Path, text: str, expected: str) -> None:
    (line, *_) = lines_of(write_policy(tmp_path, text=text))
    assert expected in line


BAD_SCHEMAS: list[tuple[Any, str]] = [
    ("{", "no JSON Schema: Expecting property name"),
    ("[" * 100_000, "no JSON Schema: "),
    ({"type": "objekt"}, "no JSON Schema: "),
    ({"properties": {"id": {"$ref": "http://example.org/x"}}}, "no JSON Schema: Resource"),
    ({"properties": {"id": {"$ref": "#/nowhere"}}}, "no JSON Schema: Pointer '/nowhere'"),
    ({"properties": {"id": {"pattern": "("}}}, "no JSON Schema: "),
    ([], "no JSON Schema: "),
    (True, "must describe an object's properties"),
    ({"type": "object"}, "must describe an object's properties"),
]


@pytest.mark.parametrize(("schema", "expected"), BAD_SCHEMAS, ids=range(len(BAD_SCHEMAS)))
def test_a_bad_event_schema_is_named(tmp_path: Path, schema: Any, expected: str) -> None:
    (line,) = lines_of(write_policy(tmp_path, schema=schema))
    assert line.startswith("policy.yaml: event.schema = 'event.json': ")
    assert expected in line


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    lines = lines_of(write_policy(tmp_path, colour="red", version=None, labels=["a"]))
    assert [line.split(" = ")[0] for line in lines] == [
        "policy.yaml: version",
        "policy.yaml: labels",
        "policy.yaml: colour",
    ]


def test_a_missing_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file: correct the path"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"policy\.yaml: policy = .*no such file"):
        load_policy(tmp_path)


def test_an_empty_prefix_is_refused(tmp_path: Path) -> None:
    assert lines_of(write_policy(tmp_path, prefix_text=" \n")) == [
        "policy.yaml: prefix = 'prefix.md': the file is empty: write the policy"
    ]


def test_a_prefix_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write_policy(tmp_path)
    (tmp_path / "prefix.md").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="save the file as UTF-8"):
        load_policy(tmp_path)


def test_loads_from_folder_or_file(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    policy = load_policy(folder)
    assert policy == load_policy(str(folder / "policy.yaml"))
    assert policy.name == "orders"
    assert policy.label_names == ("allow", "block", "hold")
    assert [(label.text, label.action) for label in policy.spec.labels][1] == ("block", "block")
    assert policy.prefix == "Judge the order."


def test_line_ends_and_byte_order_marks_do_not_change_a_policy(tmp_path: Path) -> None:
    one = make_policy(tmp_path / "one", prefix_text="a\nb\n")
    two = write_policy(tmp_path / "two")
    (two / "prefix.md").write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert load_policy(two).fingerprint == one.fingerprint


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return value


def test_the_fingerprint_ignores_the_order_of_yaml_keys(tmp_path: Path) -> None:
    spec = merged(SPEC, {"calibration": {"bias": {"allow": 0.5, "block": -1.0}}})
    one = make_policy(tmp_path / "one", text=yaml.safe_dump(spec, sort_keys=False))
    two = make_policy(tmp_path / "two", text=yaml.safe_dump(reordered(spec), sort_keys=False))
    assert one.fingerprint == two.fingerprint
    assert len(one.fingerprint) == 64


SWAPPED = {**SCHEMA, "properties": reordered(SCHEMA["properties"])}
CHANGES: list[dict[str, Any]] = [
    {"name": "other"},
    {"version": "2"},
    {"description": "d"},
    {"prefix_text": "Judge it."},
    {"prompt": {"lead": "E: "}},
    {"prompt": {"cue": "D:"}},
    {"prompt": {"style": "chat"}},
    {"event": {"fields": ["id"]}},
    {"event": {"max_bytes": 100}},
    {"labels": ["block", "allow", "hold"]},
    {"labels": ["allow", "block", {"name": "hold", "text": "wait"}]},
    {"labels": ["allow", "block", {"name": "hold", "action": "call"}]},
    {"labels": ["allow", "block", {"name": "hold", "min_score": 0.1}]},
    {"thresholds": {"review_below_margin": 0.1}},
    {"thresholds": {"review_action": "ask"}},
    {"calibration": {"temperature": 2.0}},
    {"calibration": {"bias": {"allow": 0.1}}},
    {"topics": {"output": "other"}},
    {"schema": {**SCHEMA, "required": []}},
    {"schema": {**SCHEMA, "maximum": 2**64}},
    {"schema": SWAPPED},
]


def test_the_fingerprint_changes_with_each_part(tmp_path: Path) -> None:
    policies = [make_policy(tmp_path / str(i), **c) for i, c in enumerate([{}, *CHANGES])]
    assert len({policy.fingerprint for policy in policies}) == len(policies)


def test_policies_that_render_differently_have_different_fingerprints(tmp_path: Path) -> None:
    one, two = make_policy(tmp_path / "1"), make_policy(tmp_path / "2", schema=SWAPPED)
    event = {"id": 1, "amount": 2}
    assert render_suffix(one, event) != render_suffix(two, event)
    assert one.fingerprint != two.fingerprint


INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, '(top level): "id" is a required property'),
    ({"id": "x"}, 'id: (value) is not of type "integer"'),
    ({"id": 1, "buyer": {"age": "x"}}, 'buyer/age: (value) is not of type "integer"'),
    ({"id": 1, "more": 2}, "(top level): Additional properties are not allowed"),
]


@pytest.mark.parametrize(("event", "expected"), INVALID, ids=range(len(INVALID)))
def test_an_invalid_event_is_rejected_without_showing_its_values(
    policy: Policy, event: dict[str, Any], expected: str
) -> None:
    with pytest.raises(RejectRecord) as caught:
        policy.validate(event)
    assert caught.value.reason == "schema"
    assert expected in caught.value.detail


def test_a_valid_event_passes(policy: Policy) -> None:
    policy.validate({"id": 2**64 - 1, "amount": 1e300, "note": "é", "hidden": [None]})


def test_formats_are_checked(tmp_path: Path) -> None:
    schema = {"properties": {"id": {"type": "string", "format": "date-time"}}}
    policy = make_policy(tmp_path, schema=json.dumps(schema), event={"fields": ["id"]})
    policy.validate({"id": "2024-02-29T00:00:00Z"})
    with pytest.raises(RejectRecord, match="schema: id"):
        policy.validate({"id": "2023-02-29T00:00:00Z"})
