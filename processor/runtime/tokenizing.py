"""The thread that tokenizes, between reading a record and the model's slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from processor.core.pipeline import Pipeline, Rendered, TokenIds
from processor.errors import RejectRecord
from processor.runtime.ledger import Entry

Tokens = TokenIds | RejectRecord


@dataclass(frozen=True, slots=True)
class Portion:
    """Entries that are tokenized together."""

    entries: Sequence[Entry]
    rendered: Sequence[Rendered]
    future: Future[list[Tokens]]


class Tokenizing:
    """Portions come back in the order in which they were handed over.

    A tokenizer of a model library works outside of Python's lock and on all cores, and takes
    several times as long as all else that is done for a record. In a thread of its own it does so
    while the broker thread decodes, decides, encodes and waits for commits.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._portions: deque[Portion] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="processor-tokenizer")

    @property
    def busy(self) -> bool:
        """Something is being tokenized, or waits for it, or to be collected."""
        return bool(self._portions)

    def begin(self, entries: Sequence[Entry], rendered: Sequence[Rendered]) -> None:
        future = self._thread.submit(self._pipeline.encode_all, rendered)
        self._portions.append(Portion(entries, rendered, future))

    def collect(self, wait: bool = False) -> list[tuple[Entry, Rendered, Tokens]]:
        """What is tokenized by now; with `wait` at least one portion, if there is any.
        Raises what the tokenizer raised."""
        found: list[tuple[Entry, Rendered, Tokens]] = []
        while self._portions and (wait or self._portions[0].future.done()):
            portion, wait = self._portions.popleft(), False
            tokens = portion.future.result()
            found += zip(portion.entries, portion.rendered, tokens, strict=True)
        return found

    def policies(self) -> set[str]:
        """Keys of the policies that it still needs."""
        return {item.policy.key for portion in self._portions for item in portion.rendered}

    def close(self) -> None:
        """Leave what has not been begun."""
        self._portions.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
