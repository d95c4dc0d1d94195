"""The thread that owns the model, and the hand-over slot in front of it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from processor.broker.transaction import Clock
from processor.core.decision import Scores
from processor.core.pipeline import Pipeline, Prepared
from processor.errors import ExitProcess, RejectRecord
from processor.runtime.ledger import Entry

logger = logging.getLogger(__name__)

RETRIES = 2  # of an event that fails alone
DEPTH = 2  # micro-batches that wait in the slot: one to take at once, one being filled up


@dataclass(frozen=True, slots=True)
class Scored:
    """A micro-batch that came back, with the times at which it was begun and ended."""

    entries: Sequence[Entry]
    scores: Sequence[Scores | RejectRecord]
    begun: float
    ended: float


def prepared(entry: Entry) -> Prepared:
    if entry.prepared is None:
        raise AssertionError("only prepared entries go to the model")
    return entry.prepared


class Task:
    """Other work for the thread that owns the model, in steps: each `next` is one."""

    def __init__(self, steps: Generator[None, None, None]) -> None:
        self._steps = steps
        self._cancelled = False
        self.ended = False
        self.failure: str | None = None  # a text: an exception would keep the tensors of its frames

    def cancel(self) -> None:
        """Do no further step. It may have ended already."""
        self._cancelled = True

    def step(self) -> None:
        try:
            if self._cancelled:
                self._steps.close()
                self.ended = True
            else:
                next(self._steps)
        except StopIteration:
            self.ended = True
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            self.ended = True


class ModelThread:
    """Scores micro-batches in the order in which they were handed over.

    Work-conserving: when the model is idle it takes the first batch of the slot, however small.
    A batch that still waits is open to late comers: `refill` takes the slot's content back and
    packs it anew, so that batches are as full as the load allows and nobody waits for them.

    Tasks are done in their order, one step after each micro-batch; while no batch waits, step
    after step. So a batch waits for one step at most.
    """

    def __init__(self, pipeline: Pipeline, clock: Clock) -> None:
        self._pipeline = pipeline
        self._clock = clock
        self._changed = threading.Condition()
        self._slot: deque[list[Entry]] = deque()
        self._scored: deque[Scored] = deque()
        self._tasks: deque[Task] = deque()
        self._running: list[Entry] = []
        self._since: float | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="processor-model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Let it end after the batch it works on. A model that hangs is left behind: the thread
        is a daemon, and nothing of it can be published any more."""
        with self._changed:
            self._stopping = True
            self._slot.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def begin(self, task: Task) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def refill(self, ready: Sequence[Entry], keep: Callable[[Entry], bool]) -> list[Entry]:
        """Pack what waits in the slot together with `ready`; the entries that found no place.

        Entries that `keep` refuses leave the slot for good.
        """
        with self._changed:
            waiting = [e for batch in self._slot for e in batch if keep(e)]
            waiting += [e for e in ready if keep(e)]
            batches = self._pack(waiting)
            self._slot = deque(batches[:DEPTH])
            self._changed.notify_all()
            return [e for batch in batches[DEPTH:] for e in batch]

    def collect(self) -> list[Scored]:
        """The batches scored since the last call. Raises `ExitProcess` if the model failed."""
        with self._changed:
            if self._failure is not None:
                raise ExitProcess(f"the model failed: {self._failure!r}") from self._failure
            scored = list(self._scored)
            self._scored.clear()
            return scored

    @property
    def busy(self) -> bool:
        """Something is in the slot, in the model, or waits to be collected."""
        with self._changed:
            return bool(self._slot or self._running or self._scored or self._failure)

    def hangs(self, limit_s: float) -> str | None:
        """What the model has been working on for longer than that; in any thread."""
        since, batch = self._since, self._running
        if since is None or (seconds := self._clock() - since) <= limit_s:
            return None
        records = [entry.record for entry in batch]
        names = [f"{r.topic}[{r.partition}]@{r.offset}" for r in records] or ["another task"]
        return f"the model has not returned for {seconds:.0f} s from {', '.join(names)}"

    def entries(self) -> list[Entry]:
        """Of all batches that are in the slot, in the model, or wait to be collected."""
        with self._changed:
            scored = [entry for batch in self._scored for entry in batch.entries]
            return [*scored, *self._running, *(e for batch in self._slot for e in batch)]

    def wait(self, timeout_s: float) -> None:
        """Until a batch is scored or the model has failed, at most for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._scored or self._failure, timeout_s)

    def _pack(self, entries: list[Entry]) -> list[list[Entry]]:
        remaining = iter(entries)
        batches = self._pipeline.pack([prepared(entry) for entry in entries])
        return [[next(remaining) for _ in batch] for batch in batches]

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if batch := self._take():
                    self._score(batch)
                self._step_task()
        except BaseException as error:  # the other thread raises it: `collect`
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._slot or self._tasks or self._stopping)
            return not self._stopping

    def _take(self) -> list[Entry]:
        """The first batch of the slot; empty where there is none."""
        with self._changed:
            self._running = self._slot.popleft() if self._slot else []
            return self._running

    def _score(self, batch: list[Entry]) -> None:
        begun = self._clock()
        scores = self._scores([prepared(entry) for entry in batch])
        self._since = None
        self._put(Scored(batch, scores, begun, self._clock()))

    def _scores(self, batch: Sequence[Prepared]) -> list[Scores | RejectRecord]:
        """A batch that fails is halved until the event is found that does it, so that an event
        costs its own rejection only; halves that fit a memory that the whole did not are scored.
        """
        try:
            return [*self._attempt(batch)]
        except Exception as error:
            logger.warning("a batch of %d: %r", len(batch), error, extra={"action": "score"})
            if len(batch) == 1:
                return [self._judge(batch[0], error)]
            half = len(batch) // 2
            return [*self._scores(batch[:half]), *self._scores(batch[half:])]

    def _judge(self, item: Prepared, error: Exception) -> Scores | RejectRecord:
        """Of an event that failed alone: whether it or the model is to blame. Raises the error
        where the model does not even score the first token that all events share."""
        for _ in range(RETRIES):
            try:
                return self._attempt([item])[0]
            except Exception as again:
                error = again
        self._attempt([self._pipeline.control(item)])
        reason = str(error).partition("\n")[0][:200]
        return RejectRecord("scorer_failed", f"{type(error).__name__}: {reason}")

    def _attempt(self, batch: Sequence[Prepared]) -> list[Scores]:
        self._since = self._clock()
        scores = self._pipeline.score(batch)
        if len(scores) != len(batch):
            raise ValueError(f"{len(scores)} scores for {len(batch)} events")
        return scores

    def _step_task(self) -> None:
        with self._changed:
            task = self._tasks[0] if self._tasks else None
        if task is not None:
            self._since = self._clock()
            task.step()
            self._since = None
            if task.ended:
                with self._changed:
                    self._tasks.popleft()

    def _put(self, scored: Scored) -> None:
        with self._changed:
            self._running = []
            self._scored.append(scored)
            self._changed.notify_all()
