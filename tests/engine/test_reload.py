"""A policy's new version beside others on a real model: bits and memory."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processor.broker.memory import MemoryBroker
from processor.config import load_settings
from processor.core.batch import Budget, MicroBatch, Suffix
from processor.core.pipeline import Pipeline
from processor.core.policy import Policy, load_policy
from processor.engine.prefix import PrefixSpan
from processor.engine.scorer import PrefixScorer
from processor.engine.tokenizer import SuffixTokenizer
from processor.runtime.reload import Reloading
from processor.runtime.telemetry import Counters
from processor.runtime.worker import Worker
from processor.wiring import load_running
from tests.engine.conftest import PREFIX, MakePolicy, text_policy
from tests.engine.tiny import save_tiny_model, tiny_model
from tests.runtime.world import await_, in_thread, judge

LONG = PREFIX + "\n\nOrder: hello world, see you" * 20  # several blocks
TEXTS = ["", "hello", "see you " * 5, "x" * 30]


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def suffixes(tokenizer: SuffixTokenizer, policy: Policy) -> list[Suffix]:
    texts = [json.dumps({"text": text}) for text in TEXTS]
    return [Suffix(policy.key, tokenizer.encode(policy.key, text)) for text in texts]


def tensors(scorer: PrefixScorer, key: str) -> list[weakref.ref[Any]]:
    loaded = scorer._loaded[key]
    spans = loaded.prefix.spans
    parts = [t for span in spans for t in (*span.keys, *span.values)]
    return [weakref.ref(each) for each in (loaded, loaded.label_logits, loaded.prefix, *parts)]


def test_others_score_the_same_bits_all_along(make_policy: MakePolicy) -> None:
    old, other = make_policy("orders", prefix=LONG), make_policy("other", ("ok", "fraud"))
    new = make_policy("orders", ("yes", "no"), prefix=LONG + " Be strict.")
    tokenizer = SuffixTokenizer(tiny_model(), [old, other])
    scorer = PrefixScorer(tiny_model(), tokenizer.policies.values())
    batch = MicroBatch((*suffixes(tokenizer, old), *suffixes(tokenizer, other)))
    before = scorer.score(batch)
    compiled = tokenizer.compile(new)
    steps = 0
    for _ in scorer.load_steps(compiled):
        assert scorer.score(batch) == before
        steps += 1
    assert steps > 2
    tokenizer.add(compiled)
    mixed = MicroBatch((*batch.suffixes, *suffixes(tokenizer, new)))
    found = scorer.score(mixed)
    assert found[: len(batch)] == before
    scorer.drop(old.key)
    late = MicroBatch((*suffixes(tokenizer, other), *suffixes(tokenizer, new)))
    assert scorer.score(late) == found[len(TEXTS) :]
    alone = SuffixTokenizer(tiny_model(), [new])
    fresh = PrefixScorer(tiny_model(), alone.policies.values())
    assert fresh.score(MicroBatch(tuple(suffixes(alone, new)))) == found[2 * len(TEXTS) :]


@pytest.mark.usefixtures("no_collection")
def test_a_capture_that_is_given_up_leaves_nothing(make_policy: MakePolicy) -> None:
    model = tiny_model()
    tokenizer = SuffixTokenizer(model, [])
    scorer = PrefixScorer(model, [])
    others = _spans()
    steps = scorer.load_steps(tokenizer.compile(make_policy(prefix=LONG)))
    next(steps)
    next(steps)
    assert _spans() == others + 2
    steps.close()
    assert _spans() == others
    assert scorer._loaded == {}


def _spans() -> int:
    return sum(type(each) is PrefixSpan for each in gc.get_objects())


class Stand:
    """Two policies on a tiny model, and a worker over the in-process broker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policies = [
            load_policy(text_policy(folder, "orders", prefix=LONG)),
            load_policy(text_policy(folder, "other", ("ok", "fraud"))),
        ]
        model = tiny_model()
        self.tokenizer = SuffixTokenizer(model, self.policies)
        self.scorer = PrefixScorer(model, self.tokenizer.policies.values())
        self.broker = MemoryBroker()
        for policy in self.policies:
            for topic in policy.spec.topics.model_dump().values():
                self.broker.create_topic(topic, 1)
        self.counters = Counters()
        self.given = 0
        pipeline = Pipeline(self.policies, self.tokenizer, self.scorer, Budget(256, 6))
        source = self.broker.source("group", "a", ["orders", "other"])
        reloading = Reloading(self.tokenizer, self.scorer)
        sink = self.broker.sink("a")
        worker = Worker(pipeline, source, sink, self.counters, publish_s=5.0, reloading=reloading)
        self.running = in_thread(worker)

    def fill(self, count: int) -> None:
        for n in range(count):
            for topic in ("orders", "other"):
                text = TEXTS[n % len(TEXTS)]
                self.broker.append(topic, 0, None, json.dumps({"text": text}).encode())
        self.given += 2 * count

    def decided(self) -> bool:
        return self.counters.snapshot().decisions == self.given

    def swap(self, **changes: Any) -> Policy:
        before = self.counters.snapshot().policy_reloads.get("swapped", 0)
        folder = text_policy(self.folder, "orders", **changes)
        self.running.worker.reload()
        await_(lambda: self.counters.snapshot().policy_reloads.get("swapped", 0) == before + 1)
        return load_policy(folder)

    def out(self, topic: str) -> list[dict[str, Any]]:
        return [json.loads(r.value or b"") for r in self.broker.read(f"{topic}.out")]


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path)
    yield stand
    stand.running.stop()


