"""Whether systems that are timed side by side give the same answers. A benchmark of a wrong answer
is worth nothing, so nothing is timed before this has passed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from processor.errors import DistrustFigures

# Largest difference between log-probabilities of a label that rounding explains. Another event's
# answer, a lost prefix or a shifted position is off by 0.1 to 3 (logits of trained models).
TOLERANCE = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.3}

# (event, log-probabilities of its labels); an event may be answered twice, at two places of a batch
Answers = Sequence[tuple[str, Sequence[float]]]


def check_agreement(answers: Mapping[str, Answers], tolerance: float) -> float:
    """Compare each system with the first one that answered the same event; the largest difference
    found. Raises `DistrustFigures` where it exceeds the tolerance, or where a system answered no
    event that one before it did."""
    known: dict[str, tuple[str, Sequence[float]]] = {}
    largest = 0.0
    for place, (system, found) in enumerate(answers.items()):
        known_before = set(known)
        for event, own in found:
            other, expected = known.setdefault(event, (system, own))
            difference = _difference(own, expected)
            if difference > tolerance:
                raise DistrustFigures(
                    f"bench: {system} and {other} disagree on event {event}: log-probabilities "
                    f"{_shown(own)} and {_shown(expected)}, more than {tolerance:g} apart; "
                    "nothing was timed"
                )
            largest = max(largest, difference)
        if place and known_before.isdisjoint(event for event, _ in found):
            raise DistrustFigures(f"bench: {system} answered no event that another answered")
    return largest


def _difference(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest one; infinite where a value is no number, for that agrees with nothing."""
    differences = [abs(a - b) for a, b in zip(left, right, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _shown(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:.4f}" for value in values) + ")"
