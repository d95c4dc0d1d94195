"""Labels as paths of tokens, taken in context and put into a trie.

A label may take several tokens ("get_current_weather"). All labels of a policy form a trie, and
the probability of a label is the product, over the trie's branchings on its path, of the
probability of its branch among the branches that labels take there: what constrained decoding
would sample from. Each branching below the root needs the model's state after the tokens that lead
to it, so these nodes ride along as extra rows of the event's forward pass; a node that does not
branch is certain and costs nothing. With single-token labels there is one branching, the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Branching:
    """`row`: index of the trie row whose state is read, -1 for the event's last token."""

    row: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelTrie:
    """`row_tokens[i]` at depth `row_depths[i]` (1: first label token) sees its `row_parents[i]`
    (-1: none) and that row's ancestors. `edges[label]`: (branching, branch) pairs on its path."""

    paths: tuple[tuple[int, ...], ...]
    row_tokens: tuple[int, ...]
    row_depths: tuple[int, ...]
    row_parents: tuple[int, ...]
    branchings: tuple[Branching, ...]
    edges: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def rows(self) -> int:
        return len(self.row_tokens)

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """Distinct first tokens of the labels."""
        return tuple(dict.fromkeys(path[0] for path in self.paths))

    def tree_mask(self, suffix: int) -> Tensor:
        """Who sees whom within an event of `suffix` tokens and the label rows: bool [N, N]."""
        size = suffix + self.rows
        seen = torch.zeros(size, size, dtype=torch.bool)
        seen[:suffix, :suffix] = torch.ones(suffix, suffix, dtype=torch.bool).tril()
        seen[suffix:, :suffix] = True
        for row, parent in enumerate(self.row_parents):
            if parent >= 0:
                seen[suffix + row, suffix:] = seen[suffix + parent, suffix:]
            seen[suffix + row, suffix + row] = True
        return seen


def build_trie(paths: Sequence[tuple[int, ...]]) -> LabelTrie:
    """Raises `ValueError` where a path is empty, or is the beginning of another or equal to it."""
    children: dict[tuple[int, ...], list[int]] = {}
    for path in paths:
        for depth, token in enumerate(path):
            branches = children.setdefault(path[:depth], [])
            if token not in branches:
                branches.append(token)
    if not all(paths) or len(set(paths)) < len(paths) or any(path in children for path in paths):
        raise ValueError("label paths must be non-empty, and none the beginning of another")
    branching = [node for node, tokens in children.items() if len(tokens) > 1]
    needed = {node[:n] for node in branching for n in range(1, len(node) + 1)}
    rows = sorted(needed, key=lambda node: (len(node), node))
    index = {node: row for row, node in enumerate(rows)}
    return LabelTrie(
        paths=tuple(paths),
        row_tokens=tuple(node[-1] for node in rows),
        row_depths=tuple(len(node) for node in rows),
        row_parents=tuple(index.get(node[:-1], -1) for node in rows),
        branchings=tuple(Branching(index.get(n, -1), tuple(children[n])) for n in branching),
        edges=tuple(_edges(path, branching, children) for path in paths),
    )


def _edges(
    path: tuple[int, ...],
    branching: Sequence[tuple[int, ...]],
    children: dict[tuple[int, ...], list[int]],
) -> tuple[tuple[int, int], ...]:
    return tuple(
        (position, children[node].index(path[len(node)]))
        for position, node in enumerate(branching)
        if path[: len(node)] == node
    )
