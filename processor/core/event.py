"""Records, events and the strict way from one to the other.

A consumer that forgives a malformed value decides on something the producer never said: JSON
parsers let the last of two equal keys win, read 1e999 as infinity and round integers beyond
64 bits. Each of these is refused here with a reason of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import orjson

from processor.errors import RejectRecord

Headers = tuple[tuple[str, bytes | None], ...]

Reason = Literal[
    "tombstone",  # the value is null
    "empty_payload",  # the value has no bytes
    "too_large",  # more bytes than the policy's limit
    "byte_order_mark",  # UTF-8, UTF-16 or UTF-32 mark in front
    "not_utf8",  # bytes that are not UTF-8
    "lone_surrogate",  # \ud800 without its partner: no UTF-8 text can hold it
    "not_json",  # syntax
    "not_finite",  # NaN, Infinity, or a number beyond a double
    "out_of_range",  # an integer beyond 64 bits
    "duplicate_key",  # two equal keys in one object
    "too_deep",  # nested deeper than MAX_DEPTH
    "not_object",  # the top level is not an object
    "schema",  # the event schema does not hold
    "control_token",  # the text came out of the tokenizer as a control token
    "too_long",  # prefix + suffix exceed the model's window or the batch budget
    "scores_not_finite",  # the model returned NaN or infinity
    "scorer_failed",  # the model raises an error for this event and for no other
    "output_too_large",  # the decision exceeds what the output topic takes
]

MAX_DEPTH = 64
INT_MIN, INT_MAX = -(2**63), 2**64 - 1  # what a signed or an unsigned 64-bit reader can hold
_BOMS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
# Possessive, since a backtracking point per character would cost gigabytes on a long string.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")


@dataclass(frozen=True, slots=True)
class Record:
    """What Kafka holds. `timestamp_ms` is Unix time in milliseconds, -1 where there is none."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int = -1


@dataclass(frozen=True, slots=True)
class Event:
    """A decoded, validated record value, with the record it came from."""

    record: Record
    data: dict[str, Any]


def decode_value(value: bytes | None, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a record's value.

    Raises `RejectRecord` with one of the reasons above; every input has exactly one result.
    """
    if value is None:
        raise RejectRecord("tombstone", "the record has no value")
    if not value:
        raise RejectRecord("empty_payload", "the value has no bytes")
    if len(value) > max_bytes:
        raise RejectRecord("too_large", f"{len(value)} bytes, at most {max_bytes} are read")
    if value.startswith(_BOMS):
        raise RejectRecord("byte_order_mark", "send UTF-8 without a byte order mark")
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise RejectRecord("not_utf8", f"byte {error.start}: {error.reason}") from None
    if _depth(value) > MAX_DEPTH:
        raise RejectRecord("too_deep", f"nested deeper than {MAX_DEPTH} levels")
    data = _parse(text, value)
    if not isinstance(data, dict):
        raise RejectRecord("not_object", f"the top level is a {type(data).__name__}")
    if "\\u" in text:
        _check_surrogates(data)
    return data


def decode_event(
    record: Record, validate: Callable[[dict[str, Any]], None], max_bytes: int
) -> Event:
    """Decode and validate a record. `validate` and the decoding raise `RejectRecord`."""
    data = decode_value(record.value, max_bytes)
    validate(data)
    return Event(record, data)


def _depth(value: bytes) -> int:
    """Upper bound of the nesting, exact wherever the cheap bound is not enough.

    Python's parser recurses, so the depth must be known before it runs.
    """
    bound = value.count(b"[") + value.count(b"{")
    if bound <= MAX_DEPTH:
        return bound
    deepest = depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub(b"", value)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            break
    return deepest


def _parse(text: str, value: bytes) -> Any:
    try:
        return (_CHECKING if _may_hold_large_numbers(value) else _PLAIN).decode(text)
    except json.JSONDecodeError as error:
        raise RejectRecord("not_json", f"character {error.pos}: {error.msg}") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RejectRecord("duplicate_key", f"key {key[:80]!r} stands twice in one object")
            seen.add(key)
    return result


def _integer(digits: str) -> int:
    # 20 characters hold every 64-bit integer; the test keeps Python from parsing 5,000 digits.
    if len(digits) > 20 or not INT_MIN <= (number := int(digits)) <= INT_MAX:
        raise RejectRecord("out_of_range", f"an integer of {len(digits)} characters")
    return number


def _float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise RejectRecord("not_finite", "a number beyond the range of a double")
    return number


def _constant(name: str) -> NoReturn:
    raise RejectRecord("not_finite", f"{name} is not a JSON number")


# A number of fewer than 19 digits and without an exponent fits 64 bits and a double. Most events
# hold no other, and a call into Python per number doubles the time of decoding. Told apart by two
# searches for a constant in a copy that knows digits, exponents and the rest only: a regular
# expression takes 15 times as long on a text of 1 KB.
_KINDS = bytes(
    ord("0") if chr(byte).isdigit() else ord("e") if chr(byte) in "eE" else ord(".")
    for byte in range(128)
).ljust(256, b".")


def _may_hold_large_numbers(value: bytes) -> bool:
    kinds = value.translate(_KINDS)
    return b"0e" in kinds or b"0" * 19 in kinds


_PLAIN = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)
_CHECKING = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_constant=_constant, parse_int=_integer, parse_float=_float
)


def _check_surrogates(data: Any) -> None:
    try:
        orjson.dumps(data)
    except TypeError:
        raise RejectRecord("lone_surrogate", "an escape names half of a surrogate pair") from None
