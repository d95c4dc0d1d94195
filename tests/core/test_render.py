"""Rendering: equal events have one text, whatever way they were written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.core.event import decode_value
from processor.core.render import compile_renderer
from tests.core.builders import SCHEMA
from tests.core.test_event import JSON

FIELDS = ["buyer", "note", "amount", "id"]
render = compile_renderer(SCHEMA, FIELDS)


def rendered(text: str) -> str:
    return render(decode_value(text.encode(), 2**20))


CASES = [
    ("schema order, hidden and unknown fields left out", '{"note":"x","id":1,"hidden":2,"new":3}',
     '{"id":1,"note":"x"}'),
    ("absent fields left out", '{"note":"x"}', '{"note":"x"}'),
    ("null is not absent", '{"note":null}', '{"note":null}'),
    ("nested: schema order, unknown keys last and sorted",
     '{"buyer":{"z":1,"age":3,"b":{"y":1,"x":2},"name":"n"}}',
     '{"buyer":{"name":"n","age":3,"b":{"x":2,"y":1},"z":1}}'),
    ("a value of another type than the schema's", '{"buyer":[{"b":1,"a":2}]}',
     '{"buyer":[{"a":2,"b":1}]}'),
    ("integral floats", '{"amount":1.0}', '{"amount":1}'),
    ("exponents", '{"amount":12e-1}', '{"amount":1.2}'),
    ("negative zero", '{"amount":-0.0}', '{"amount":0}'),
    ("escapes", '{"note":"\\u00e9\\/"}', '{"note":"é/"}'),
    ("nothing", "{}", "{}"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_renders(text: str, expected: str) -> None:
    assert rendered(text) == expected


SPELLINGS = [
    ["1", "1.0", "1e0", "10e-1", "1E+0", "0.1e1"],
    ["-0", "0", "0.0", "-0.0", "0e5", "1e-999"],
    ["100000000000000000000e-2", "1e18", "1000000000000000000", "1000000000000000000.0"],
    ["9007199254740994", "9007199254740994.0"],
    ["9223372036854775808", "9223372036854775808.0"],
    ["0.1", "1e-1", "0.10", "0.1000000000000000055511151231257827"],
    ["1e300", "10e299", "1" + "0" * 300 + ".0"],
]


@pytest.mark.parametrize("spellings", SPELLINGS, ids=[s[0] for s in SPELLINGS])
def test_one_number_has_one_text(spellings: list[str]) -> None:
    assert len({rendered(f'{{"amount":{number}}}') for number in spellings}) == 1


def test_integers_beyond_a_double_stay_exact() -> None:
    assert rendered('{"id":9007199254740993}') == '{"id":9007199254740993}'


def test_the_schema_not_the_policy_orders_fields() -> None:
    assert compile_renderer(SCHEMA, FIELDS[::-1])({"id": 1, "note": "x"}) == '{"id":1,"note":"x"}'


TREE: dict[str, Any] = {
    "properties": {
        "tree": {"$ref": "#/$defs/tree"},
        "lists": {"$ref": "#/$defs/lists"},
        "first": {"$ref": "#/allOf/0"},
        "odd": {"$ref": "#/$defs/with~1slash%20and~0tilde"},
        "self": {"$ref": "#"},
        "remote": {"$ref": "other.json#/x"},
        "loop": {"$ref": "#/$defs/loop"},
        "any": True,
    },
    "allOf": [{"properties": {"z": {}, "a": {}}}],
    "$defs": {
        "tree": {"properties": {"value": {}, "kids": {"items": {"$ref": "#/$defs/tree"}}}},
        "lists": {"items": {"$ref": "#/$defs/lists"}},
        "with/slash and~tilde": {"properties": {"z": {}, "a": {}}},
        "loop": {"$ref": "#/$defs/loop"},
    },
}
Z_FIRST, A_FIRST = {"z": 1, "a": 2}, {"a": 2, "z": 1}
REFERENCES: list[tuple[str, Any, Any]] = [
    ("tree", {"kids": [{"kids": [], "value": 2.0}], "value": 1},
     {"value": 1, "kids": [{"value": 2, "kids": []}]}),
    ("lists", [[[]], [1.0]], [[[]], [1]]),
    ("first", A_FIRST, Z_FIRST),
    ("odd", A_FIRST, Z_FIRST),
    ("self", {"any": 1, "first": A_FIRST}, {"first": Z_FIRST, "any": 1}),
    ("remote", Z_FIRST, A_FIRST),
    ("loop", Z_FIRST, A_FIRST),
    ("any", Z_FIRST, A_FIRST),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "expected"), REFERENCES, ids=[r[0] for r in REFERENCES])
def test_follows_references(name: str, value: Any, expected: Any) -> None:
    text = compile_renderer(TREE, list(TREE["properties"]))({name: value})
    assert text == json.dumps({name: expected}, separators=(",", ":"))


EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "amount": st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False),
        "note": st.text(),
        "buyer": st.dictionaries(st.sampled_from(["name", "age", "x", "y"]) | st.text(), JSON),
    },
)


def shuffled(value: Any, random: Any) -> Any:
    """The same JSON value with other orders of keys, and integers as floats where exact."""
    if isinstance(value, dict):
        keys = list(value)
        random.shuffle(keys)
        return {key: shuffled(value[key], random) for key in keys}
    if isinstance(value, list):
        return [shuffled(item, random) for item in value]
    if type(value) is int and abs(value) <= 2**53 and random.random() < 0.5:
        return float(value)
    return value


@given(EVENTS, st.randoms(use_true_random=False), st.sampled_from([None, 0, 3]), st.booleans())
def test_rendering_forgets_how_the_event_was_written(
    event: dict[str, Any], random: Any, indent: int | None, escape: bool
) -> None:
    other = json.dumps(shuffled(event, random), indent=indent, ensure_ascii=escape)
    assert rendered(other) == rendered(json.dumps(event))


@given(EVENTS)
def test_rendering_is_idempotent_and_loses_nothing(event: dict[str, Any]) -> None:
    text = rendered(json.dumps(event))
    assert rendered(text) == text
    assert json.loads(text) == event
