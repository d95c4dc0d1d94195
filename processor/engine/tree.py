"""PrefixTree: policies whose prefixes begin with the same tokens share the tensors of that part.

A common part is the longest common beginning in tokens, rounded down to whole blocks; there spans
are cut. `plan` tells of prefixes to come, so that at boot every cut is known before the first
capture. A prefix that comes later and parts from the others inside a live span copies the blocks
that it has in common: the others keep their span, both copies live until one side is dropped, and
whoever comes next shares the new one. Tensors in one piece are worth that rare copy: kernels take
a span that is not cut in place and in one call.

Tokens are compared with those of live prefixes, all of them; a digest would find candidates no
faster among some hundred policies, and two that collide would mix them up (vLLM CVE-2025-25183,
#54727).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from processor.engine.model import LoadedModel
from processor.engine.plan import KEY_BLOCK
from processor.engine.prefix import (
    FrozenPrefix,
    PrefixSpan,
    capture_steps,
    copy_part,
    join_spans,
)
from processor.engine.snapshot import Snapshots


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose prefix it is, and whether other owners that say so too may share its beginning.

    How fast a prefix is ready tells whether somebody else has the same one: with a guess per try,
    word for word (vLLM CVE-2025-46570). So nothing is shared across tenants by default.
    """

    tenant: str | None = None
    share: bool = False

    def shares_with(self, other: Owner) -> bool:
        return self.tenant == other.tenant or (self.share and other.share)

    @property
    def scope(self) -> str:
        """Who may find what is stored for it."""
        return "shared" if self.share else f"tenant:{self.tenant or ''}"


class PrefixTree:
    """Not thread-safe: the thread that owns the model owns the tree.

    Only prefixes keep spans alive: with the last one that has it, a span is freed at once.
    """

    def __init__(self, model: LoadedModel, snapshots: Snapshots | None = None) -> None:
        self._model = model
        self._snapshots = snapshots
        self._planned: list[tuple[tuple[int, ...], Owner]] = []
        self._live: WeakKeyDictionary[FrozenPrefix, Owner] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of all live spans, each counted once."""
        return sum({id(s): s.nbytes for prefix in self._live for s in prefix.spans}.values())

    def plan(self, prefixes: Iterable[tuple[Sequence[int], Owner]]) -> None:
        """The prefixes that will be asked for, in place of those of an earlier call."""
        self._planned = [(tuple(token_ids), owner) for token_ids, owner in prefixes]

    def steps(self, token_ids: Sequence[int], owner: Owner) -> Generator[None, None, FrozenPrefix]:
        """Build a prefix out of live spans, snapshots and captures; the caller may score events
        wherever this yields: after each captured block, and after each span.

        A prefix is found by others when it is complete: build one after the other.
        """
        ids = tuple(token_ids)
        ends = self._ends(ids, owner)
        spans: list[PrefixSpan] = []
        start = 0
        while start < len(ids):
            span = self._find(ids, start, owner)
            if span is None:
                end = next(end for end in ends if end > start)
                span = yield from self._make(spans, ids[:end], owner)
            spans.append(span)
            start = span.end
        prefix = FrozenPrefix(tuple(spans))
        self._live[prefix] = owner
        return prefix

    def capture(self, token_ids: Sequence[int], owner: Owner) -> FrozenPrefix:
        """All steps at once."""
        steps = self.steps(token_ids, owner)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                prefix: FrozenPrefix = done.value
                return prefix

    def _ends(self, ids: tuple[int, ...], owner: Owner) -> list[int]:
        """Where the prefix parts from others, planned and live, and its own end."""
        known = [path for path, other in self._planned if owner.shares_with(other)]
        known += [prefix.token_ids for prefix in self._readable(owner)]
        return sorted({_common(ids, path) for path in known} | {len(ids)})

    def _readable(self, owner: Owner) -> Iterator[FrozenPrefix]:
        return (prefix for prefix, other in self._live.items() if owner.shares_with(other))

    def _find(self, ids: tuple[int, ...], start: int, owner: Owner) -> PrefixSpan | None:
        """The longest live span that continues the prefix at `start`."""
        found = None
        for span in (span for prefix in self._readable(owner) for span in prefix.spans):
            fits = span.start == start and (span.end % KEY_BLOCK == 0 or span.end == len(ids))
            longest = found is None or span.end > found.end
            if fits and longest and span.path == ids[: span.end]:
                found = span
        return found

    def _make(
        self, base: Sequence[PrefixSpan], path: tuple[int, ...], owner: Owner
    ) -> Generator[None, None, PrefixSpan]:
        """The span of `path` that follows `base`."""
        start = base[-1].end if base else 0
        if self._snapshots and (loaded := self._snapshots.load(path, start, owner.scope)):
            yield
            return loaded
        span = self._copied(path, start, owner)
        if span is None:
            blocks = []
            for block in capture_steps(self._model, base, path[start:]):
                blocks.append(block)
                yield
            span = join_spans(blocks)
        if self._snapshots:
            self._snapshots.save(span, owner.scope)
        yield
        return span

    def _copied(self, path: tuple[int, ...], start: int, owner: Owner) -> PrefixSpan | None:
        """The span as a part of a live one. Checked, for the copy's checksum would hide it if a
        bit had changed; and in whole blocks, for the rows of a shorter pass are another capture."""
        for span in (span for prefix in self._readable(owner) for span in prefix.spans):
            holds = span.start <= start and span.path[: len(path)] == path
            whole = len(path) % KEY_BLOCK == 0 or span.end == len(path)
            if holds and whole and span.check_integrity():
                return copy_part(span, start, len(path))
        return None


def _common(ids: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning: in whole blocks, or all of two equal prefixes."""
    if ids == other:
        return len(ids)
    whole = min(len(ids), len(other)) // KEY_BLOCK * KEY_BLOCK
    for at in range(0, whole, KEY_BLOCK):
        if ids[at : at + KEY_BLOCK] != other[at : at + KEY_BLOCK]:
            return at
    return whole
