"""Decoding: what a strict reader accepts, and the one reason for everything else."""

from __future__ import annotations

import json
from typing import Any, get_args

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from processor.core.event import MAX_DEPTH, Reason, decode_event, decode_value
from processor.errors import RejectRecord
from tests.core.builders import record

LIMIT = 2**20
REASONS = set(get_args(Reason))


def reason_of(value: bytes | None, limit: int = LIMIT) -> str:
    with pytest.raises(RejectRecord) as caught:
        decode_value(value, limit)
    assert caught.value.detail
    caught.value.detail.encode()  # it is published: no lone surrogate may be in it
    return caught.value.reason


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    """An object whose value is nested so that the whole is `depth` levels deep."""
    return b'{"a":' + opening * (depth - 1) + closing * (depth - 1) + b"}"


ACCEPTED: list[tuple[bytes, Any]] = [
    (b"{}", {}),
    (b' \t\r\n{ "a" :\r\n1 } \n', {"a": 1}),
    (b'{"a":null,"b":true,"c":false}', {"a": None, "b": True, "c": False}),
    (b'{"n":9223372036854775807}', {"n": 2**63 - 1}),
    (b'{"n":9223372036854775808}', {"n": 2**63}),
    (b'{"n":18446744073709551615}', {"n": 2**64 - 1}),
    (b'{"n":-9223372036854775808}', {"n": -(2**63)}),
    (b'{"n":-0}', {"n": 0}),
    (b'{"n":1e0}', {"n": 1.0}),
    (b'{"n":1E+2}', {"n": 100.0}),
    (b'{"n":0.1}', {"n": 0.1}),
    (b'{"n":1.7976931348623157e308}', {"n": 1.7976931348623157e308}),
    (b'{"n":1e-999}', {"n": 0.0}),
    (b'{"n":0.00000000000000000000000001}', {"n": 1e-26}),
    (b'{"s":"\\u00e9\\n\\/\\""}', {"s": 'é\n/"'}),
    (b'{"s":"\\ud83d\\ude00"}', {"s": "\U0001f600"}),
    (b'{"\\ud83d\\ude00":1}', {"\U0001f600": 1}),
    (b'{"s":"\\\\ud800"}', {"s": "\\ud800"}),
    (b'{"s":"\\u0000"}', {"s": "\0"}),
    (b'{"s":"\xef\xbb\xbf"}', {"s": "\ufeff"}),
    (b'{"s":"\x7f"}', {"s": "\x7f"}),
    (b'{"a":{"x":1},"b":{"x":2}}', {"a": {"x": 1}, "b": {"x": 2}}),
    (b'{"a":1,"A":2}', {"a": 1, "A": 2}),
    (b'{"e":"99999999999999999999 1e999 NaN [[[["}', {"e": "99999999999999999999 1e999 NaN [[[["}),
    (b'{"s":"' + b"[" * 200_000 + b'"}', {"s": "[" * 200_000}),
    (b'{"s":"\\"' + b"[" * 100 + b'\\\\"}', {"s": '"' + "[" * 100 + "\\"}),
    (b'{"a":[' + b"[]," * 500 + b"[]]}", {"a": [[]] * 501}),
]


