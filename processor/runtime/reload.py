"""A new version of a policy takes over from the running one between two micro-batches.

    reload thread   read folders, check, compile
    model thread                                   capture, step by step      free the old prefix
    broker thread   ask ........................ ................... swap ... old one has no record

The running version serves until the new one can; records that were prepared under it are scored,
decided and published under it. What is wrong with a new version costs a line and a count.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from processor.broker.transaction import Clock
from processor.core.pipeline import Pipeline
from processor.core.policy import Policy
from processor.runtime.model_thread import ModelThread, Task
from processor.runtime.scoring import Scoring
from processor.runtime.telemetry import Counters
from processor.runtime.versions import Found, Reader

C = TypeVar("C")  # a policy as the tokenizer compiled it
C_contra = TypeVar("C_contra", contravariant=True)

logger = logging.getLogger(__name__)


class Tokenizers(Protocol[C]):
    """The pipeline's tokenizer, as it takes in versions."""

    def compile(self, policy: Policy) -> C:
        """In any thread. Raises `ConfigError` for a policy that this model cannot serve."""

    def add(self, compiled: C) -> None: ...

    def drop(self, key: str) -> None: ...


class Scorers(Protocol[C_contra]):
    """The pipeline's scorer, as it takes in versions; in the model's thread."""

    def load_steps(self, compiled: C_contra) -> Generator[None, None, None]:
        """Make it ready to score; events are scored wherever this yields."""

    def drop(self, key: str) -> None:
        """Free what a version holds, if there is any."""


@dataclass(frozen=True, slots=True)
class Reloading(Generic[C]):
    """What a worker needs to change policies. `every_s`: how often it looks by itself; 0: never."""

    tokenizer: Tokenizers[C]
    scorer: Scorers[C]
    every_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Loading(Generic[C]):
    policy: Policy
    compiled: C
    task: Task


class Reloads(Generic[C]):
    """Called in the broker thread, but for `ask`."""

    def __init__(
        self,
        reloading: Reloading[C],
        pipeline: Pipeline,
        model: ModelThread,
        scoring: Scoring,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._tokenizer, self._scorer = reloading.tokenizer, reloading.scorer
        self._every_s = reloading.every_s
        self._pipeline = pipeline
        self._model = model
        self._scoring = scoring
        self._counters = counters
        self._clock = clock
        self._reader = Reader(reloading.tokenizer.compile)
        self._asked = False  # no Event: its lock could be held by the thread a signal interrupts
        self._due = clock() + self._every_s
        self._loading: dict[str, _Loading[C]] = {}  # by policy name: its last version, on its way
        self._retired: set[str] = set()  # keys of versions that may still have records
        self._refused: dict[str, str] = {}  # by policy name: what was said last, or which key

    def ask(self) -> None:
        """Read the folders again; what was refused before is tried and reported again."""
        self._asked = True

    def step(self) -> None:
        """What is due by now; never waits."""
        self._begin_read()
        for found in self._reader.take():
            self._consider(found)
        for loading in [each for each in self._loading.values() if each.task.ended]:
            del self._loading[loading.policy.name]
            if loading.task.failure is None:
                self._swap(loading.policy, loading.compiled)
            else:
                self._refuse(loading.policy, loading.policy.key, loading.task.failure)
        if self._retired:
            self._free()

    def close(self) -> None:
        """Leave the rest of the model's time to what it has been given."""
        for name in list(self._loading):
            self._give_up(name)

    def _begin_read(self) -> None:
        polled = self._every_s > 0 and self._clock() >= self._due
        if self._reader.busy or not (self._asked or polled):
            return
        if self._asked:
            self._refused.clear()
        self._asked = False  # before the read begins: who asks from now on is asking for another
        self._due = self._clock() + self._every_s
        self._reader.begin(list(self._pipeline.policies.values()))

    def _consider(self, found: Found[C]) -> None:
        running, policy = self._running(found.running), found.policy
        if policy is None:
            self._refuse(running, found.refused, found.refused)
            return
        loading = self._loading.get(policy.name)
        if policy.key == (loading.policy if loading else running).key:
            self._counters.reloaded("unchanged")
        elif policy.key == running.key:  # taken back before it was captured
            self._give_up(policy.name)
            self._counters.reloaded("unchanged")
        elif found.compiled is None:  # what was running when the read began no longer is
            self._asked = True
        elif self._refused.get(policy.name) != policy.key:
            self._load(policy, found.compiled)

    def _load(self, policy: Policy, compiled: C) -> None:
        self._give_up(policy.name)
        if policy.key in self._retired:  # back to a version that has not been freed yet
            self._retired.remove(policy.key)
            self._swap(policy, compiled)
            return
        task = Task(self._scorer.load_steps(compiled))
        self._loading[policy.name] = _Loading(policy, compiled, task)
        self._model.begin(task)

    def _give_up(self, name: str) -> None:
        loading = self._loading.pop(name, None)
        if loading is not None:
            loading.task.cancel()
            self._drop(loading.policy.key)  # it may have ended before it saw that

    def _swap(self, policy: Policy, compiled: C) -> None:
        before = self._running(policy)
        self._tokenizer.add(compiled)
        self._pipeline.swap(policy)
        self._retired.add(before.key)
        self._refused.pop(policy.name, None)
        self._counters.reloaded("swapped")
        _say(f"policy {policy.name}: {_version(policy)} takes over from {_version(before)}")

    def _refuse(self, policy: Policy, mark: str, why: str) -> None:
        """Said and counted once, however often the folder is polled."""
        if self._refused.get(policy.name) != mark:
            self._refused[policy.name] = mark
            self._counters.reloaded("refused")
            _say(f"policy {policy.name} stays at {_version(self._running(policy))}: {why}")

    def _free(self) -> None:
        for key in self._retired - self._scoring.policies():
            self._retired.remove(key)
            self._tokenizer.drop(key)
            self._drop(key)

    def _drop(self, key: str) -> None:
        """After whatever the model's thread has been asked for before."""
        self._model.begin(Task(_drop(self._scorer, key)))

    def _running(self, policy: Policy) -> Policy:
        return self._pipeline.policies[policy.spec.topics.input]


def _drop(scorer: Scorers[C], key: str) -> Generator[None, None, None]:
    scorer.drop(key)
    yield


def _version(policy: Policy) -> str:
    return f"version {policy.spec.version} ({policy.fingerprint[:12]})"


def _say(line: str) -> None:
    """A warning, though a swap is none: an operator who asked wants to see that it happened."""
    logger.warning("%s", line, extra={"action": "reload"})
