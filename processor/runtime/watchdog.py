"""Ends the process when one of its threads hangs.

A client call that never returns (librdkafka#4420), a driver that waits for a dead device: no
thread can be stopped from outside, and a process that only looks alive keeps its partitions for
ever. The supervisor starts a new one, which goes on at the committed offsets.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

EVERY_S = 1.0
Check = Callable[[], str | None]


def end_process(reason: str) -> None:
    """Say why and where every thread stands, and leave without waiting for anybody."""
    logger.critical("%s: ending the process", reason, extra={"action": "watchdog"})
    faulthandler.dump_traceback(sys.__stderr__ or 2)
    logging.shutdown()
    os._exit(1)


class Watchdog:
    """Asks `check` every second in a thread of its own; what it answers ends the process."""

    def __init__(self, check: Check, end: Callable[[str], None] = end_process) -> None:
        self._check = check
        self._end = end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="processor-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_S):
            if (reason := self._check()) is not None:
                self._end(reason)
                return
