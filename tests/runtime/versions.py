"""A tokenizer and a scorer that hold versions and refuse any other; no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processor.core.batch import MicroBatch
from processor.core.decision import Provenance, Scores
from processor.core.policy import Policy
from processor.errors import ConfigError
from processor.runtime.reload import Reloading
from processor.runtime.worker import Worker
from tests.core.builders import CharTokenizer, LengthScorer, write_policy
from tests.runtime.world import PATIENCE_S, World

UNSERVABLE, UNCAPTURABLE = "unservable", "uncapturable"  # descriptions of policies


class VersionTokenizer(CharTokenizer):
    def __init__(self, policy: Policy) -> None:
        self.keys = {policy.key}

    def compile(self, policy: Policy) -> Policy:
        if policy.spec.description == UNSERVABLE:
            raise ConfigError(str(policy.path), "prefix", "...", "leaves no room")
        return policy

    def add(self, compiled: Policy) -> None:
        self.keys.add(compiled.key)

    def drop(self, key: str) -> None:
        self.keys.discard(key)

    def encode(self, policy: str, text: str) -> tuple[int, ...]:
        assert policy in self.keys
        return super().encode(policy, text)

    def rows(self, policy: str, tokens: int) -> int:
        assert policy in self.keys
        return super().rows(policy, tokens)


@dataclass
class VersionScorer(LengthScorer):
    """`log`: what the model's thread did: the policies of each batch, the key of each step."""

    keys: set[str] = field(default_factory=set)
    log: list[str | tuple[str, ...]] = field(default_factory=list)
    steps: int = 3
    seconds: float = 0.0
    scoring: threading.Event = field(default_factory=threading.Event)  # a gate before each batch
    loading: threading.Event = field(default_factory=threading.Event)  # a gate before each step

    def __post_init__(self) -> None:
        self.scoring.set()
        self.loading.set()

    def score(self, batch: MicroBatch) -> list[Scores]:
        assert self.scoring.wait(PATIENCE_S)
        time.sleep(self.seconds)
        assert self.keys >= {suffix.policy for suffix in batch.suffixes}
        self.log.append(tuple(suffix.policy for suffix in batch.suffixes))
        return super().score(batch)

    def provenance(self, policy: str) -> Provenance:
        assert policy in self.keys
        return super().provenance(policy)

    def load_steps(self, compiled: Policy) -> Generator[None, None, None]:
        for _ in range(self.steps):
            self.log.append(compiled.key)
            assert self.loading.wait(PATIENCE_S)
            yield
        if compiled.spec.description == UNCAPTURABLE:
            raise MemoryError("out of memory")
        self.keys.add(compiled.key)

    def drop(self, key: str) -> None:
        self.keys.discard(key)


class Hot:
    """A worker over the in-process broker whose policy folder can be rewritten."""

    def __init__(self, world: World, folder: Path, every_s: float = 0.0, **scorer: Any) -> None:
        self.world = world
        self.folder = folder
        self.tokenizer = VersionTokenizer(world.policy)
        self.scorer = VersionScorer(keys={world.policy.key}, **scorer)
        self.reloading = Reloading(self.tokenizer, self.scorer, every_s)

    def worker(self, **options: Any) -> Worker:
        return self.world.worker(
            scorer=self.scorer, tokenizer=self.tokenizer, reloading=self.reloading, **options
        )

    def write(self, **changes: Any) -> None:
        write_policy(self.folder, **changes)

    def reloads(self, outcome: str) -> int:
        return self.world.counters.snapshot().policy_reloads.get(outcome, 0)
