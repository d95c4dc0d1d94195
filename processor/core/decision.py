"""From scores to a decision, and from an outcome to the record that is published."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from processor.core.event import Headers, Reason, Record
from processor.core.policy import Policy
from processor.errors import RejectRecord

REJECTION_HEADER = "processor.rejection"


@dataclass(frozen=True, slots=True)
class Scores:
    """What the model says of one event: log-probabilities in the order of the policy's labels,
    normalised over the labels, before calibration."""

    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Provenance:
    """What besides the event decides the bits of a score."""

    model: str
    model_fingerprint: str
    numerics_fingerprint: str
    prefix_tokens: int


class _Published(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )


class Coordinates(_Published):
    """Where the event stands in Kafka. A key that is not UTF-8 is given in base64."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: Annotated[int, Field(description="Unix time in ms; -1: the record has none")]
    key: str | None
    key_encoding: Literal["utf-8", "base64"] = "utf-8"


class PolicyReference(_Published):
    name: str
    version: str
    fingerprint: str


class ModelReference(_Published):
    name: str
    fingerprint: Annotated[str, Field(description="SHA-256 over configuration, weights, tokenizer")]
    numerics: Annotated[str, Field(description="SHA-256 over dtype, kernels, chip and libraries")]


class Timings(_Published):
    """Milliseconds of one event's way; they differ from run to run, the scores do not."""

    wait_ms: Annotated[float, Field(description="from the poll until its micro-batch was begun")]
    score_ms: Annotated[float, Field(description="forward pass of its micro-batch")]
    batch_events: Annotated[int, Field(description="events in its micro-batch")]


class Decision(_Published):
    """One scored decision: the value of a record on the output topic."""

    label: str
    action: str
    scores: Annotated[dict[str, float], Field(description="probability of each label")]
    margin: Annotated[float, Field(description="best score minus second score")]
    event: Coordinates
    policy: PolicyReference
    model: ModelReference
    prefix_tokens: int
    suffix_tokens: int
    timings: Timings


class Rejection(_Published):
    """Why an event has no decision: the header `processor.rejection` of a dead letter, whose
    key and value are the input's own bytes."""

    reason: Reason
    detail: str
    event: Coordinates
    policy: PolicyReference


Outcome = Decision | Rejection


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """A record to be produced."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


def calibrated(policy: Policy, logprobs: Sequence[float]) -> list[float]:
    """Probabilities of the labels after the policy's calibration.

    Raises `RejectRecord('scores_not_finite')`: a NaN would be published as null.
    """
    calibration = policy.spec.calibration
    shifted = [
        value + calibration.bias.get(name, 0.0)
        for name, value in zip(policy.label_names, logprobs, strict=True)
    ]
    top = max(shifted)
    # The difference first: divided by a small temperature, all of them would be -inf.
    weights = [math.exp((value - top) / calibration.temperature) for value in shifted]
    total = sum(weights)
    # A label may have probability 0 (its log is -inf); NaN or +inf anywhere spoils the total.
    if not (math.isfinite(top) and math.isfinite(total)):
        raise RejectRecord("scores_not_finite", "the model returned NaN or infinity")
    return [weight / total for weight in weights]


def decide(
    policy: Policy,
    record: Record,
    scores: Scores,
    provenance: Provenance,
    suffix_tokens: int,
    timings: Timings,
) -> Decision:
    """Apply calibration and thresholds. Equal scores go to the label that the policy names
    first. Raises `RejectRecord` where the scores are not finite."""
    values = calibrated(policy, scores.logprobs)
    best, second = sorted(range(len(values)), key=lambda i: -values[i])[:2]
    label = policy.spec.labels[best]
    margin = values[best] - values[second]
    thresholds = policy.spec.thresholds
    sure = margin >= thresholds.review_below_margin and values[best] >= label.min_score
    return Decision(
        label=label.name,
        action=label.action if sure else thresholds.review_action,
        scores=dict(zip(policy.label_names, values, strict=True)),
        margin=margin,
        event=coordinates(record),
        policy=policy_reference(policy),
        model=ModelReference(
            name=provenance.model,
            fingerprint=provenance.model_fingerprint,
            numerics=provenance.numerics_fingerprint,
        ),
        prefix_tokens=provenance.prefix_tokens,
        suffix_tokens=suffix_tokens,
        timings=timings,
    )


def reject(record: Record, error: RejectRecord, policy: Policy) -> Rejection:
    reason: Any = error.reason  # checked by the model: an unknown reason is a bug and raises
    return Rejection(
        reason=reason,
        detail=error.detail,
        event=coordinates(record),
        policy=policy_reference(policy),
    )


def encode_outcome(outcome: Outcome, record: Record, topic: str) -> OutputRecord:
    """The record to produce for an outcome: input key and headers are carried over.

    A dead letter keeps the input's value byte for byte, so that it can be sent again once the
    cause is mended; the reason travels in a header. A reason from an earlier round is dropped.
    """
    headers = tuple(item for item in record.headers if item[0] != REJECTION_HEADER)
    if isinstance(outcome, Decision):
        return OutputRecord(topic, record.key, outcome.model_dump_json().encode(), headers)
    why = outcome.model_dump_json().encode()
    return OutputRecord(topic, record.key, record.value, (*headers, (REJECTION_HEADER, why)))


def policy_reference(policy: Policy) -> PolicyReference:
    return PolicyReference(
        name=policy.name, version=policy.spec.version, fingerprint=policy.fingerprint
    )


def coordinates(record: Record) -> Coordinates:
    key, encoding = _key(record.key)
    return Coordinates(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        key=key,
        key_encoding=encoding,
    )


def _key(key: bytes | None) -> tuple[str | None, Literal["utf-8", "base64"]]:
    if key is None:
        return None, "utf-8"
    try:
        return key.decode(), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(key).decode(), "base64"
