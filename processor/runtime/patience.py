"""How long to go on when publishing fails again and again."""

from __future__ import annotations

from processor.broker.transaction import Clock
from processor.errors import ExitProcess


class Patience:
    """How often publishing may fail in a row, and how long to wait after each failure.

    The first failure costs no wait: a rebalance or a fence is over at once. A cause that stays
    (no such topic, a record that is too large) must not spin, and ends the process.
    """

    LIMIT = 10
    FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._until = 0.0

    @property
    def waiting(self) -> bool:
        return self._clock() < self._until

    def failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= self.LIMIT:
            raise ExitProcess(
                f"publishing failed {self._failures} times in a row, last: {error}"
            ) from error
        if self._failures > 1:
            wait = self.FIRST_WAIT_S * 2 ** (self._failures - 2)
            self._until = self._clock() + min(wait, self.LONGEST_WAIT_S)

    def succeeded(self) -> None:
        self._failures, self._until = 0, 0.0
