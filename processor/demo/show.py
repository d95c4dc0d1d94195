"""The demo: five policies, one model, an in-process broker, and an audit of what came out.

Everything but the broker is what `processor run` uses: the same pipeline, engine and worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from random import Random
from statistics import mean
from typing import Any, Literal

import orjson
from sklearn.metrics import roc_auc_score

from processor.broker.memory import MemoryBroker
from processor.core.decision import Decision, Rejection
from processor.core.encode import REJECTION_HEADER
from processor.core.policy import Policy
from processor.demo.damage import DAMAGES
from processor.demo.labelled import Labelled
from processor.demo.orders import orders
from processor.demo.samples import read_samples
from processor.errors import ConfigError
from processor.runtime.telemetry import Snapshot

DAMAGED_SHARE = 0.05
PARTITIONS = 2
GROUP = "demo"
BATCH_EVENTS = 8  # small micro-batches: a CPU gains little from larger ones, and the eye loses


@dataclass(frozen=True, slots=True)
class Scene:
    """How many events of a policy the demo shows, and how they are judged. `positive`: the label
    whose score is ranked for an AUC."""

    events: int
    metric: Literal["auc", "accuracy"] = "accuracy"
    positive: str | None = None


# The slower a policy's events, the fewer: a chip without fast bf16 has three minutes for all.
SCENES: Mapping[str, Scene] = {
    "messages": Scene(120, "auc", "fraud"),
    "telemetry": Scene(100, "auc", "alarm"),
    "routes": Scene(80),
    "orders": Scene(40),
    "tools": Scene(24),
}


@dataclass(frozen=True, slots=True)
class Staged:
    """The demo's input: `truth` gives the label of each undamaged record, by coordinates."""

    broker: MemoryBroker
    records: int
    truth: Mapping[tuple[str, int, int], str]


@dataclass(frozen=True, slots=True)
class PolicyResult:
    events: int
    prefix_tokens: int
    suffix_tokens_mean: float
    metric: str
    value: float | None  # None: nothing to measure it on, or one class only


@dataclass(frozen=True, slots=True)
class Audit:
    """What a read_committed reader of all output topics finds."""

    decisions: int
    rejections: int
    lost: int
    doubled: int
    reasons: Mapping[str, int]
    policies: Mapping[str, PolicyResult]


def stage(policies: Sequence[Policy], seed: int, scale: float = 1.0) -> Staged:
    """Fill an in-process broker with labelled events, a twentieth of them damaged."""
    broker, rng = MemoryBroker(), Random(seed)
    queue: list[tuple[Policy, Labelled]] = []
    for topic in {t for p in policies for t in p.spec.topics.model_dump().values()}:
        broker.create_topic(topic, PARTITIONS)
    for policy in policies:
        queue += [(policy, item) for item in _events(policy, seed, scale)]
    if not queue:
        where = str(policies[0].path.parent.parent)
        raise ConfigError(where, "sample.jsonl", None, "no policy has sample events to show")
    rng.shuffle(queue)
    damages = _damages(len(queue), rng)
    truth = {}
    for place, (policy, item) in enumerate(queue):
        topic = policy.spec.topics.input
        value = orjson.dumps(item.event)
        damage = damages.get(place)
        sent = DAMAGES[damage](value) if damage else value
        record = broker.append(topic, None, item.key.encode(), sent)
        if damage is None:
            truth[topic, record.partition, record.offset] = item.label
    return Staged(broker, len(queue), truth)


def audit(staged: Staged, policies: Sequence[Policy]) -> Audit:
    """Compare the input with what was committed, record by record."""
    broker = staged.broker
    topics = [policy.spec.topics for policy in policies]
    decisions = [
        Decision.model_validate_json(record.value or b"")
        for topic in {t.output for t in topics}
        for record in broker.read(topic)
    ]
    rejections = [
        Rejection.model_validate_json(dict(record.headers)[REJECTION_HEADER] or b"")
        for topic in {t.dead_letter for t in topics}
        for record in broker.read(topic)
    ]
    events = [d.event for d in decisions] + [r.event for r in rejections]
    outcomes = Counter((event.topic, event.partition, event.offset) for event in events)
    sent = {(r.topic, r.partition, r.offset) for t in topics for r in broker.read(t.input)}
    own = {p.name: [d for d in decisions if d.policy.name == p.name] for p in policies}
    return Audit(
        decisions=len(decisions),
        rejections=len(rejections),
        lost=len(sent - outcomes.keys()),
        doubled=sum(outcomes.values()) - len(outcomes),
        reasons=Counter(rejection.reason for rejection in rejections),
        policies={p.name: _judge(p, own[p.name], staged.truth) for p in policies},
    )


def _events(policy: Policy, seed: int, scale: float) -> list[Labelled]:
    scene = SCENES.get(policy.name, Scene(20))
    wanted = max(1, round(scene.events * scale))
    if policy.name == "orders":  # synthetic, so there are as many as one likes
        return list(islice(orders(seed), wanted))
    samples = read_samples(policy)
    Random(seed).shuffle(samples)
    return samples[:wanted]


def _damages(events: int, rng: Random) -> dict[int, str]:
    """Which places are damaged, and how: each kind at least once, as long as most are not."""
    share = max(round(events * DAMAGED_SHARE), min(len(DAMAGES), events // 2))
    return dict(zip(rng.sample(range(events), share), cycle(DAMAGES), strict=False))


def _judge(
    policy: Policy, decisions: Sequence[Decision], truth: Mapping[tuple[str, int, int], str]
) -> PolicyResult:
    """Over the undamaged events; a damage that an event schema lets pass is not judged."""
    scene = SCENES.get(policy.name, Scene(20))
    known = [(d, truth.get((d.event.topic, d.event.partition, d.event.offset))) for d in decisions]
    judged = [(d, label) for d, label in known if label is not None]
    return PolicyResult(
        events=len(decisions),
        prefix_tokens=decisions[0].prefix_tokens if decisions else 0,
        suffix_tokens_mean=mean(d.suffix_tokens for d in decisions) if decisions else 0.0,
        metric=scene.metric,
        value=_value(scene, judged),
    )


def _value(scene: Scene, judged: Sequence[tuple[Decision, str]]) -> float | None:
    if scene.positive is None:
        hits = [float(d.label == label) for d, label in judged]
        return mean(hits) if hits else None
    positive = scene.positive
    is_positive = [label == positive for _, label in judged]
    if len(set(is_positive)) < 2:
        return None
    return float(roc_auc_score(is_positive, [d.scores[positive] for d, _ in judged]))


def summary(found: Audit, records: int, snapshot: Snapshot, seconds: float) -> dict[str, Any]:
    """The result for machines. `prompt_tokens_saved` is the share of all prompt tokens that no
    pass computed; the one capture of each prefix counts as computed."""
    captured = sum(result.prefix_tokens for result in found.policies.values())
    prompts = snapshot.tokens_saved + snapshot.tokens_computed
    return {
        "records": records,
        "decisions": found.decisions,
        "rejections": found.rejections,
        "lost": found.lost,
        "doubled": found.doubled,
        "seconds": seconds,
        "events_per_s": records / seconds,
        "prompt_tokens_saved": 1 - (snapshot.tokens_computed + captured) / max(1, prompts),
        "policies": {name: asdict(result) for name, result in found.policies.items()},
    }
