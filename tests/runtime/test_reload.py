"""A policy changes while the worker runs: every record has one outcome, and says under which
version."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processor.broker.memory import Call
from processor.core.batch import Budget
from processor.core.event import Record
from processor.core.pipeline import Pipeline, Prepared
from processor.core.policy import load_policy
from processor.errors import AbortAndRewind, RebuildProducer
from processor.runtime.ledger import Ledger
from processor.runtime.model_thread import ModelThread, Task
from processor.runtime.reload import Reloads
from processor.runtime.scoring import Scoring
from processor.runtime.worker import install_signal_handlers
from tests.runtime.versions import UNCAPTURABLE, UNSERVABLE, Hot
from tests.runtime.world import World, await_, event, judged

CALLS: list[Call] = ["begin", "produce", "send_offsets", "commit"]


@pytest.fixture
def hot(world: World, tmp_path: Path) -> Iterator[Hot]:
    hot = Hot(world, tmp_path)
    yield hot
    hot.scorer.scoring.set()
    hot.scorer.loading.set()


def version(record: Record) -> str:
    headers = dict(record.headers)
    found = json.loads(headers.get("processor.rejection", record.value) or b"")["policy"]
    return str(found["version"])


def versions(world: World) -> dict[str, list[int]]:
    """Offsets of the input by the version that they were decided under; per partition no version
    comes back."""
    found: dict[str, list[int]] = {}
    lanes: dict[int, list[tuple[int, int]]] = {}
    for record in (*world.broker.read("out"), *world.broker.read("dead")):
        _, partition, offset = judged(record)
        found.setdefault(version(record), []).append(offset)
        lanes.setdefault(partition, []).append((offset, int(version(record))))
    for lane in lanes.values():
        numbers = [number for _, number in sorted(lane)]
        assert numbers == sorted(numbers)
    return {number: sorted(offsets) for number, offsets in found.items()}


def test_records_before_and_after_a_swap(
    world: World, hot: Hot, caplog: pytest.LogCaptureFixture
) -> None:
    world.fill(40)
    running = world.start(hot.worker())
    await_(world.done)
    hot.write(version="2", labels=["no", "yes", "hold"])
    running.worker.reload()
    await_(lambda: hot.reloads("swapped") == 1)
    world.fill(40)
    await_(world.done)
    running.stop()
    world.verify()
    world.verify_observed()
    half = sorted([*range(20)] * 2)
    assert versions(world) == {"1": half, "2": [n + 20 for n in half]}
    new = load_policy(hot.folder)
    for record in world.broker.read("out"):
        decision = json.loads(record.value or b"")
        expected = world.policy if version(record) == "1" else new
        assert decision["policy"]["fingerprint"] == expected.fingerprint
        assert decision["scores"].keys() == set(expected.label_names)
    assert hot.tokenizer.keys == hot.scorer.keys == {new.key}
    assert world.counters.snapshot().policy_reloads == {"swapped": 1}
    [line] = [r.getMessage() for r in caplog.records]
    assert line == (
        f"policy orders: version 2 ({new.fingerprint[:12]}) takes over from version 1 "
        f"({world.policy.fingerprint[:12]})"
    )


def test_batches_in_flight_keep_their_version(world: World, hot: Hot) -> None:
    """In the model, in the slot, and prepared without a place: all of the old version. Then one
    batch holds records of both."""
    running = world.start(hot.worker())
    hot.scorer.steps = 1
    hot.scorer.seconds = 0.2
    hot.scorer.loading.clear()
    hot.write(version="2")
    new = load_policy(hot.folder)
    running.worker.reload()
    await_(lambda: new.key in hot.scorer.log)  # the model is in the only step
    for n in range(13):
        world.broker.append("in", 0, None, event(n))
    await_(lambda: world.counters.snapshot().queue_depth == 13)
    hot.scorer.loading.set()
    await_(lambda: hot.reloads("swapped") == 1)
    for n in range(2):
        world.broker.append("in", 0, None, event(n))
    await_(lambda: len(world.broker.read("out")) == 15)
    await_(lambda: hot.scorer.keys == {new.key})
    running.stop()
    old = world.policy.key
    batches = [(old,) * 4] * 3 + [(old, new.key, new.key)]
    assert [each for each in hot.scorer.log if isinstance(each, tuple)] == batches
    assert versions(world) == {"1": list(range(13)), "2": [13, 14]}


def test_between_two_batches_there_is_one_step(world: World, hot: Hot) -> None:
    world.fill(8, damaged_every=0)
    pipeline = Pipeline([world.policy], hot.tokenizer, hot.scorer, Budget(200, 4))
    model, ledger = ModelThread(pipeline, time.monotonic), Ledger()
    ledger.assign([("in", 0), ("in", 1)])
    entries = []
    for record in world.broker.read("in"):
        entry, item = ledger.add(record, 0.0), pipeline.prepare(record)
        assert entry is not None
        assert isinstance(item, Prepared)
        entry.prepared = item
        entries.append(entry)
    model.refill(entries, ledger.is_live)
    hot.write(version="2")
    task = Task(hot.scorer.load_steps(load_policy(hot.folder)))
    hot.scorer.steps = 4
    model.begin(task)
    model.start()
    await_(lambda: task.ended)
    model.stop(5)
    kinds = ["batch" if isinstance(each, tuple) else "step" for each in hot.scorer.log]
    assert kinds == ["batch", "step", "batch", "step", "step", "step"]
    assert len(model.collect()) == 2


def test_without_events_the_steps_follow_each_other(world: World, hot: Hot) -> None:
    hot.scorer.steps = 50
    running = world.start(hot.worker())
    hot.write(version="2")
    running.worker.reload()
    await_(lambda: hot.reloads("swapped") == 1)
    running.stop()
    assert hot.scorer.log == [load_policy(hot.folder).key] * 50


def test_folders_are_polled(world: World, tmp_path: Path) -> None:
    hot = Hot(world, tmp_path, every_s=0.01)
    running = world.start(hot.worker())
    await_(lambda: hot.reloads("unchanged") >= 3)
    hot.write(version="2")
    await_(lambda: hot.reloads("swapped") == 1)
    running.stop()


def test_without_a_request_nothing_is_read(world: World, hot: Hot) -> None:
    running = world.start(hot.worker(), world.done)
    hot.write(version="2")
    world.fill()
    running.join()
    assert world.counters.snapshot().policy_reloads == {}
    assert versions(world).keys() == {"1"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text": "name: ["}, "policy.yaml"),
    ({"name": "refunds"}, "name = 'refunds': was 'orders': needs a restart"),
    ({"topics": {"input": "in2"}}, "topics.input = 'in2': was 'in': needs a restart"),
    ({"prefix_text": " "}, "the file is empty"),
    ({"description": UNSERVABLE}, "leaves no room"),
    ({"description": UNCAPTURABLE}, "MemoryError: out of memory"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=[why for _, why in REFUSED])
@pytest.mark.parametrize("every_s", [0.0, 0.01])
def test_what_is_refused_changes_nothing(
    world: World,
    tmp_path: Path,
    changes: dict[str, Any],
    why: str,
    every_s: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hot = Hot(world, tmp_path, every_s)
    running = world.start(hot.worker())
    hot.write(**changes)
    if not every_s:
        running.worker.reload()
    await_(lambda: hot.reloads("refused") == 1)
    time.sleep(5 * every_s)  # polled again: said once
    world.fill()
    await_(world.done)
    [line] = [record.getMessage() for record in caplog.records]
    fingerprint = world.policy.fingerprint[:12]
    assert line.startswith(f"policy orders stays at version 1 ({fingerprint}): ")
    assert why in line
    assert "\n" not in line
    assert hot.reloads("refused") == 1
    assert versions(world).keys() == {"1"}
    running.worker.reload()  # who asks is told again
    await_(lambda: hot.reloads("refused") == 2)
    hot.write(version="2")
    running.worker.reload()
    await_(lambda: hot.reloads("swapped") == 1)
    world.fill()
    await_(world.done)
    running.stop()
    world.verify()
    assert versions(world).keys() == {"1", "2"}


def test_the_last_of_two_reloads_wins(world: World, hot: Hot) -> None:
    running = world.start(hot.worker())
    hot.scorer.loading.clear()
    hot.write(version="2")
    running.worker.reload()
    second = load_policy(hot.folder)
    await_(lambda: second.key in hot.scorer.log)
    hot.write(version="3")
    running.worker.reload()
    third = load_policy(hot.folder)
    await_(lambda: third.key in [w.policy.key for w in running.worker._reloads._loading.values()])  # type: ignore[union-attr]
    hot.scorer.loading.set()
    await_(lambda: hot.reloads("swapped") == 1)
    world.fill()
    await_(world.done)
    running.stop()
    assert versions(world).keys() == {"3"}
    assert hot.scorer.log.count(second.key) == 1  # given up after the step it was in
    assert hot.scorer.keys == hot.tokenizer.keys == {third.key}


def test_a_version_taken_back_while_it_is_captured(world: World, hot: Hot) -> None:
    running = world.start(hot.worker())
    hot.scorer.loading.clear()
    hot.write(version="2")
    running.worker.reload()
    await_(lambda: hot.scorer.log != [])
    hot.write()
    running.worker.reload()
    await_(lambda: hot.reloads("unchanged") == 1)
    hot.scorer.loading.set()
    world.fill()
    await_(world.done)
    running.stop()
    assert versions(world).keys() == {"1"}
    assert len([each for each in hot.scorer.log if isinstance(each, str)]) == 1
    assert hot.scorer.keys == {world.policy.key}


def test_back_to_a_version_that_has_records_in_flight(world: World, hot: Hot) -> None:
    """It is still there: nothing is captured a second time, and nothing is freed under it."""
    world.fill(8, damaged_every=0)
    running = world.start(hot.worker(), world.done)
    running.join()
    reloads = running.worker._reloads
    assert reloads is not None
    first = world.policy
    hot.write(version="2")
    second = load_policy(hot.folder)
    reloads._swap(second, second)  # what `step` does once it is captured
    reloads._load(first, first)
    assert (reloads._retired, reloads._loading) == ({second.key}, {})
    assert world.broker.read("out") != []
    assert hot.tokenizer.keys == {first.key, second.key}
    reloads.step()
    assert (reloads._retired, hot.tokenizer.keys) == (set(), {first.key})


def test_to_and_fro_under_load(world: World, hot: Hot) -> None:
    running = world.start(hot.worker())
    hot.scorer.seconds = 0.002
    for wanted, number in enumerate("212121", 1):
        world.fill(60)
        hot.write(version=number)
        running.worker.reload()
        await_(lambda wanted=wanted: hot.reloads("swapped") == wanted)  # type: ignore[misc]
    await_(world.done)
    await_(lambda: hot.scorer.keys == hot.tokenizer.keys == {world.policy.key})
    running.stop()
    world.verify()


def test_a_reload_while_draining_is_given_up(world: World, hot: Hot) -> None:
    hot.scorer.seconds = 0.005
    hot.scorer.steps = 10_000
    world.fill(100, damaged_every=0)
    running = world.start(hot.worker())
    hot.write(version="2")
    running.worker.reload()
    new = load_policy(hot.folder)
    await_(lambda: new.key in hot.scorer.log)
    running.worker.stop()
    running.worker.reload()
    running.join()
    assert versions(world).keys() == {"1"}
    assert world.counters.snapshot().policy_reloads == {}
    assert sum(c or 0 for c in world.committed()) == len(world.broker.read("out"))
    world.run(hot.worker())
    world.verify()


def test_what_an_abort_repeats_is_decided_under_the_new_version(world: World, hot: Hot) -> None:
    """Nothing of the old attempt was visible, so this is no contradiction."""
    reloaded: list[bool] = []

    def swap() -> None:
        hot.write(version="2")
        running.worker.reload()
        reloaded.append(True)

    world.broker.faults.hook("begin", swap)
    world.broker.faults.push("commit", AbortAndRewind("no"))
    world.fill()
    hot.scorer.seconds = 0.02
    running = world.start(hot.worker(), world.done)
    running.join()
    world.verify()
    assert reloaded
    versions(world)


@pytest.mark.parametrize("seed", range(6))
def test_many_swaps_under_load_and_faults(world: World, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    hot = Hot(world, tmp_path, every_s=0.003 if seed % 2 else 0.0, seconds=0.0005)
    running = world.start(hot.worker())
    for n in range(2, 14):
        world.fill(rng.randrange(40))
        if rng.random() < 0.3:
            error = rng.choice([AbortAndRewind("no"), RebuildProducer("lost")])
            world.broker.faults.push(rng.choice(CALLS), error, skip=rng.randrange(3))
        bad = rng.random() < 0.2
        hot.write(version=str(n), description=UNCAPTURABLE if bad else "")
        running.worker.reload()
        time.sleep(rng.random() * 0.1)
    hot.write(version="14")
    running.worker.reload()
    new = load_policy(hot.folder)
    await_(lambda: new.key in hot.tokenizer.keys)
    world.fill(10)
    await_(world.done)
    await_(lambda: hot.scorer.keys == hot.tokenizer.keys == {new.key})
    running.stop()
    world.verify()
    world.verify_observed()
    assert versions(world)["14"][-1] == max(world.ends()) - 1


def test_sighup_reloads(world: World, hot: Hot) -> None:
    """In the main thread, as the command line runs it."""
    world.fill()
    worker = hot.worker()
    before = signal.getsignal(signal.SIGHUP)
    restore = install_signal_handlers(worker, worker.reload)
    sent = False

    def until() -> bool:
        nonlocal sent
        if not sent and world.done():
            sent = True
            hot.write(version="2")
            os.kill(os.getpid(), signal.SIGHUP)
        return hot.reloads("swapped") == 1

    try:
        worker.run(until)
    finally:
        restore()
    assert signal.getsignal(signal.SIGHUP) == before
    assert not worker.stopping


def test_a_worker_that_cannot_reload_ignores_the_request(world: World) -> None:
    running = world.start(world.worker())
    running.worker.reload()
    running.stop()
    assert world.counters.snapshot().policy_reloads == {}


def test_a_version_that_was_ready_a_moment_too_late_is_freed(world: World, hot: Hot) -> None:
    """Given up by the broker thread when the model's thread had it already."""
    pipeline = Pipeline([world.policy], hot.tokenizer, hot.scorer)
    model = ModelThread(pipeline, time.monotonic)
    model.start()
    scoring = Scoring(pipeline, model, Ledger(), world.counters, time.monotonic)
    reloads = Reloads(hot.reloading, pipeline, model, scoring, world.counters, time.monotonic)

    def stepped() -> bool:
        reloads.step()
        return bool(reloads._loading)

    hot.scorer.loading.clear()
    hot.write(version="2")
    second = load_policy(hot.folder)
    reloads.ask()
    await_(stepped)
    hot.write(version="3")
    reloads.ask()
    reloads.step()
    await_(lambda: reloads._reader._found is not None)
    hot.scorer.loading.set()
    await_(lambda: second.key in hot.scorer.keys)
    reloads.step()
    await_(lambda: not stepped())
    await_(lambda: stepped() or hot.scorer.keys == {load_policy(hot.folder).key})
    model.stop(5)
    assert second.key not in hot.scorer.keys
    assert hot.reloads("swapped") == 1
