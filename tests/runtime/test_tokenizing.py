"""Records between the broker thread and the model: in the hands of the tokenizer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from processor.core.pipeline import Pipeline, Rendered, TokenIds
from processor.errors import RejectRecord
from processor.runtime.ledger import Entry, Ledger
from processor.runtime.model_thread import ModelThread
from processor.runtime.scoring import Scoring
from processor.runtime.tokenizing import Tokenizing
from tests.core.builders import CharTokenizer, LengthScorer
from tests.runtime.world import PATIENCE_S, World, await_


@dataclass
class GatedTokenizer(CharTokenizer):
    """Tokenizes only while its gate is open; knows how many texts were given to it at a time."""

    gate: threading.Event = field(default_factory=threading.Event)
    calls: list[int] = field(default_factory=list)

    def encode_all(self, policy: str, texts: Sequence[str]) -> list[TokenIds | RejectRecord]:
        self.calls.append(len(texts))
        assert self.gate.wait(PATIENCE_S)
        return super().encode_all(policy, texts)


class BrokenTokenizer(CharTokenizer):
    def encode_all(self, policy: str, texts: Sequence[str]) -> list[TokenIds | RejectRecord]:
        raise ValueError("vocabulary not found")


def portions(
    world: World, pipeline: Pipeline, size: int
) -> list[tuple[list[Entry], list[Rendered]]]:
    """All records of the input, so many at a time."""
    ledger, found = Ledger(), []
    ledger.assign([("in", n) for n in range(world.partitions)])
    records = world.broker.read("in")
    for start in range(0, len(records), size):
        entries, texts = [], []
        for record in records[start : start + size]:
            entry, text = ledger.add(record, 0.0), pipeline.read(record)
            assert entry is not None
            assert isinstance(text, Rendered)
            entries.append(entry)
            texts.append(text)
        found.append((entries, texts))
    return found


def test_portions_come_back_in_their_order(world: World) -> None:
    world.fill(6, damaged_every=0)
    tokenizer = GatedTokenizer()
    pipeline = Pipeline([world.policy], tokenizer, LengthScorer())
    tokenizing, given = Tokenizing(pipeline), portions(world, pipeline, 2)
    for entries, texts in given:
        tokenizing.begin(entries, texts)
    assert tokenizing.collect() == []
    assert tokenizing.policies() == {world.policy.key}
    tokenizer.gate.set()
    found = tokenizing.collect(wait=True)
    assert len(found) in (2, 4, 6)  # at least one portion, and what else has come in time
    while tokenizing.busy:
        found += tokenizing.collect(wait=True)
    assert [entry for entry, _, _ in found] == [entry for entries, _ in given for entry in entries]
    assert [tokens for _, _, tokens in found] == [
        tuple(map(ord, text.text)) for _, texts in given for text in texts
    ]
    assert tokenizing.policies() == set()
    assert tokenizing.collect(wait=True) == []
    tokenizing.close()


def test_what_was_not_begun_is_left(world: World) -> None:
    world.fill(6, damaged_every=0)
    tokenizer = GatedTokenizer()
    pipeline = Pipeline([world.policy], tokenizer, LengthScorer())
    tokenizing = Tokenizing(pipeline)
    for entries, texts in portions(world, pipeline, 2):
        tokenizing.begin(entries, texts)
    await_(lambda: len(tokenizer.calls) == 1)
    tokenizing.close()
    tokenizing.close()
    assert not tokenizing.busy
    tokenizer.gate.set()
    tokenizing._thread.shutdown(wait=True)
    assert tokenizer.calls == [2]


def test_a_version_is_needed_until_its_last_record_is_finished(world: World) -> None:
    """While texts are with the tokenizer nothing else knows which version they belong to."""
    world.fill(2, damaged_every=0)
    tokenizer, ledger = GatedTokenizer(), Ledger()
    ledger.assign([("in", n) for n in range(world.partitions)])
    pipeline = Pipeline([world.policy], tokenizer, LengthScorer())
    model = ModelThread(pipeline, time.monotonic)
    scoring = Scoring(pipeline, model, ledger, world.counters, time.monotonic)
    scoring.take_in(world.broker.read("in"))
    assert scoring.policies() == {world.policy.key}
    tokenizer.gate.set()
    scoring.take_in([])
    assert not scoring.tokenizing
    assert scoring.policies() == {world.policy.key}
    model.start()
    model.wait(PATIENCE_S)
    scoring.collect()
    assert scoring.policies() == set()
    scoring.close()
    model.stop(PATIENCE_S)


def test_a_tokenizer_that_raises_ends_the_worker(world: World) -> None:
    """What one event cannot be blamed for is a fault of the program, and costs no record."""
    world.fill()
    with pytest.raises(ValueError, match="vocabulary not found"):
        world.run(world.worker(tokenizer=BrokenTokenizer()))
    assert world.broker.read("out") == world.broker.read("dead") == []


def test_portions_are_micro_batches(world: World) -> None:
    world.fill(8, damaged_every=0)
    tokenizer = GatedTokenizer()
    running = world.start(world.worker(tokenizer=tokenizer), world.done)
    await_(lambda: tokenizer.calls == [4])
    await_(lambda: world.counters.snapshot().records == 8)
    tokenizer.gate.set()
    running.join()
    world.verify()
    world.verify_observed()
    assert tokenizer.calls == [4, 4]


def test_a_worker_stops_while_the_tokenizer_works(world: World) -> None:
    """What the model has not been given by then is left to the next start."""
    world.fill(40, damaged_every=0)
    tokenizer = GatedTokenizer()
    running = world.start(world.worker(tokenizer=tokenizer))
    await_(lambda: tokenizer.calls == [4])
    running.worker.stop()
    tokenizer.gate.set()
    running.join()
    assert len(world.broker.read("out")) < 40
    world.run(world.worker())
    world.verify()
