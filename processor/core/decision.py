"""Outcomes: what is said of a record, and how a decision follows from scores."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from processor.core.event import Reason, Record
from processor.core.policy import Policy
from processor.errors import RejectRecord


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
    attempts: Annotated[
        int, Field(ge=1, description="how often: above 1 for a dead letter that was sent again")
    ] = 1
    value_omitted: Annotated[
        bool,
        Field(
            description="the dead-letter topic takes no record of this size: key, value and "
            "headers are where `event` points to, and not here"
        ),
    ] = False


class Tombstone(_Published):
    """A record without a value that the policy does not reject: the header `processor.tombstone`
    of the record that is passed on, also without a value; nothing where it is skipped."""

    passed: bool
    event: Coordinates
    policy: PolicyReference


Outcome = Decision | Rejection | Tombstone


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
    best = values.index(max(values))
    label = policy.spec.labels[best]
    margin = values[best] - max(values[:best] + values[best + 1 :])
    thresholds = policy.spec.thresholds
    sure = margin >= thresholds.review_below_margin and values[best] >= label.min_score
    return Decision(
        label=label.name,
        action=label.action if sure else thresholds.review_action,
        scores=dict(zip(policy.label_names, values, strict=True)),
        margin=margin,
        event=coordinates(record),
        policy=policy_reference(policy),
        model=_model_reference(provenance),
        prefix_tokens=provenance.prefix_tokens,
        suffix_tokens=suffix_tokens,
        timings=timings,
    )


def reject(record: Record, error: RejectRecord, policy: Policy, attempts: int = 1) -> Rejection:
    reason: Any = error.reason  # checked by the model: an unknown reason is a bug and raises
    return Rejection(
        reason=reason,
        detail=error.detail,
        event=coordinates(record),
        policy=policy_reference(policy),
        attempts=attempts,
    )


def policy_reference(policy: Policy) -> PolicyReference:
    return _reference(policy.name, policy.spec.version, policy.fingerprint)


# The same few values for every event: built once, they are not validated again either.
@lru_cache(maxsize=1024)
def _reference(name: str, version: str, fingerprint: str) -> PolicyReference:
    return PolicyReference(name=name, version=version, fingerprint=fingerprint)


@lru_cache(maxsize=1024)
def _model_reference(provenance: Provenance) -> ModelReference:
    return ModelReference(
        name=provenance.model,
        fingerprint=provenance.model_fingerprint,
        numerics=provenance.numerics_fingerprint,
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
