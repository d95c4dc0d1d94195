"""Stop signals: the first asks, the second insists. SIGHUP asks for the policies' new versions."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Protocol


class Stoppable(Protocol):
    @property
    def stopping(self) -> bool: ...

    def stop(self) -> None: ...


def install_signal_handlers(
    worker: Stoppable, reload: Callable[[], None] | None = None
) -> Callable[[], None]:
    """SIGTERM and SIGINT stop the worker; a second one ends the process at once. SIGHUP calls
    `reload`, where there is one.

    Returns a function that puts the former handlers back. Main thread only.
    """

    def handle(signum: int, _frame: FrameType | None) -> None:
        if worker.stopping:
            os._exit(128 + signum)
        worker.stop()

    def hang_up(_signum: int, _frame: FrameType | None) -> None:
        if reload is not None:
            reload()

    former = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    if reload is not None:
        former[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)

    def restore() -> None:
        for signum, handler in former.items():
            signal.signal(signum, handler)

    return restore