@pytest.mark.parametrize(("value", "expected"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_accepts(value: bytes, expected: dict[str, Any]) -> None:
    decoded = decode_value(value, LIMIT)
    assert decoded == expected
    assert [type(v) for v in decoded.values()] == [type(v) for v in expected.values()]


REJECTED: list[tuple[str, bytes | None]] = [
    ("tombstone", None),
    ("empty_payload", b""),
    ("too_large", b'{"a":"' + b"x" * LIMIT + b'"}'),
    # marks of every Unicode encoding form, in both byte orders
    ("byte_order_mark", b'\xef\xbb\xbf{"a":1}'),
    ("byte_order_mark", '{"a":1}'.encode("utf-16")),
    ("byte_order_mark", b"\xff\xfe" + '{"a":1}'.encode("utf-16-le")),
    ("byte_order_mark", b"\xfe\xff" + '{"a":1}'.encode("utf-16-be")),
    ("byte_order_mark", b"\xff\xfe\0\0" + '{"a":1}'.encode("utf-32-le")),
    ("byte_order_mark", b"\0\0\xfe\xff" + '{"a":1}'.encode("utf-32-be")),
    ("byte_order_mark", b"\xff\xfe"),
    # encodings without a mark
    ("not_json", '{"a":1}'.encode("utf-16-le")),
    ("not_json", '{"a":1}'.encode("utf-32-be")),
    ("not_utf8", b'{"a":"\xff"}'),
    ("not_utf8", b'{"a":"\xc0\x80"}'),
    ("not_utf8", b'{"a":"\xed\xa0\x80"}'),
    ("not_utf8", b'{"a":"\xf4\x90\x80\x80"}'),
    ("not_utf8", b'{"a":"\xe2\x82'),
    # halves of surrogate pairs, in values, in keys and deep inside
    ("lone_surrogate", b'{"a":"\\ud800"}'),
    ("lone_surrogate", b'{"a":"\\udc00"}'),
    ("lone_surrogate", b'{"a":"\\ude00\\ud83d"}'),
    ("lone_surrogate", b'{"a":"\\uD83Dx\\uDE00"}'),
    ("lone_surrogate", b'{"\\ud800":1}'),
    ("lone_surrogate", b'{"a":[{"b":{"\\udfff":[]}}]}'),
    # syntax
    ("not_json", b"   "),
    ("not_json", b"{"),
    ("not_json", b'{"a":1'),
    ("not_json", b'{"a":1,}'),
    ("not_json", b"{'a':1}"),
    ("not_json", b"{a:1}"),
    ("not_json", b'{"a":1}{"b":2}'),
    ("not_json", b'{"a":1} x'),
    ("not_json", b'{"a":1}\0'),
    ("not_json", b'{"a":01}'),
    ("not_json", b'{"a":+1}'),
    ("not_json", b'{"a":.5}'),
    ("not_json", b'{"a":1.}'),
    ("not_json", b'{"a":0x10}'),
    ("not_json", b'{"a":1_000}'),
    ("not_json", '{"a":١}'.encode()),
    ("not_json", b'{"a":True}'),
    ("not_json", b'{"a":undefined}'),
    ("not_json", b'{"a":-NaN}'),
    ("not_json", b'{"a":"\n"}'),
    ("not_json", b'{"a":"\t"}'),
    ("not_json", b'{"a":"\x00"}'),
    ("not_json", b'{"a":"\x1f"}'),
    ("not_json", b'{"a":"\\x"}'),
    ("not_json", b'{"a":"\\u12"}'),
    ("not_json", b'{"a":"\\u 123"}'),
    ("not_json", b'{"a":"open'),
    ("not_json", b'{"a":1}//'),
    ("not_json", b'/**/{"a":1}'),
    ("not_json", b'\x0c{"a":1}'),
    ("not_json", b'\xc2\xa0{"a":1}'),
    # numbers that no double and no 64-bit integer holds
    ("not_finite", b'{"a":NaN}'),
    ("not_finite", b'{"a":Infinity}'),
    ("not_finite", b'{"a":-Infinity}'),
    ("not_finite", b'{"a":[NaN]}'),
    ("not_finite", b'{"a":1e999}'),
    ("not_finite", b'{"a":-1E+400}'),
    ("not_finite", b'{"a":1.8e308}'),
    ("not_finite", b'{"a":' + b"9" * 400 + b".0}"),
    ("out_of_range", b'{"a":18446744073709551616}'),
    ("out_of_range", b'{"a":-9223372036854775809}'),
    ("out_of_range", b'{"a":99999999999999999999}'),
    ("out_of_range", b'{"a":-18446744073709551615}'),
    ("out_of_range", b'{"a":' + b"1" * 5000 + b"}"),
    # equal keys, however they are written
    ("duplicate_key", b'{"amount":1,"amount":99999}'),
    ("duplicate_key", b'{"amount":1,"amount":1}'),
    ("duplicate_key", b'{"a":1,"\\u0061":2}'),
    ("duplicate_key", b'{"a/b":1,"a\\/b":2}'),
    ("duplicate_key", '{"é":1,"\\u00E9":2}'.encode()),
    ("duplicate_key", '{"\U0001f600":1,"\\ud83d\\ude00":2}'.encode()),
    ("duplicate_key", b'{"":1,"":2}'),
    ("duplicate_key", b'{"x":[{"a":{"b":1,"c":2,"b":3}}]}'),
    ("duplicate_key", b'{"\\ud800":1,"\\ud800":2}'),
    # depth
    ("too_deep", nested(MAX_DEPTH + 1)),
    ("too_deep", nested(MAX_DEPTH + 1, b'{"a":', b"}").replace(b":}", b":1}")),
    ("too_deep", nested(900)),
    ("too_deep", b"[" * 200_000),
    ("too_deep", b'{"a":' * 100_000),
    ("too_deep", b'{"s":"]]]]\\"]",' + nested(MAX_DEPTH + 1)[1:]),
    # other top levels
    ("not_object", b"[]"),
    ("not_object", b'[{"a":1}]'),
    ("not_object", b"null"),
    ("not_object", b"true"),
    ("not_object", b"1"),
    ("not_object", b'"{}"'),
]


@pytest.mark.parametrize(("reason", "value"), REJECTED, ids=range(len(REJECTED)))
def test_rejects(reason: str, value: bytes | None) -> None:
    assert reason_of(value) == reason


def test_every_reason_of_decoding_is_in_the_table() -> None:
    elsewhere = {"schema", "control_token", "too_long", "scores_not_finite", "scorer_failed"}
    assert {reason for reason, _ in REJECTED} == REASONS - elsewhere - {"output_too_large"}


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"])
def test_c6_numbers_that_are_not_finite(number: bytes) -> None:
    """What other readers let in, and write as null then."""
    assert reason_of(b'{"amount":%s}' % number) == "not_finite"


@pytest.mark.parametrize("number", [b"18446744073709551616", b"9" * 5000, b"-" + b"9" * 19])
def test_c7_integers_beyond_64_bits(number: bytes) -> None:
    """What other readers round to a double in silence."""
    assert reason_of(b'{"id":%s}' % number) == "out_of_range"


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 200_000])
def test_c8_nesting_that_exhausts_a_stack(depth: int) -> None:
    assert reason_of(nested(depth)) == "too_deep"


