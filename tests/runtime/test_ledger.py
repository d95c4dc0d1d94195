"""The laws of the ledger, by example and against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.core.decision import PolicyReference, Rejection, coordinates
from processor.core.event import Record
from processor.errors import ExitProcess
from processor.runtime.ledger import Entry, Ledger

A, B = ("in", 0), ("in", 1)


def record(offset: int, partition: int = 0) -> Record:
    return Record("in", partition, offset, None, None)


def outcome(record: Record) -> Rejection:
    policy = PolicyReference(name="orders", version="1", fingerprint="")
    return Rejection(reason="tombstone", detail="", event=coordinates(record), policy=policy)


def add(ledger: Ledger, *offsets: int, partition: int = 0) -> list[Entry]:
    entries = [ledger.add(record(offset, partition), 0.0) for offset in offsets]
    return [entry for entry in entries if entry is not None]


def finish(ledger: Ledger, *entries: Entry) -> list[bool]:
    return [ledger.finish(entry, outcome(entry.record)) for entry in entries]


def offsets(ledger: Ledger) -> list[int]:
    return [entry.record.offset for entry in ledger.finished().entries]


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.assign([A, B])
    return ledger


def test_nothing_leaves_before_its_predecessors(ledger: Ledger) -> None:
    first, second, third = add(ledger, 5, 6, 9)
    (other,) = add(ledger, 3, partition=1)
    finish(ledger, third, second)
    assert ledger.finished().entries == []
    finish(ledger, other)
    assert ledger.finished().offsets == {B: 4}
    finish(ledger, first)
    assert offsets(ledger) == [5, 6, 9, 3]
    assert ledger.finished().offsets == {A: 10, B: 4}
    assert len(ledger) == 4
    ledger.published(ledger.finished())
    assert (len(ledger), ledger.finished().entries) == (0, [])


def test_strangers_and_repetitions_are_not_taken(ledger: Ledger) -> None:
    assert add(ledger, 1, partition=7) == []
    assert len(add(ledger, 5, 5, 4, 6)) == 2
    finish(ledger, *add(ledger, 7))
    ledger.revoke([A])
    assert add(ledger, 8) == []


def test_a_late_result_is_dropped(ledger: Ledger) -> None:
    (revoked,) = add(ledger, 5)
    (rewound,) = add(ledger, 5, partition=1)
    ledger.revoke([A])
    ledger.assign([A])
    assert ledger.rewind() == {B: 5}
    assert finish(ledger, revoked, rewound) == [False, False]
    assert ledger.finished().entries == []
    again = add(ledger, 5)
    assert finish(ledger, *again) == [True]


def test_a_rewind_goes_to_the_first_unpublished(ledger: Ledger) -> None:
    first, *_ = add(ledger, 5, 6, 7)
    add(ledger, 0, partition=1)
    finish(ledger, first)
    ledger.published(ledger.finished())
    assert ledger.rewind() == {A: 6, B: 0}
    assert ledger.rewind() == {}  # nothing polled since
    assert [e.record.offset for e in add(ledger, 6, 7)] == [6, 7]
    with pytest.raises(ExitProcess, match="rewound to record 0, got 1"):
        add(ledger, 1, partition=1)


@pytest.mark.parametrize(
    ("committed", "targets"),
    [
        ({A: None}, {A: 5}),  # KAFKA-9079: not where the reset policy says
        ({A: 6}, {A: 6}),
        ({A: 8}, {A: 8}),
        ({}, {A: 5}),
    ],
)
def test_a26_a_rewind_to_the_committed(
    ledger: Ledger, committed: dict[Any, int | None], targets: dict[Any, int]
) -> None:
    add(ledger, 5, 6, 7)
    assert ledger.rewind(committed) == targets
    assert ledger.rewind(committed) == targets  # the next producer was lost as well
    assert add(ledger, 4) == []


def test_after_a_commit_position_any_record_may_come(ledger: Ledger) -> None:
    add(ledger, 5)
    ledger.rewind({A: 6})  # 6 may be a control marker
    assert len(add(ledger, 9)) == 1


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 1)),
        st.tuples(st.just("finish"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["publish", "rewind"]), st.just(0)),
    ),
    max_size=80,
)


@given(STEPS)
def test_whatever_happens_each_offset_is_published_once_in_order(
    steps: list[tuple[str, int]],
) -> None:
    ledger, log = Ledger(), {0: list[int](), 1: list[int]()}
    ledger.assign([A, B])
    position = {0: 0, 1: 0}
    entries: list[Entry] = []
    for step, argument in steps:
        if step == "add":
            entries += add(ledger, position[argument], partition=argument)
            position[argument] += 1
        elif step == "finish" and argument < len(entries):
            finish(ledger, entries[argument])
        elif step == "publish":
            finished = ledger.finished()
            for entry in finished.entries:
                log[entry.record.partition].append(entry.record.offset)
            ledger.published(finished)
        elif step == "rewind":
            for (_, partition), offset in ledger.rewind().items():
                position[partition] = offset
    assert all(offsets == list(range(len(offsets))) for offsets in log.values())
    assert len(ledger) == sum(position[p] - len(log[p]) for p in (0, 1))
