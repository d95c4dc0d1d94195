"""The verifier itself, on planted faults: what it must find, and what it must not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from processor.core.event import Record
from processor.core.outcome_log import InputLog, OutcomeLog
from processor.core.verify import (
    MOST_FINDINGS,
    Gaps,
    Given,
    Kind,
    Published,
    Verdict,
    outcome_of,
    verify,
)


@dataclass(frozen=True)
class Run:
    """What Kafka holds after a run; `plant` changes it."""

    given: list[Given]
    outcomes: list[Published]
    committed: dict[int, int | None]
    ends: dict[int, tuple[int, int]]
    after: dict[int, int | None] | None = None
    gaps: Gaps = field(default_factory=Gaps)

    def plant(self, **changes: Any) -> Run:
        return replace(self, **changes)

    def verify(self) -> Verdict:
        """Through the logs, so that these are tested on the way."""
        inputs, outcomes = InputLog(), OutcomeLog()
        for item in self.given:
            inputs.append(item)
        for outcome in self.outcomes:
            outcomes.append(outcome)
        assert list(inputs) == self.given
        assert list(outcomes) == self.outcomes
        arguments = (inputs, outcomes, self.committed, self.ends, self.after, self.gaps)
        found = verify("in", *arguments)
        assert found == verify("in", self.given, self.outcomes, *arguments[2:])  # any iterables
        named = found.decided + found.rejected + found.tombstones
        assert found.input == named + found.lost + found.waiting + found.unknown
        return found


def outcome(offset: int, kind: Kind = "decided", partition: int = 0, at: int = -1) -> Published:
    """About in[partition]@offset; `at`: its place in the output log."""
    topic = "dead" if kind == "rejected" else "out"
    return Published(topic, 0, offset if at < 0 else at, "in", partition, offset, kind)


def drained(count: int = 10) -> Run:
    """One partition, all decided and committed."""
    given = [Given(0, offset) for offset in range(count)]
    outcomes = [outcome(offset) for offset in range(count)]
    return Run(given, outcomes, {0: count}, {0: (0, count)})


def figures(found: Verdict) -> tuple[int, int, int]:
    return found.lost, found.doubled, found.reordered


def test_a_clean_run() -> None:
    found = drained().verify()
    assert found == Verdict(10, 10, 0, 0, 0, 0, True)
    assert found.clean


@pytest.mark.parametrize("index", [0, 4, 9])
def test_a_loss_is_found(index: int) -> None:
    run = drained()
    kept = [o for o in run.outcomes if o.input_offset != index]
    found = run.plant(outcomes=kept).verify()
    assert figures(found) == (1, 0, 0)
    assert found.findings == (f"lost: in[0]@{index}: no outcome, but 10 is committed",)
    assert not found.clean


def test_a_duplicate_is_found_wherever_it_is() -> None:
    run = drained()
    for again in (outcome(9, at=10), outcome(3, at=10), outcome(3, "rejected", at=7)):
        found = run.plant(outcomes=[*run.outcomes, again]).verify()
        assert figures(found) == (0, 1, 0)  # one that comes again is not out of order too
        place = f"{again.topic}[0]@{again.offset}"
        about = f"in[0]@{again.input_offset}"
        assert found.findings == (f"doubled: {place}: one more outcome of {about}",)
        assert found.decided == 10
        assert found.rejected == 0


def test_order_is_that_of_a_lane() -> None:
    swapped = [outcome(1, at=0), outcome(0, at=1), *(outcome(n) for n in range(2, 10))]
    found = drained().plant(outcomes=swapped).verify()
    assert figures(found) == (0, 0, 1)
    assert found.findings == ("reordered: out[0]@1: in[0]@0 comes after in[0]@1",)
    lanes = [outcome(n)._replace(partition=n % 2) for n in (1, 0, 3, 2, 5, 4, 7, 6, 9, 8)]
    assert drained().plant(outcomes=lanes).verify().clean  # other output partitions
    letters = [outcome(1, "rejected"), *(outcome(n) for n in range(10) if n != 1)]
    assert drained().plant(outcomes=letters).verify().clean  # another topic
    given = [Given(p, n) for p in (0, 1) for n in range(5)]
    mixed = [outcome(n, partition=p) for n in range(5) for p in (1, 0)]
    assert Run(given, mixed, {0: 5, 1: 5}, {0: (0, 5), 1: (0, 5)}).verify().clean


def test_torn_outputs_without_offsets() -> None:
    found = drained().plant(committed={0: 7}).verify()
    assert figures(found) == (0, 3, 0)
    assert not found.committed
    assert found.waiting == 3
    assert found.findings[0].startswith(
        "doubled: out[0]@7: an outcome of in[0]@7, but 7 is committed: a torn transaction"
    )
    scored_again = [outcome(7, at=10), outcome(8, at=11), outcome(9, at=12)]
    run = drained()
    found = run.plant(outcomes=run.outcomes + scored_again).verify()
    assert figures(found) == (0, 3, 0)


def test_torn_offsets_without_outputs() -> None:
    found = drained().plant(outcomes=drained().outcomes[:7]).verify()
    assert figures(found) == (3, 0, 0)
    assert found.committed


def test_torn_part_of_the_outputs() -> None:
    """Of one transaction over two partitions and two topics, the dead letters are missing."""
    given = [Given(p, n) for p in (0, 1) for n in range(6)]
    kinds: list[Kind] = ["decided", "rejected"]
    made = [outcome(n, kinds[n % 2], p) for p in (0, 1) for n in range(6)]
    run = Run(given, made, {0: 6, 1: 6}, {0: (0, 6), 1: (0, 6)})
    assert run.verify() == Verdict(12, 6, 6, 0, 0, 0, True)
    torn = [o for o in made if o.kind == "decided" or o.input_offset < 3]
    found = run.plant(outcomes=torn).verify()
    assert figures(found) == (4, 0, 0)
    assert all(text.endswith("but 6 is committed") for text in found.findings)


def test_offsets_of_markers_and_aborted_records_are_no_gaps() -> None:
    """Records at 0, 1, 3, 4; a marker at 2 and, behind the last record, at 5."""
    offsets = (0, 1, 3, 4)
    given, made = [Given(0, n) for n in offsets], [outcome(n) for n in offsets]
    run = Run(given, made, {0: 6}, {0: (0, 6)})
    assert run.verify() == Verdict(4, 4, 0, 0, 0, 0, True)
    behind = run.plant(committed={0: 5}).verify()
    assert behind.clean
    assert not behind.committed
    found = run.plant(outcomes=[*made, outcome(5, at=9)]).verify()
    assert figures(found) == (0, 1, 0)
    assert "there is no record in[0]@5" in found.findings[0]


def test_outcomes_of_records_that_retention_deleted() -> None:
    run = drained()
    kept = run.plant(given=run.given[6:], ends={0: (6, 10)})
    assert kept.verify() == Verdict(4, 4, 0, 0, 0, 0, True)
    again = kept.plant(outcomes=[*run.outcomes, outcome(2, at=10)])
    assert figures(again.verify()) == (0, 1, 0)  # decided twice is decided twice
    emptied = run.plant(given=[], ends={0: (10, 10)})
    assert emptied.verify() == Verdict(0, 0, 0, 0, 0, 0, True)
    fresh = emptied.plant(committed={0: None})
    assert fresh.verify() == Verdict(0, 0, 0, 0, 0, 0, True)


def test_an_outcome_beyond_the_input_is_of_nothing() -> None:
    """A topic that was made anew, or the wrong cluster."""
    run = drained()
    for stray in (outcome(10), outcome(0, partition=5)):
        found = run.plant(outcomes=[*run.outcomes, stray]).verify()
        assert figures(found) == (0, 1, 0)
        assert "an outcome of nothing" in found.findings[0]


def test_foreign_records_are_reported() -> None:
    stray = outcome_of(Record("out", 3, 17, None, b"hello"))
    run = drained()
    found = run.plant(outcomes=[stray, *run.outcomes]).verify()
    assert figures(found) == (0, 1, 0)
    assert found.findings == ("doubled: out[3]@17: an outcome of nothing: not ours",)


def test_outcomes_of_another_policy_are_passed_over() -> None:
    run = drained()
    other = [o._replace(input_topic="other") for o in run.outcomes]
    assert run.plant(outcomes=[*other, *run.outcomes, *other]).verify() == run.verify()


def test_tombstones() -> None:
    """At 1, 4 and 7; passed on, or skipped without any outcome, or rejected."""
    places = (1, 4, 7)
    run = drained()
    passed = [outcome(n, "tombstone" if n in places else "decided") for n in range(10)]
    found = run.plant(outcomes=passed).verify()
    assert (found.decided, found.rejected, found.tombstones, found.clean) == (7, 0, 3, True)
    given = [Given(0, n, n in places) for n in range(10)]
    rest = [o for o in run.outcomes if o.input_offset not in places]
    found = run.plant(given=given, outcomes=rest).verify()
    assert (found.decided, found.rejected, found.tombstones, found.clean) == (7, 0, 3, True)
    # The policy said `reject` until yesterday.
    letters = [outcome(n, "rejected" if n in places else "decided") for n in range(10)]
    found = run.plant(given=given, outcomes=letters).verify()
    assert (found.decided, found.rejected, found.tombstones, found.clean) == (7, 3, 0, True)
    found = run.plant(outcomes=rest).verify()  # not skipped: lost
    assert figures(found) == (3, 0, 0)


def test_a_group_at_work_raises_no_alarm() -> None:
    """Committed 4 before its outputs were read and 7 after; 8 are in the input by now."""
    run = drained().plant(committed={0: 4}, after={0: 7})
    for seen in range(4, 8):
        found = run.plant(outcomes=run.outcomes[:seen]).verify()
        assert figures(found) == (0, 0, 0)
        assert not found.committed
        assert (found.decided, found.waiting) == (seen, 10 - seen)
    at_the_end = run.plant(outcomes=run.outcomes[:6], after={0: 10}).verify()
    assert not at_the_end.committed  # as long as some outcomes have not been seen
    torn = run.plant(outcomes=run.outcomes[:8]).verify()
    assert figures(torn) == (0, 1, 0)
    lost = run.plant(outcomes=run.outcomes[:3]).verify()
    assert figures(lost) == (1, 0, 0)


def test_a_group_that_has_not_begun() -> None:
    run = drained().plant(outcomes=[], committed={0: None})
    found = run.verify()
    assert found.clean
    assert not found.committed
    assert found.waiting == 10
    torn = run.plant(outcomes=[outcome(0)]).verify()
    assert figures(torn) == (0, 1, 0)


def test_outcomes_that_retention_deleted_are_not_lost() -> None:
    """The first records of an output partition are gone; what is left is in order."""
    run = drained()
    rest = run.plant(outcomes=run.outcomes[4:], gaps=Gaps(outputs=frozenset({("out", 0)})))
    found = rest.verify()
    assert found.clean
    assert (found.decided, found.unknown) == (6, 4)
    hole = [o for o in rest.outcomes if o.input_offset != 7]
    assert figures(rest.plant(outcomes=hole).verify()) == (1, 0, 0)
    no_letter_left = rest.plant(outcomes=hole, gaps=Gaps(outputs=frozenset({("dead", 0)})))
    assert figures(no_letter_left.verify()) == (0, 0, 0)  # each may have been a dead letter


def test_other_gaps_that_are_known() -> None:
    run = drained()
    hole = [o for o in run.outcomes if o.input_offset not in (0, 1, 7)]
    late = run.plant(outcomes=hole, gaps=Gaps(started_late=True)).verify()
    assert (late.lost, late.unknown) == (1, 2)
    compacted = run.plant(outcomes=hole, gaps=Gaps(compacted=True)).verify()
    assert (compacted.lost, compacted.unknown) == (0, 3)
    part = run.plant(given=run.given[2:5], gaps=Gaps(given=True))
    assert part.verify() == Verdict(3, 3, 0, 0, 0, 0, True)
    again = part.plant(outcomes=[*run.outcomes, outcome(8, at=10), outcome(12, at=11)])
    assert figures(again.verify()) == (0, 2, 0)


def test_findings_are_few_and_of_every_kind() -> None:
    run = drained(200)
    made = [outcome(n) for n in range(100, 200)] + [outcome(n, at=n + 200) for n in range(1, 100)]
    found = run.plant(outcomes=[*made, *made]).verify()
    assert figures(found) == (1, 199, 99)
    assert len(found.findings) == MOST_FINDINGS
    assert {text.partition(":")[0] for text in found.findings} == {"lost", "doubled", "reordered"}


def test_committed_looks_at_every_partition() -> None:
    ends = {0: (0, 10), 1: (0, 0), 2: (4, 4)}
    run = drained()
    assert run.plant(ends=ends).verify().committed
    assert run.plant(ends=ends, committed={0: 10, 1: 0, 2: 4}).verify().committed
    assert not run.plant(ends=ends, committed={0: 10, 1: 0, 2: 3}).verify().committed
    assert not run.plant(ends={**ends, 3: (0, 1)}).verify().committed
