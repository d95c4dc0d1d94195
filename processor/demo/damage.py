"""Ways to spoil a good value, one or more for every reason that a producer can cause.

Each takes the bytes of a valid JSON object and returns what is rejected for exactly the reason
that its name begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from processor.core.event import MAX_DEPTH

Damage = Callable[[bytes], bytes | None]
_LARGE = 900_000  # over the limits of the example policies, under what brokers take by default


def reason(damage: str) -> str:
    """The rejection that a damage causes: `not_finite/infinity` causes `not_finite`."""
    return damage.split("/")[0]


def _member(member: bytes) -> Damage:
    """Put one more member in front: it is met before any other error."""

    def damage(value: bytes) -> bytes:
        rest = value.lstrip()[1:]
        comma = b"" if rest.lstrip().startswith(b"}") else b","
        return b"{" + member + comma + rest

    return damage


def _bad_utf8(value: bytes) -> bytes:
    return value[:-1] + b"\xff" + value[-1:]


DAMAGES: Mapping[str, Damage] = {
    "tombstone": lambda value: None,
    "empty_payload": lambda value: b"",
    "too_large": lambda value: value + b" " * _LARGE,
    "byte_order_mark/utf-8": lambda value: b"\xef\xbb\xbf" + value,
    "byte_order_mark/utf-16": lambda value: value.decode().encode("utf-16"),
    "not_utf8": _bad_utf8,
    "not_utf8/latin-1": _member('"damage":"\xe9"'.encode("latin-1")),
    "lone_surrogate": _member(rb'"damage":"\ud800"'),
    "not_json/cut": lambda value: value.rstrip()[:-1],
    "not_json/single_quotes": lambda value: b"{'damage':1}",
    "not_json/two_values": lambda value: value + value,
    "not_finite/nan": _member(b'"damage":NaN'),
    "not_finite/infinity": _member(b'"damage":-Infinity'),
    "not_finite/overflow": _member(b'"damage":1e999'),
    "out_of_range": _member(b'"damage":' + b"9" * 30),
    "duplicate_key": _member(b'"damage":1,"damage":2'),
    "too_deep": _member(b'"damage":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH),
    "not_object/array": lambda value: b"[" + value + b"]",
    "not_object/string": lambda value: b'"event"',
    "schema/unknown_field": _member(b'"damage":1'),
    "schema/missing_fields": lambda value: b"{}",
}
