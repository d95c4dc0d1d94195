"""Every exception of the package, named by what the caller must do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ProcessorError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(ProcessorError):
    """Fix the setting: nothing has been started. One line: where, key, value, what to do."""

    def __init__(self, where: str, key: str, value: Any, remedy: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{where}: {key} = {shown}: {remedy}")
        self.where, self.key, self.value, self.remedy = where, key, value, remedy


class ConfigErrors(ProcessorError):
    """Fix several settings at once: one line each."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = tuple(errors)


class RejectRecord(ProcessorError):
    """Reject this one record with the reason and go on; never reaches the worker loop."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class DistrustFigures(ProcessorError):
    """Systems under measurement gave different answers: find out which is wrong first."""


class BrokerError(ProcessorError):
    """Base of what a broker call can report; the subclass says what to do next."""


class RetryCall(BrokerError):
    """Call the same function again; its effect may already have happened and is idempotent."""


class AbortAndRewind(BrokerError):
    """Abort the transaction, rewind to the first unpublished offset and go on."""


class RebuildProducer(BrokerError):
    """The producer is lost: build a new one, rewind to the committed offsets and go on."""


class ShrinkOutput(RebuildProducer):
    """A record is larger than its topic takes: publish it in short form, and go on as after a
    rebuild. `topic` is None where the client does not say which."""

    def __init__(self, message: str, topic: str | None = None) -> None:
        super().__init__(message)
        self.topic = topic


class ExitProcess(BrokerError):
    """Nobody in this process can mend it: stop and let the supervisor restart us."""
