"""When passes are captured, what a graph reads, and what is freed; with a fake in the place of CUDA
graphs, which "replays" by running the captured function again. None of this ran on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from processor.core.batch import MicroBatch, Suffix
from processor.engine.attend_cuda import CudaBackend
from processor.engine.graphs import GraphedForward, Inputs, Shape, graph_shape, packed
from processor.engine.plan import Capture, EventRows, Plan, Segment
from processor.engine.scorer import PrefixScorer
from processor.engine.tokenizer import SuffixTokenizer
from tests.engine.conftest import MakePolicy
from tests.engine.test_architectures import TREE
from tests.engine.test_attention import LAYER, make_plan, span
from tests.engine.tiny import WINDOW, tiny_model
from tests.engine.varlen import Varlen


@dataclass
class FakeCapture:
    """The output of a replay lies where that of the capture lay, which itself computes nothing."""

    alone: list[bool] = field(default_factory=list)
    replays: int = 0

    def __call__(
        self, function: Callable[[], Tensor], alone: bool
    ) -> tuple[Callable[[], None], Tensor]:
        self.alone.append(alone)
        output = torch.full_like(function(), float("nan"))

        def replay() -> None:
            self.replays += 1
            output.copy_(function())

        return replay, output


def make_scorer(
    kind: str, make_policy: MakePolicy, graphed: GraphedForward | None, *policies: str
) -> tuple[PrefixScorer, SuffixTokenizer]:
    model = tiny_model(kind, backend=CudaBackend(Varlen(), graphed=graphed))
    made = [make_policy(name, prefix=f"Judge {name}.") for name in policies if name != "tools"]
    if "tools" in policies:
        made.append(make_policy("tools", TREE, prefix="Choose a tool.", lead="Query: "))
    tokenizer = SuffixTokenizer(model, made)
    return PrefixScorer(model, tokenizer.policies.values()), tokenizer


def key_of(scorer: PrefixScorer, name: str) -> str:
    [key] = [key for key in scorer._loaded if key.partition("@")[0] == name]
    return key


def batch(scorer: PrefixScorer, name: str, *lengths: int, seed: int = 0) -> MicroBatch:
    draw = random.Random(seed)
    policy = key_of(scorer, name)
    return MicroBatch(
        tuple(Suffix(policy, tuple(draw.choices(range(10, 200), k=n))) for n in lengths)
    )


def test_replayed_passes_have_the_bits_of_eager_ones(make_policy: MakePolicy) -> None:
    capture = FakeCapture()
    graphed, _ = make_scorer("llama", make_policy, GraphedForward(capture), "orders")
    eager, _ = make_scorer("llama", make_policy, None, "orders")
    for seed, lengths in enumerate([(9, 30), (1,), (20, 1, 33, 4), (64,), (1,) * 64, (5, 7)]):
        events = batch(graphed, "orders", *lengths, seed=seed)
        assert graphed.score(events) == eager.score(events)
    assert capture.alone == [True]  # one shape: captured at its second pass
    assert capture.replays == 5


def test_what_is_captured_and_what_is_not(make_policy: MakePolicy) -> None:
    capture = FakeCapture()
    forward = GraphedForward(capture)
    scorer, _ = make_scorer("llama", make_policy, forward, "orders", "mail", "tools")
    both = MicroBatch((*batch(scorer, "orders", 5).suffixes, *batch(scorer, "mail", 5).suffixes))
    for events in (both, batch(scorer, "tools", 9), both, batch(scorer, "tools", 9)):
        scorer.score(events)
    assert not capture.alone  # two prefixes in one pass; label branches
    for events in (
        batch(scorer, "orders", 5),
        batch(scorer, "mail", 5),
        batch(scorer, "orders", 70),
        batch(scorer, "orders", 65),
    ):
        scorer.score(events)
        scorer.score(events)
    assert capture.alone == [True, False, False]
    assert len(forward) == 3


def test_a_window_that_cuts_the_prefix_is_run_eagerly(make_policy: MakePolicy) -> None:
    capture = FakeCapture()
    forward = GraphedForward(capture, window=WINDOW)
    graphed, _ = make_scorer("mistral", make_policy, forward, "orders")
    eager, _ = make_scorer("mistral", make_policy, None, "orders")
    for seed in range(3):
        events = batch(graphed, "orders", 3, 20, seed=seed)
        assert graphed.score(events) == eager.score(events)
    assert not capture.alone


def test_a_wide_window_is_captured(make_policy: MakePolicy) -> None:
    capture = FakeCapture()
    model = tiny_model(
        "mistral",
        backend=CudaBackend(Varlen(), graphed=GraphedForward(capture, 400)),
        sliding_window=400,
    )
    tokenizer = SuffixTokenizer(model, [make_policy("orders", prefix="Judge.")])
    scorer = PrefixScorer(model, tokenizer.policies.values())
    for seed in range(3):
        events = batch(scorer, "orders", 3, 20, seed=seed)
        found = scorer.score(events)
        for suffix, scores in zip(events.suffixes, found, strict=True):
            reference = scorer.reference_score(suffix)
            assert scores.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
    assert capture.replays == 2


def test_graphs_go_with_their_prefix(make_policy: MakePolicy) -> None:
    """A captured graph keeps addresses, and no more of the function than that."""

    def capture(function: Callable[[], Tensor], alone: bool) -> tuple[Callable[[], None], Tensor]:
        return (lambda: None), function().clone()

    forward = GraphedForward(capture)
    scorer, _ = make_scorer("llama", make_policy, forward, "orders", "mail")
    for policy in ("orders", "mail") * 2:
        scorer.score(batch(scorer, policy, 5))
    assert len(forward) == 2
    scorer._loaded.pop(key_of(scorer, "orders"))
    assert len(forward) == 1
    scorer._loaded.pop(key_of(scorer, "mail"))
    assert len(forward) == 0


def test_the_least_recently_used_graph_goes(make_policy: MakePolicy) -> None:
    capture = FakeCapture()
    forward = GraphedForward(capture, limit=2)
    scorer, _ = make_scorer("llama", make_policy, forward, "orders")
    for length in (5, 5, 100, 100, 5, 200, 200, 5):
        scorer.score(batch(scorer, "orders", length))
    assert capture.replays == 5
    assert len(forward) == 2
    scorer.score(batch(scorer, "orders", 100))  # made room for that of 200
    assert (len(capture.alone), capture.replays) == (3, 5)


def test_a_failed_capture_is_one_warning(make_policy: MakePolicy) -> None:
    def broken(function: Callable[[], Tensor], alone: bool) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    forward = GraphedForward(broken)
    scorer, _ = make_scorer("llama", make_policy, forward, "orders")
    events = batch(scorer, "orders", 5)
    first = scorer.score(events)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing$") as caught:
        assert scorer.score(events) == first
    assert scorer.score(events) == first
    assert len(caught) == 1


def shape_of(sizes: Sequence[tuple[int, int]], **changes: Any) -> Shape | None:
    plan = make_plan(CudaBackend(Varlen()), [([span(1, 50, torch.float32)], sizes)], LAYER)
    for name, value in changes.items():
        setattr(plan, name, value)
    return graph_shape(plan, 100)


def test_the_shape_of_a_pass() -> None:
    shape = shape_of([(5, 0), (50, 0)])
    assert shape is not None
    assert (shape.rows, shape.slots, shape.longest) == (64, 64, 64)
    wide = shape_of([(1, 0)] * 65)
    assert wide is not None
    assert (wide.rows, wide.slots, wide.longest) == (128, 128, 64)
    assert shape_of([(51, 0)]) is None  # 50 + 51 tokens, window 100
    assert shape_of([(9, 3)]) is None
    assert shape_of([(5, 0)], segments=[]) is None
    assert shape_of([(5, 0)], capture=Capture()) is None


def test_bounds_are_filled_up_with_empty_sequences() -> None:
    shape = Shape((1,), rows=128, slots=64, longest=64)
    ids = list(range(200, 328))
    inputs = Inputs(shape, 50, torch.device("cpu"))
    events = [EventRows(0, 3), EventRows(3, 70)]
    plan = Plan([Segment((), events)], torch.arange(128), CudaBackend(Varlen()), LAYER)
    addresses = [t.data_ptr() for t in (inputs.ids, inputs.tails, inputs.positions)]
    inputs.fill(ids, plan)
    assert addresses == [t.data_ptr() for t in (inputs.ids, inputs.tails, inputs.positions)]
    assert inputs.ids.tolist() == ids
    assert inputs.positions.tolist() == list(range(128))
    tails = inputs.tails.tolist()
    assert tails[:2] == [2, 69]
    assert len(set(tails)) == 64
    assert set(tails) <= set(range(128))
    assert inputs.row_bounds.tolist() == [0, 3, *[70] * 63]
    assert inputs.tail_bounds.tolist() == [0, 1, *[2] * 63]
    assert inputs.row_range.tolist() == [0, 70]
    assert inputs.tail_range.tolist() == [0, 2]
    assert len(packed(shape, ids, [3, 70])) == len(inputs.buffer)


def test_as_many_events_as_rows() -> None:
    shape = Shape((1,), rows=64, slots=64, longest=64)
    values = packed(shape, [0] * 64, list(range(1, 65)))
    assert values[64:128] == list(range(64))
    assert values[128:193] == values[193:258] == list(range(65))
