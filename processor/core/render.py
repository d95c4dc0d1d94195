"""Deterministic rendering of an event: chosen fields, in schema order, compact canonical JSON.

Two producers that send the same event must cost the same tokens and get the same score, so
nothing of the input's order, spacing, escapes or way of writing a number survives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import unquote

import orjson

from processor.core.event import INT_MAX, INT_MIN

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
        forms = {name: _on_first_use(properties[name], root) for name in properties}

        def canonical_object(value: Any) -> Any:
            if not isinstance(value, dict):
                return canonical_value(value)
            known = {name: form(value[name]) for name, form in forms.items() if name in value}
            rest = {name: canonical_value(value[name]) for name in sorted(value.keys() - forms)}
            return known | rest

        return canonical_object
    if isinstance(schema.get("items"), Mapping):
        item = _on_first_use(schema["items"], root)
        return lambda value: (
            [item(v) for v in value] if isinstance(value, list) else canonical_value(value)
        )
    return canonical_value


def _on_first_use(schema: Any, root: Mapping[str, Any]) -> _Canonical:
    """Compiled when a value first needs it, since a schema may refer to itself."""
    form = cache(lambda: _canonical(schema, root))
    return lambda value: form()(value)


def canonical_value(value: Any) -> Any:
    """Objects sorted by key; integral floats written as integers wherever an event can hold that
    integer, so that 1, 1.0 and 1e0 look alike."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and INT_MIN <= value <= INT_MAX else value
    if isinstance(value, dict):
        return {key: canonical_value(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [canonical_value(v) for v in value]
    return value


def _resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    hops = 0
    while isinstance(schema, Mapping) and "$ref" in schema and hops < 32:
        schema, hops = _follow(str(schema["$ref"]), root), hops + 1
    return schema if isinstance(schema, Mapping) else {}


def _follow(reference: str, root: Mapping[str, Any]) -> Any:
    """What a JSON pointer within the file names; nothing for any other kind of reference."""
    node: Any = root
    for step in unquote(reference).removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            node = node.get(key) if isinstance(node, Mapping) else None
    return node if reference.startswith("#") else None
