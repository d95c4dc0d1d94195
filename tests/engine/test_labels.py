"""The label trie: which rows it needs, who sees whom, and what its products are."""

from __future__ import annotations

import pytest

from processor.engine.labels import build_trie


def test_single_tokens_need_no_rows() -> None:
    trie = build_trie([(5,), (7,), (6,)])
    assert trie.rows == 0
    assert trie.branchings[0].row == -1
    assert trie.branchings[0].tokens == (5, 7, 6)
    assert trie.edges == (((0, 0),), ((0, 1),), ((0, 2),))


def test_only_what_leads_to_a_branching_is_computed() -> None:
    #        1 - 2 - 3        (branch 3 and 4 below 1, 2)
    # root <       \ 4 - 9    (9 is certain)
    #        5 - 6 - 7        (all certain)
    trie = build_trie([(1, 2, 3), (1, 2, 4, 9), (5, 6, 7)])
    assert trie.row_tokens == (1, 2)
    assert trie.row_depths == (1, 2)
    assert trie.row_parents == (-1, 0)
    assert [(b.row, b.tokens) for b in trie.branchings] == [(-1, (1, 5)), (1, (3, 4))]
    assert trie.edges == (((0, 0), (1, 0)), ((0, 0), (1, 1)), ((0, 1),))
    assert trie.first_tokens == (1, 5)


def test_rows_see_the_suffix_their_ancestors_and_themselves() -> None:
    trie = build_trie([(1, 2, 3), (1, 2, 4), (5, 6), (5, 7)])
    assert trie.row_tokens == (1, 5, 2)
    seen = trie.tree_mask(2).int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1],
    ]


@pytest.mark.parametrize("paths", [[(1,), ()], [(1,), (1,)], [(1,), (1, 2)]])
def test_ambiguous_labels_are_refused(paths: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="label paths"):
        build_trie(paths)
