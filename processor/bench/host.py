"""What an event costs outside the forward pass: all that the pipeline does, but for the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from processor.bench.rounds import quantile
from processor.core.batch import MicroBatch
from processor.core.decision import Provenance, Scores, Timings
from processor.core.event import Record
from processor.core.pipeline import Pipeline, Prepared, Tokenizer
from processor.core.policy import Policy

_TIMINGS = Timings(wait_ms=0.0, score_ms=0.0, batch_events=1)


class _NoModel:
    """Answers at once: what is left is the host's part."""

    def __init__(self, labels: int) -> None:
        self._scores = Scores(tuple(-float(n + 1) for n in range(labels)))

    def score(self, batch: MicroBatch) -> list[Scores]:
        return [self._scores] * len(batch)

    def provenance(self, policy: str) -> Provenance:
        return Provenance("none", "0" * 64, "0" * 64, prefix_tokens=0)


def host_ms(
    policy: Policy,
    tokenizer: Tokenizer,
    values: Sequence[bytes],
    rounds: int,
    now: Callable[[], float],
) -> float:
    """Milliseconds per event to decode, validate, render, tokenize, pack, decide and encode
    (median over rounds). `values`: valid events of the policy, at least one."""
    pipeline = Pipeline([policy], tokenizer, _NoModel(len(policy.label_names)))
    topic = policy.spec.topics.input
    records = [Record(topic, 0, n, b"key", value) for n, value in enumerate(values)]
    _pass(pipeline, records)  # validators and renderers are compiled at first use
    seconds = []
    for _ in range(rounds):
        begun = now()
        _pass(pipeline, records)
        seconds.append(now() - begun)
    return 1e3 * quantile(seconds, 0.5) / len(records)


def _pass(pipeline: Pipeline, records: Sequence[Record]) -> None:
    prepared = pipeline.prepare_all(records)
    ready = [item for item in prepared if isinstance(item, Prepared)]
    for batch in pipeline.pack(ready):
        for item, scores in zip(batch, pipeline.score(batch), strict=True):
            pipeline.encode(pipeline.finish(item, scores, _TIMINGS), item.record, _any_size)


def _any_size(_topic: str) -> int:
    return sys.maxsize