def test_c9_equal_keys_are_not_decided_on_in_silence() -> None:
    assert reason_of(b'{"amount":1,"amount":99999}') == "duplicate_key"
    assert reason_of(b'{"a":{"b":1,"\\u0062":2}}') == "duplicate_key"


def test_the_size_limit_is_inclusive() -> None:
    assert decode_value(b'{"a":1}', 7) == {"a": 1}
    assert reason_of(b'{"a":1} ', 7) == "too_large"


def test_the_depth_limit_is_inclusive() -> None:
    decoded = decode_value(nested(MAX_DEPTH), LIMIT)
    assert json.dumps(decoded).count("[") == MAX_DEPTH - 1
    assert reason_of(nested(MAX_DEPTH + 1)) == "too_deep"


def test_a_long_object_with_equal_keys_at_its_end_is_not_slow() -> None:
    keys = ",".join(f'"{i}":0' for i in range(60_000))
    assert reason_of(f'{{{keys},"59999":0}}'.encode()) == "duplicate_key"


def test_a_long_string_beside_many_brackets_needs_little_memory() -> None:
    value = b'{"a":' + b"[" * 40 + b"]" * 40 + b',"b":[' + b"[]," * 40 + b'[]],"s":"'
    value += b"x\\n" * 500_000 + b'"}'
    assert len(decode_value(value, len(value))["s"]) == 1_000_000


def test_a_record_becomes_an_event_only_when_valid() -> None:
    def validate(data: dict[str, Any]) -> None:
        if "id" not in data:
            raise RejectRecord("schema", "id is missing")

    good = record(b'{"id":1}')
    event = decode_event(good, validate, LIMIT)
    assert (event.record, event.data) == (good, {"id": 1})
    with pytest.raises(RejectRecord, match="schema: id is missing"):
        decode_event(record(b"{}"), validate, LIMIT)


WORDS = b'{ } [ ] " : , \\ \\u d83d \\ude00 "a" 1 e 99999999999999999999 - . NaN Infinity null \xff'
PIECES = st.sampled_from([*WORDS.split(b" "), b" ", b"\xef\xbb\xbf"])


@given(st.one_of(st.binary(max_size=200), st.lists(PIECES, max_size=40).map(b"".join)))
@example(b"[" * 100 + b'"' + b"]" * 100)
@example(b'{"a":1' + b"\\" * 1000)
def test_any_bytes_are_an_object_or_a_rejection(value: bytes) -> None:
    try:
        data = decode_value(value, LIMIT)
    except RejectRecord:
        assert reason_of(value) in REASONS
    else:
        assert isinstance(data, dict)
        assert orjson.loads(orjson.dumps(data)) == data  # whatever is accepted can be published


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=5)


@given(OBJECTS, st.booleans())
def test_decoding_undoes_encoding(data: dict[str, Any], escape: bool) -> None:
    for text in (json.dumps(data, ensure_ascii=escape), json.dumps(data, indent=1)):
        assert decode_value(text.encode(), LIMIT) == data
