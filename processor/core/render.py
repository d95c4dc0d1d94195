"""Deterministic rendering of an event: chosen fields, in schema order, compact canonical JSON.

Two producers that send the same event must cost the same tokens and get the same score, so
nothing of the input's order, spacing, escapes or way of writing a number survives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

Renderer = Callable[[Mapping[str, Any]], str]
_Canonical = Callable[[Any], Any]


def compile_renderer(schema: Mapping[str, Any], fields: Sequence[str]) -> Renderer:
    """A function from a valid event to its text. Fields the event lacks are left out; nested
    objects keep the order of their own `properties`, keys unknown to the schema come last,
    sorted."""
    properties = schema["properties"]
    chosen = {name: _canonical(properties[name], schema) for name in properties if name in fields}

    def render(data: Mapping[str, Any]) -> str:
        shown = {name: form(data[name]) for name, form in chosen.items() if name in data}
        return orjson.dumps(shown).decode()

    return render


def _canonical(schema: Any, root: Mapping[str, Any]) -> _Canonical:
    """The canonical form of values of one (sub)schema; `$ref` within the file is followed."""
    schema = _resolve(schema, root)
    if properties := schema.get("properties"):
        forms: dict[str, _Canonical] = {}

        def canonical_object(value: Any) -> Any:
            if not isinstance(value, dict):
                return canonical_value(value)
            for name in properties:  # compiled on first use: a schema may refer to itself
                if name not in forms:
                    forms[name] = _canonical(properties[name], root)
            known = {name: form(value[name]) for name, form in forms.items() if name in value}
            rest = {name: canonical_value(value[name]) for name in sorted(value.keys() - forms)}
            return known | rest

        return canonical_object
    if isinstance(schema.get("items"), Mapping):
        item = _canonical(schema["items"], root)
        return lambda value: (
            [item(v) for v in value] if isinstance(value, list) else canonical_value(value)
        )
    return canonical_value


def canonical_value(value: Any) -> Any:
    """Objects sorted by key; integral floats that a double holds exactly written as integers."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= 2**53 else value
    if isinstance(value, dict):
        return {key: canonical_value(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [canonical_value(v) for v in value]
    return value


def _resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    hops = 0
    while isinstance(schema, Mapping) and "$ref" in schema and hops < 32:
        node: Any = root
        for step in str(schema["$ref"]).removeprefix("#/").split("/"):
            node = node.get(step.replace("~1", "/").replace("~0", "~"), {})
        schema, hops = node, hops + 1
    return schema if isinstance(schema, Mapping) else {}
