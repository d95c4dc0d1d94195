"""Any single fault in any run of a group is found, and a run without one is clean."""

from __future__ import annotations

from itertools import combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from processor.core.event import Record
from processor.core.verify import Given, Kind, Published, outcome_of
from tests.core.test_verify import Run, figures, outcome

KINDS: list[Kind] = ["decided", "decided", "rejected", "tombstone"]
Lane = tuple[str, int, int]


def lane_of(made: Published) -> Lane:
    return made.topic, made.partition, made.input_partition


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A drained group: gaps by markers, some partitions empty, decisions in several lanes."""
    given: list[Given] = []
    outcomes: list[Published] = []
    ends: dict[int, tuple[int, int]] = {}
    for partition in range(draw(st.integers(1, 3))):
        start = offset = draw(st.integers(0, 3))
        for step in draw(st.lists(st.integers(1, 3), max_size=8)):
            skipped = draw(st.integers(0, 5)) == 0
            given.append(Given(partition, offset, skipped))
            if not skipped:
                made = outcome(offset, draw(st.sampled_from(KINDS)), partition)
                outcomes.append(made._replace(partition=draw(st.integers(0, 1))))
            offset += step
        ends[partition] = (start, offset)
    lanes: dict[Lane, list[Published]] = {}
    for item in outcomes:
        lanes.setdefault(lane_of(item), []).append(item)
    # Each lane keeps its order; how lanes are mixed does not matter.
    order = draw(st.permutations([lane for lane, items in lanes.items() for _ in items]))
    queues = {lane: iter(items) for lane, items in lanes.items()}
    mixed = [next(queues[lane]) for lane in order]
    committed: dict[int, int | None] = {p: end for p, (_, end) in ends.items()}
    return Run(given, mixed, committed, ends)


@given(runs())
def test_a_clean_run_is_clean(run: Run) -> None:
    found = run.verify()
    assert found.clean
    assert found.committed
    assert found.findings == ()
    assert (found.input, found.waiting, found.unknown) == (len(run.given), 0, 0)
    assert found.decided == sum(o.kind == "decided" for o in run.outcomes)
    assert found.rejected == sum(o.kind == "rejected" for o in run.outcomes)


def some_outcome(run: Run, data: st.DataObject) -> int:
    assume(run.outcomes)
    return data.draw(st.integers(0, len(run.outcomes) - 1))


@given(runs(), st.data())
def test_any_single_loss_is_found(run: Run, data: st.DataObject) -> None:
    index = some_outcome(run, data)
    left = [o for n, o in enumerate(run.outcomes) if n != index]
    assert figures(run.plant(outcomes=left).verify()) == (1, 0, 0)


@given(runs(), st.data())
def test_any_single_duplicate_is_found(run: Run, data: st.DataObject) -> None:
    again = run.outcomes[some_outcome(run, data)]
    again = again._replace(
        topic=data.draw(st.sampled_from(["out", "dead"])), partition=data.draw(st.integers(0, 1))
    )
    outcomes = list(run.outcomes)
    outcomes.insert(data.draw(st.integers(0, len(outcomes))), again)
    found = run.plant(outcomes=outcomes).verify()
    assert found.lost == 0
    assert found.doubled == 1


@given(runs(), st.data())
def test_any_exchange_within_a_lane_is_found(run: Run, data: st.DataObject) -> None:
    pairs = [
        (n, m)
        for (n, first), (m, second) in combinations(enumerate(run.outcomes), 2)
        if lane_of(first) == lane_of(second)
    ]
    assume(pairs)
    one, two = data.draw(st.sampled_from(pairs))
    outcomes = list(run.outcomes)
    outcomes[one], outcomes[two] = outcomes[two], outcomes[one]
    found = run.plant(outcomes=outcomes).verify()
    assert (found.lost, found.doubled) == (0, 0)
    assert found.reordered >= 1


@given(runs(), st.data())
def test_any_torn_transaction_is_found(run: Run, data: st.DataObject) -> None:
    """The offsets of one partition were committed before some of its outcomes, or not at all."""
    at = run.outcomes[some_outcome(run, data)]
    partition, offset = at.input_partition, at.input_offset
    late = [
        o for o in run.outcomes if (o.input_partition == partition) & (o.input_offset >= offset)
    ]
    set_back = run.plant(committed={**run.committed, partition: offset}).verify()
    assert figures(set_back) == (0, len(late), 0)
    assert not set_back.committed
    rest = [o for o in run.outcomes if o not in late]
    assert figures(run.plant(outcomes=rest).verify()) == (len(late), 0, 0)


@given(runs(), st.data())
def test_any_foreign_record_is_found(run: Run, data: st.DataObject) -> None:
    stray = outcome_of(Record("out", 0, 99, None, data.draw(st.binary(max_size=20))))
    outcomes = list(run.outcomes)
    outcomes.insert(data.draw(st.integers(0, len(outcomes))), stray)
    assert figures(run.plant(outcomes=outcomes).verify()) == (0, 1, 0)


@given(runs(), st.data())
def test_no_moment_of_a_running_group_raises_an_alarm(run: Run, data: st.DataObject) -> None:
    """Any two moments of committed offsets, with the outcomes of any moment between them."""
    before: dict[int, int | None] = {}
    after: dict[int, int | None] = {}
    seen: dict[int, int] = {}
    for partition, (start, end) in run.ends.items():
        places = [data.draw(st.integers(start, end)) for _ in range(3)]
        before[partition], seen[partition], after[partition] = sorted(places)
    visible = [o for o in run.outcomes if o.input_offset < seen[o.input_partition]]
    assert run.plant(committed=before, after=after, outcomes=visible).verify().clean
