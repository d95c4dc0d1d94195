"""Stops a worker that rejects everything: a bad deployment must not empty a topic into the
dead-letter topic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from processor.core.decision import Outcome, Rejection
from processor.errors import ExitProcess


class Circuit:
    """Counts rejections in a row. `limit` 0: never stops."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reasons: Counter[str] = Counter()

    def check(self, outcomes: Sequence[Outcome]) -> None:
        """Before these are published. Raises `ExitProcess` where they exceed the limit."""
        reasons = self._after(outcomes)
        if self._limit and (total := reasons.total()) > self._limit:
            reason, count = reasons.most_common(1)[0]
            raise ExitProcess(
                f"{total} records in a row were rejected, {count} of them for {reason}: mend the "
                "cause, or raise runtime.max_rejections_in_row"
            )

    def published(self, outcomes: Sequence[Outcome]) -> None:
        self._reasons = self._after(outcomes)

    def _after(self, outcomes: Sequence[Outcome]) -> Counter[str]:
        row = self._reasons.copy()
        for outcome in outcomes:
            if isinstance(outcome, Rejection):
                row[outcome.reason] += 1
            else:
                row.clear()
        return row
