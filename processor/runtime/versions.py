"""What the policy folders hold by now: read in a thread of its own, for a disk may be slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from processor.core.pipeline import check_successor
from processor.core.policy import Policy, load_policy
from processor.errors import ConfigError, ProcessorError

C = TypeVar("C")  # a policy as the tokenizer compiled it

READS = 5  # tries to see a folder twice in one state
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Found(Generic[C]):
    """What is in the folder of the policy `running`: a policy, or why it is `refused`. `compiled`
    is there where the policy is another version than the running one."""

    running: Policy
    policy: Policy | None = None
    compiled: C | None = None
    refused: str = ""


class Reader(Generic[C]):
    """One read at a time. All but the read itself is called in one thread."""

    def __init__(self, compile: Callable[[Policy], C]) -> None:
        self._compile = compile
        self._found: list[Found[C]] | None = None
        self.busy = False

    def begin(self, running: Sequence[Policy]) -> None:
        self.busy = True
        threading.Thread(
            target=self._read, args=(running,), name="processor-reload", daemon=True
        ).start()

    def take(self) -> list[Found[C]]:
        """What the latest read has found, once."""
        found, self._found = self._found, None
        if found is None:
            return []
        self.busy = False
        return found

    def _read(self, running: Sequence[Policy]) -> None:
        self._found = [read_version(policy, self._compile) for policy in running]


def read_version(running: Policy, compile: Callable[[Policy], C]) -> Found[C]:
    """Everything that a start would check, and that a model is not needed for."""
    try:
        policy = _read_settled(running)
        check_successor(running, policy)
        if policy.key == running.key:
            return Found(running, policy)
        compiled = compile(policy)
        _ = policy.render, policy.validate  # compiled here and not while records wait
        return Found(running, policy, compiled)
    except ProcessorError as error:
        return Found(running, refused="; ".join(str(error).splitlines()))
    except Exception as error:  # whatever is in a folder, the version that runs is good
        return Found(running, refused=f"{type(error).__name__}: {error}")


def _read_settled(running: Policy) -> Policy:
    """The policy of a folder that looks the same twice in a row. A version has several files: a
    read while they are replaced would make one policy out of two."""
    last = _read(running.path)
    if _mark(last) == _mark(running):
        return running
    for _ in range(READS):
        time.sleep(PAUSE_S)
        found = _read(running.path)
        if _mark(found) == _mark(last):
            if isinstance(found, ProcessorError):
                raise found
            return found
        last = found
    raise ConfigError(str(running.path), "policy", running.name, "changes all the time: try again")


def _read(path: Path) -> Policy | ProcessorError:
    try:
        return load_policy(path)
    except ProcessorError as error:
        return error


def _mark(found: Policy | ProcessorError) -> object:
    return (found.fingerprint, found.spec) if isinstance(found, Policy) else str(found)
