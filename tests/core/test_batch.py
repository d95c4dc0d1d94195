"""Packing: every event once, in order, within the budget."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.core.batch import Budget, MicroBatch, Suffix, pack

CASES: list[tuple[list[int], Budget, list[list[int]]]] = [
    ([], Budget(10, 2), []),
    ([3], Budget(10, 2), [[0]]),
    ([3, 3, 3], Budget(10, 2), [[0, 1], [2]]),
    ([5, 5, 1], Budget(10, 9), [[0, 1], [2]]),
    ([5, 6, 4], Budget(10, 9), [[0], [1, 2]]),
    ([11, 1], Budget(10, 9), [[0], [1]]),
    ([1, 11, 1], Budget(10, 9), [[0], [1], [2]]),
    ([0, 0, 0], Budget(10, 1), [[0], [1], [2]]),
]


@pytest.mark.parametrize(("lengths", "budget", "expected"), CASES)
def test_packs(lengths: list[int], budget: Budget, expected: list[list[int]]) -> None:
    assert [list(part) for part in pack(lengths, budget)] == expected


@given(
    st.lists(st.integers(0, 40), max_size=60),
    st.builds(Budget, st.integers(1, 60), st.integers(1, 8)),
)
def test_order_cover_and_budget(lengths: list[int], budget: Budget) -> None:
    parts = pack(lengths, budget)
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    for part in parts:
        assert 1 <= len(part) <= budget.max_events
        assert len(part) == 1 or sum(lengths[i] for i in part) <= budget.max_rows
    for part, following in pairwise(parts):  # none could have taken one more
        rows = sum(lengths[i] for i in part) + lengths[following.start]
        assert len(part) == budget.max_events or rows > budget.max_rows


def test_a_micro_batch_counts_its_tokens() -> None:
    batch = MicroBatch((Suffix("a", (1, 2)), Suffix("b", (3,))))
    assert (len(batch), batch.tokens) == (2, 3)
