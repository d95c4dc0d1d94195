"""Latency under load and memory drift: the cores by a clock of their own, the drivers over a tiny
model, and the script for GPUs with its commands replaced. Nothing here says how fast."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from processor.bench import drift, load
from processor.bench.standalone import random_events
from processor.core.batch import Budget
from processor.engine.model import load_model
from tests.engine.tiny import CACHE, save_tiny_model

SCRIPT = Path(__file__).parent.parent.parent / "bench" / "gpu.sh"
SMALL = ("--prefix", "40", "--suffix", "10", "--max-events", "4")


class Clock:
    """Time passes when somebody sleeps or works."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.at += seconds


def serve(arrivals: Sequence[float], limits: Budget, cost: float) -> tuple[load.Served, list[int]]:
    clock, scored = Clock(), list[int]()

    def score(places: Sequence[int]) -> None:
        scored.extend(places)
        clock.sleep(cost)

    found = load.serve(arrivals, [10] * len(arrivals), limits, score, clock.now, clock.sleep)
    return found, scored


def test_whatever_is_there_goes_at_once_up_to_the_budget() -> None:
    arrivals = [1.0, 1.5, 1.6, 1.7, 9.0]
    found, scored = serve(arrivals, Budget(max_rows=100, max_events=2), cost=1.0)
    assert scored == [0, 1, 2, 3, 4]
    assert [count for _, _, count in found.batches] == [1, 2, 1, 1]
    assert found.latencies == pytest.approx([1.0, 1.5, 1.4, 2.3, 1.0])  # waiting in line counts
    rows, _ = serve(arrivals, Budget(max_rows=10, max_events=9), cost=1.0)
    assert [count for _, _, count in rows.batches] == [1] * 5


def test_arrivals_do_not_wait_for_answers() -> None:
    """Twice the load that can be served: latencies grow to the end, and the figures say so."""
    arrivals = load.poisson(200.0, 400, seed=3)
    found, _ = serve(arrivals, Budget(max_rows=1000, max_events=1), cost=0.01)
    figures = load.summary(found, arrivals, 200.0)
    assert figures["achieved_per_s"] < 120
    assert figures["p99_ms"] > 1500
    assert figures["utilisation"] == pytest.approx(1, abs=0.02)
    assert figures["counted_events"] == 360


def test_arrivals_are_seeded_and_as_many_as_asked_for() -> None:
    arrivals = load.poisson(780.0, 20_000, seed=1)
    assert arrivals == load.poisson(780.0, 20_000, seed=1)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(20_000 / 780, rel=0.03)


def test_growth_is_seen_and_warm_up_is_not() -> None:
    held, scored = [0], list[int]()

    def score(places: Sequence[int]) -> None:
        scored.extend(places)
        held[0] += 1000 if len(scored) < 80 else len(places)

    limits = Budget(max_rows=50, max_events=8)
    samples = drift.run(1000, [7, 9, 50], limits, score, lambda: {"rss": held[0]}, seed=2)
    assert len(scored) == 1000
    found = drift.drift(samples)
    assert 90 <= found["warm_up_events"] <= 130
    assert found["drift_bytes"]["rss"] == 1000 - found["warm_up_events"]
    assert found["largest_gain_bytes"] == found["drift_bytes"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCESSOR_MODEL__DTYPE", "float32")
    monkeypatch.setenv("PROCESSOR_MODEL__THREADS", "1")


def test_events_have_the_lengths_that_are_told(model: Path) -> None:
    loaded = load_model(str(model), dtype="float32", device="cpu", cache_dir=CACHE)
    ours, lengths = random_events(loaded, 40, 5, 15, seed=1)
    assert {min(lengths), max(lengths)} == {5, 15}
    assert len(set(ours.score(range(8)))) == 8


def test_the_drivers_write_what_they_measured(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "load.json"
    load.main(
        ["--model", str(model), "--rate", "500", "--events", "60", *SMALL, "--json", str(file)]
    )
    found = json.loads(file.read_text())
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["counted_events"] == 54
    file = tmp_path / "drift.json"
    drift.main(["--model", str(model), "--events", "200", *SMALL, "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["drift_bytes"]["cuda_allocated"] == 0
    assert found["bytes_at_end"]["rss"] > 2**20
    assert found["samples"][-1]["events"] == 200
    out = capsys.readouterr().out
    assert "500 events/s offered" in out
    assert "bytes gained" in out


def fake_environment(folder: Path, fails: str = "never") -> Path:
    """`python` and `processor` that note their arguments; those with `fails` in them fail."""
    folder.mkdir()
    for name in ("python", "processor"):
        file = folder / name
        file.write_text(
            f'#!/bin/sh\necho "{name} $*" >>{folder}/calls\n'
            f'case "$*" in *{fails}*) echo broken >&2; exit 3;; esac\necho "{name} done"\n'
        )
        file.chmod(0o755)
    return folder / "python"


def run_script(python: Path, results: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(python)}
    command = ["bash", str(SCRIPT), str(results), "some-model"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_the_script_runs_every_step(tmp_path: Path) -> None:
    python = fake_environment(tmp_path / "bin")
    found = run_script(python, tmp_path / "results")
    assert found.returncode == 0, found.stderr
    assert "all 4 steps done" in found.stdout.splitlines()[-1]
    calls = (tmp_path / "bin" / "calls").read_text()
    steps = ("engine self-check", "bench --prefix", "processor.bench.load", "processor.bench.drift")
    assert all(step in calls for step in steps)
    assert (tmp_path / "results" / "self-check.json").read_text() == "processor done\n"


def test_the_script_goes_on_after_a_failed_step_and_says_so(tmp_path: Path) -> None:
    python = fake_environment(tmp_path / "bin", fails="bench.load")
    found = run_script(python, tmp_path / "results")
    assert found.returncode == 1
    assert found.stdout.splitlines()[-1].startswith("gpu.sh: 1 of 4 steps failed: load;")
    assert "broken" in found.stderr
    assert "processor.bench.drift" in (tmp_path / "bin" / "calls").read_text()


def test_the_script_names_a_missing_environment(tmp_path: Path) -> None:
    found = run_script(tmp_path / "nowhere", tmp_path / "results")
    assert found.returncode == 2
    assert "make env" in found.stderr