@pytest.mark.usefixtures("no_collection")
def test_the_old_version_is_freed_at_once(stand: Stand) -> None:
    old = stand.policies[0]
    refs = tensors(stand.scorer, old.key)
    stand.fill(10)
    await_(stand.decided)
    new = stand.swap(prefix=LONG + " Be strict.")
    stand.fill(3)
    await_(stand.decided)
    await_(lambda: all(ref() is None for ref in refs))
    keys = {new.key, stand.policies[1].key}
    assert stand.tokenizer.policies.keys() == stand.scorer._loaded.keys() == keys


def test_one_of_two_policies_changes_under_load(stand: Stand) -> None:
    old, other = stand.policies
    stand.fill(60)
    versions = [old]
    for labels in (("yes", "no"), ("approve", "decline"), ("ok", "fraud", "review")):
        versions.append(stand.swap(labels=labels, prefix=f"{LONG} One of {labels}."))
        stand.fill(30)
    await_(stand.decided)
    for topic in ("orders", "other"):
        judge(stand.broker.read(topic), stand.broker.read(f"{topic}.out"), [])
    seen: dict[str, list[int]] = {}
    for decision in stand.out("orders"):
        seen.setdefault(decision["policy"]["fingerprint"], []).append(decision["event"]["offset"])
    assert list(seen) == [version.fingerprint for version in versions]
    assert [n for offsets in seen.values() for n in offsets] == list(range(150))
    unchanged = stand.out("other")
    assert {d["policy"]["fingerprint"] for d in unchanged} == {other.fingerprint}
    scores = {(n % len(TEXTS), tuple(d["scores"].values())) for n, d in _places(unchanged)}
    assert len(scores) == len(TEXTS)  # every bit, before, during and after
    assert stand.counters.snapshot().policy_reloads == {"swapped": 3, "unchanged": 3}


def test_a_prefix_that_leaves_no_room_is_refused(stand: Stand) -> None:
    text_policy(stand.folder, "orders", prefix="x " * 2000)
    stand.running.worker.reload()
    await_(lambda: stand.counters.snapshot().policy_reloads.get("refused") == 1)
    stand.fill(4)
    await_(stand.decided)
    wanted = stand.policies[0].fingerprint
    assert {d["policy"]["fingerprint"] for d in stand.out("orders")} == {wanted}


def test_settings_give_a_worker_all_that_it_takes(tmp_path: Path) -> None:
    source = str(save_tiny_model(tmp_path / "model"))
    settings = load_settings(
        None, {"PROCESSOR_MODEL__SOURCE": source, "PROCESSOR_RUNTIME__RELOAD_S": "2.5"}
    )
    policy = load_policy(text_policy(tmp_path))
    pipeline, reloading, _ = load_running(settings, [policy])
    assert reloading.every_s == 2.5
    assert id(reloading.tokenizer) == id(pipeline.tokenizer)
    assert id(reloading.scorer) == id(pipeline.scorer)
    assert pipeline.scorer.provenance(policy.key).prefix_tokens > 0


def _places(decisions: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """TEXTS begin anew with each call of `fill`: 60 = 30 + 30, and 4 does not divide 30."""
    return [
        (n if n < 60 else (n - 60) % 30, decision)
        for n, decision in enumerate(sorted(decisions, key=lambda d: d["event"]["offset"]))
    ]
