"""A model of all that can happen to a group of workers, over the in-process broker.

One thread: a worker takes a step, its model takes a batch or returns it, a call fails, a process
dies, only when a rule says so; and a rule can be ordered to happen right before a call of a
worker. What is random is drawn by hypothesis, so a failure can be repeated and made smaller.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from processor.broker.memory import Call, MemoryBroker
from tests.runtime.model_parts import (
    FAULTS,
    VALUES,
    Foreign,
    Observer,
    Runner,
    Tick,
    by_hand,
)
from tests.runtime.world import GROUP, coordinates, event, judge

NAMES = "abc"
MOST_PROCESSES = 4  # one more than names: a process and its successor may both be there
PATIENCE = 120  # rounds until all is published once nothing goes wrong any more
Mutation = Callable[[], Sequence[AbstractContextManager[object]]]

small = st.sampled_from(range(4))
values = st.lists(st.sampled_from(VALUES), min_size=1, max_size=4)


class Model(RuleBasedStateMachine):
    mutation: Mutation = staticmethod(list)
    always_lax = False
    runs = 0  # examples that were begun

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1
        self._patches = by_hand()
        for mistake in self.mutation():
            self._patches.enter_context(mistake)

    @initialize(
        partitions=st.sampled_from([2, 3]),
        outputs=st.sampled_from([1, 2]),
        static=st.lists(st.booleans(), min_size=3, max_size=3),
        lax=st.booleans(),
    )
    def begin(self, partitions: int, outputs: int, static: list[bool], lax: bool) -> None:
        self.clock = Tick()
        self.broker = MemoryBroker(self.clock, lax=lax or self.always_lax)
        for topic, count in (("in", partitions), ("out", outputs), ("dead", 1)):
            self.broker.create_topic(topic, count)
        self.partitions = partitions
        self.static = dict(zip(NAMES, static, strict=True))
        self.runners: list[Runner] = []
        self.foreign: list[Foreign] = []
        self.observer = Observer(self.broker)
        self.foreigners = 0
        for partition in range(partitions):
            self.append(partition, VALUES)
        self._start("a")

    # The input

    @rule(partition=small, values=values)
    def append(self, partition: int, values: list[bytes | None]) -> None:
        for value in values:
            self.broker.append("in", partition % self.partitions, b"k", value)

    @rule(partition=small, values=values, end=st.sampled_from(["committed", "aborted", "later"]))
    def append_in_transaction(self, partition: int, values: list[bytes | None], end: str) -> None:
        self.foreigners += 1
        name = f"upstream-{self.foreigners}"
        foreign = Foreign(name, self.broker.init_transactions(name))
        with self.broker.changed:
            log = self.broker.log("in", partition % self.partitions)
            for value in values:
                log.append(b"k", value, (), 0, self.broker.transaction(foreign.id, foreign.epoch))
            self.broker.notify()
        if end == "later":
            self.foreign.append(foreign)
        else:
            self._end(foreign, end == "committed")

    @precondition(lambda self: self.foreign)
    @rule(which=small, committed=st.booleans())
    def end_transaction(self, which: int, committed: bool) -> None:
        self._end(self.foreign.pop(which % len(self.foreign)), committed)

    def _end(self, foreign: Foreign, committed: bool) -> None:
        end = partial(self.broker.end_transaction, foreign.id, foreign.epoch)
        end("committed" if committed else "aborted")

    @rule(partition=small)
    def retention(self, partition: int) -> None:
        """What has been dealt with may be deleted at any time."""
        where = ("in", partition % self.partitions)
        self.broker.delete_records(*where, self.broker.committed(GROUP, *where) or 0)

    # Workers at work

    @rule(which=small, rounds=st.sampled_from(range(1, 5)))
    def work(self, which: int, rounds: int) -> None:
        for _ in range(rounds):
            self._pick(which).round()

    @rule()
    def all_work(self) -> None:
        for _ in range(2):
            for runner in self._living():
                runner.round()

    @rule(which=small, most=st.sampled_from([1, 3, 500]))
    def step(self, which: int, most: int) -> None:
        self._pick(which).step(most)

    @rule(which=small)
    def model_moves(self, which: int) -> None:
        self._pick(which).model.move()

    @rule(seconds=st.sampled_from([0.1, 1.1, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # Workers that come and go

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        """Its predecessor may still be there, and think that it is the one."""
        if len(self._living()) < MOST_PROCESSES:
            self._start(name)

    @rule(which=small)
    def kill(self, which: int) -> None:
        self._pick(which).kill()

    @rule(which=small, in_time=st.booleans())
    def stop(self, which: int, in_time: bool) -> None:
        self._pick(which).stop(in_time)

    # What the broker does to them

    @rule(which=small)
    def expel(self, which: int) -> None:
        members = list(self.broker.group(GROUP).members)
        if members:
            self.broker.expel_id(GROUP, members[which % len(members)])

    @rule(name=st.sampled_from(NAMES))
    def time_out(self, name: str) -> None:
        self.broker.time_out(f"id-{name}")

    @rule(which=small, at_work=st.booleans())
    def standstill(self, which: int, at_work: bool) -> None:
        """A process stands still for so long that the others get its partitions; then it goes on
        as if nothing had happened."""
        sleeper = self._pick(which)
        self._feed()
        if at_work:
            sleeper.round()
        self._taken_over(sleeper)
        sleeper.round()

    def _taken_over(self, sleeper: Runner) -> None:
        member = sleeper.worker._source.group_metadata().member
        if member in self.broker.group(GROUP).members:
            self.broker.expel_id(GROUP, member)
        others = [runner for runner in self._living() if runner is not sleeper]
        for runner in others or [self._start(NAMES[NAMES.index(sleeper.name) - 1])]:
            for _ in range(3):
                runner.round()

    @rule(
        which=small,
        kind=st.sampled_from(["rebuild", "retry", *FAULTS]),
        call=st.sampled_from(range(24)),
        applied=st.booleans(),
        slow=st.booleans(),
    )
    def trouble(self, which: int, kind: str, call: int, applied: bool, slow: bool) -> None:
        """The next such call of a worker fails; `slow`: and takes longer than any budget."""
        calls, error = FAULTS[kind]
        self._fail(calls[call % len(calls)], error(), applied and kind != "abort", slow)
        self.work(which, 2)

    @rule(which=small, lost=st.booleans(), applied=st.booleans())
    def no_answer(self, which: int, lost: bool, applied: bool) -> None:
        """The commit of which nobody can tell whether it happened."""
        self._fail("commit", FAULTS["rebuild" if lost else "retry"][1](), applied, slow=True)
        self.work(which, 3)

    def _fail(self, call: Call, error: BaseException, applied: bool, slow: bool) -> None:
        hook = (lambda: self.clock.advance(30.0)) if slow else None
        self._feed()
        self.broker.faults.push(call, error, applied=applied, hook=hook)

    @rule(
        which=small,
        call=st.sampled_from(["commit", "commit", "send_offsets", "produce", "poll", "abort"]),
        what=st.sampled_from(
            ["taken_over", "taken_over", "expel", "time_out", "start", "all_work"]
        ),
        other=small,
    )
    def meanwhile(self, which: int, call: Call, what: str, other: int) -> None:
        """Something else happens right before a call of a worker."""
        name = NAMES[other % len(NAMES)]
        actions: dict[str, Callable[[], None]] = {
            "expel": lambda: self.expel(other),
            "time_out": lambda: self.time_out(name),
            "start": lambda: self.start(name),
            "all_work": self.all_work,
            "taken_over": self._callers_are_taken_over,
        }
        self._feed()
        self.broker.faults.hook(call, actions[what])
        self.work(which, 2)

    def _feed(self) -> None:
        """Trouble where nothing is going on teaches nothing."""
        for partition in range(self.partitions):
            self.append(partition, [event(4)])

    def _callers_are_taken_over(self) -> None:
        for runner in self._living():
            if runner.inside:
                self._taken_over(runner)

    # The laws

    @invariant()
    def laws_hold(self) -> None:
        self.observer.check()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None and hasattr(self, "observer"):
                self._come_to_an_end()
        finally:
            self._patches.close()

    def _come_to_an_end(self) -> None:
        """Nothing goes wrong any more: everything is published, exactly once."""
        self.broker.faults.clear()
        while self.foreign:
            self._end(self.foreign.pop(), committed=True)
        self._end_zombies()
        for name in NAMES:  # an idle worker does not hear of what a twin has left open
            self.broker.time_out(f"id-{name}")
        for _ in range(PATIENCE):
            if self.observer.drained():
                break
            self.clock.advance(1.1)
            for runner in self._living() or [self._start("a")]:
                runner.round()
            self._end_zombies()
            self.observer.check()
        assert self.observer.drained(), "model: no end"
        self.observer.check()
        judge([*self.observer.records("in")], self.broker.read("out"), self.broker.read("dead"))
        for runner in self.runners:
            told = Counter(coordinates(record) for record in runner.accounted)
            assert set(told.values()) <= {1}, f"model: told twice, {told.most_common(1)}"

    def _end_zombies(self) -> None:
        """Of each name only the last process stays; the broker notices who is gone."""
        last = {runner.name: runner for runner in self._living()}
        for runner in self._living():
            if runner is not last[runner.name]:
                runner.kill()
        for name in set(NAMES) - last.keys():
            self.broker.time_out(f"id-{name}")
        members = {runner.worker._source.group_metadata().member for runner in last.values()}
        for member in set(self.broker.group(GROUP).members) - members:
            self.broker.expel_id(GROUP, member)

    # Help

    def _living(self) -> list[Runner]:
        return [runner for runner in self.runners if runner.alive]

    def _pick(self, which: int) -> Runner:
        living = self._living() or [self._start("a")]
        return living[which % len(living)]

    def _start(self, name: str) -> Runner:
        runner = Runner(self.broker, name, self.static[name], self.clock)
        self.runners.append(runner)
        return runner
