"""From an outcome to the record that is published, within what its topic takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import orjson

from processor.core.decision import Coordinates, Decision, Outcome, Rejection, Tombstone
from processor.core.event import Headers, Record
from processor.core.policy import Topics

REJECTION_HEADER = "processor.rejection"
TOMBSTONE_HEADER = "processor.tombstone"

# What a broker counts beside key, value and headers: 61 bytes of its batch, and at most 27 of
# lengths and differences; per header at most 10.
RECORD_OVERHEAD, HEADER_OVERHEAD = 88, 10

MaxBytes = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """A record to be produced."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers

    @property
    def size(self) -> int:
        """Bytes that the broker holds against `max.message.bytes`, where the record stands alone
        and uncompressed; never less."""
        headers = sum(
            len(name.encode()) + len(value or b"") + HEADER_OVERHEAD for name, value in self.headers
        )
        return RECORD_OVERHEAD + len(self.key or b"") + len(self.value or b"") + headers


def encode_outcome(
    outcome: Outcome, record: Record, topics: Topics, max_bytes: MaxBytes
) -> tuple[Outcome, OutputRecord | None]:
    """What to publish for an outcome, and the outcome that it then is.

    Input key and headers are carried over. A decision that its topic does not take becomes the
    rejection `output_too_large`, and a dead letter that its topic does not take keeps its reason
    and coordinates only: that one fits whatever takes a record at all. None where a tombstone is
    skipped.
    """
    if isinstance(outcome, Tombstone):
        return outcome, _tombstone(outcome, record, topics.output)
    if isinstance(outcome, Decision):
        made = OutputRecord(topics.output, record.key, _json(outcome), _carried(record))
        limit = max_bytes(topics.output)
        if made.size <= limit:
            return outcome, made
        outcome = Rejection(
            reason="output_too_large",
            detail=f"a decision of {made.size} bytes; {topics.output} takes {limit}",
            event=outcome.event,
            policy=outcome.policy,
            attempts=attempts(record),
        )
    letter = dead_letter(outcome, record, topics.dead_letter)
    if letter.size <= max_bytes(topics.dead_letter):
        return outcome, letter
    outcome = _pointer(outcome)
    return outcome, OutputRecord(topics.dead_letter, None, None, _reason(outcome))


def dead_letter(outcome: Rejection, record: Record, topic: str) -> OutputRecord:
    """A dead letter keeps the input's value byte for byte, so that it can be sent again once the
    cause is mended; the reason travels in a header. A reason from an earlier round is dropped."""
    headers = (*_carried(record), *_reason(outcome))
    return OutputRecord(topic, record.key, record.value, headers)


def attempts(record: Record) -> int:
    """How often this record has been rejected, this time included: a dead letter that is sent to
    the input again brings its last count along."""
    for name, value in record.headers:
        if name == REJECTION_HEADER:
            try:
                before = orjson.loads(value or b"")["attempts"]
                return 1 + before if type(before) is int and 0 < before < 2**31 else 2
            except (ValueError, LookupError, TypeError):
                return 2
    return 1


def _pointer(outcome: Rejection) -> Rejection:
    event = outcome.event.model_dump() | {"key": None, "key_encoding": "utf-8"}
    fields = dict(outcome) | {"event": Coordinates(**event), "value_omitted": True}
    return Rejection(**fields)


def _tombstone(outcome: Tombstone, record: Record, topic: str) -> OutputRecord | None:
    if not outcome.passed:
        return None
    header = (TOMBSTONE_HEADER, _json(outcome))
    return OutputRecord(topic, record.key, None, (*_carried(record), header))


def _carried(record: Record) -> Headers:
    if not record.headers:
        return ()
    ours = (REJECTION_HEADER, TOMBSTONE_HEADER)
    return tuple(item for item in record.headers if item[0] not in ours)


def _reason(outcome: Rejection) -> Headers:
    return ((REJECTION_HEADER, _json(outcome)),)


def _json(outcome: Outcome) -> bytes:
    return outcome.model_dump_json().encode()
