"""Small policies, records and stand-ins for the model, for tests that need no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from processor.core.batch import MicroBatch
from processor.core.decision import Outcome, Provenance, Scores, Timings
from processor.core.encode import OutputRecord, encode_outcome
from processor.core.event import Record
from processor.core.pipeline import TokenIds
from processor.core.policy import Policy, Topics, load_policy
from processor.errors import RejectRecord

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "amount": {"type": "number"},
        "note": {"type": "string"},
        "buyer": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        },
        "hidden": {},
    },
    "required": ["id"],
    "additionalProperties": False,
}

SPEC: dict[str, Any] = {
    "name": "orders",
    "version": "1",
    "event": {"schema": "event.json", "fields": ["id", "amount", "note", "buyer"]},
    "labels": ["allow", "block", "hold"],
    "topics": {"input": "in", "output": "out", "dead_letter": "dead"},
}

PROVENANCE = Provenance("tiny", "m" * 64, "n" * 64, prefix_tokens=7)
TIMINGS = Timings(wait_ms=1.0, score_ms=2.0, batch_events=1)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `base` with `changes`; a value of None removes the key."""
    result: dict[str, Any] = json.loads(json.dumps(base))
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def write_policy(
    folder: Path,
    *,
    text: str | None = None,
    prefix_text: str = "Judge the order.\n",
    schema: Any = SCHEMA,
    **changes: Any,
) -> Path:
    """A policy folder: `SPEC` with changes, or `text` as its policy.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(merged(SPEC, changes), sort_keys=False) if text is None else text
    (folder / "policy.yaml").write_text(text, encoding="utf-8")
    (folder / "prefix.md").write_text(prefix_text, encoding="utf-8")
    body = schema if isinstance(schema, str) else json.dumps(schema)
    (folder / "event.json").write_text(body, encoding="utf-8")
    return folder


def make_policy(folder: Path, **changes: Any) -> Policy:
    return load_policy(write_policy(folder, **changes))


def record(value: Any = b'{"id": 1}', offset: int = 0, **changes: Any) -> Record:
    value = json.dumps(value).encode() if isinstance(value, dict) else value
    return Record(
        **{"topic": "in", "partition": 0, "key": b"k", **changes}, offset=offset, value=value
    )


class CharTokenizer:
    """One token per character; a `\\x00` in the text stands for a control token."""

    label_rows = 3

    def encode(self, policy: str, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def encode_all(self, policy: str, texts: Sequence[str]) -> list[TokenIds | RejectRecord]:
        found: list[TokenIds | RejectRecord] = []
        for text in texts:
            try:
                found.append(self.encode(policy, text))
            except RejectRecord as error:
                found.append(error)
        return found

    def rows(self, policy: str, tokens: int) -> int:
        return tokens + self.label_rows


def any_size(_topic: str) -> int:
    return sys.maxsize


def published(outcome: Outcome, source: Record) -> OutputRecord:
    """What is produced for an outcome on topics that take any size."""
    topics = Topics(input="in", output="out", dead_letter="dead")
    _, output = encode_outcome(outcome, source, topics, any_size)
    assert output is not None
    return output


@dataclass
class LengthScorer:
    """Scores that follow from an event's own tokens alone; keeps the batches that it saw."""

    batches: list[MicroBatch] = field(default_factory=list)

    def score(self, batch: MicroBatch) -> list[Scores]:
        self.batches.append(batch)
        return [Scores((0.0, -float(sum(s.token_ids) % 5), -9.0)) for s in batch.suffixes]

    def provenance(self, policy: str) -> Provenance:
        return PROVENANCE
