"""`processor bench`, in process, over a tiny model on disk. Nothing here says how fast."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from processor import cli
from processor.engine import bench_chip
from processor.engine.bench_decision import Decision, Unavailable
from processor.engine.bench_systems import Ours, StockCache, load_stock, random_work
from processor.engine.model import load_model
from tests.engine.conftest import text_policy
from tests.engine.tiny import CACHE, SPECIAL, save_tiny_model

Run = Callable[..., tuple[int, str, str]]
SHORT = ("--prefix", "320", "--suffix", "16", "--rounds", "2", "--batch", "1,3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_chip, "_CPU_SQUARES", (64,))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path) -> Run:
    """`run("--prefix", ...)`: exit status, standard output, standard error."""
    monkeypatch.setenv("PROCESSOR_MODEL__SOURCE", str(model))
    monkeypatch.setenv("PROCESSOR_MODEL__DTYPE", "float32")
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["processor", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = text_policy(tmp_path, "mail", ["ok", "fraud"])
    line = orjson.dumps({"key": "a", "event": {"text": "see you"}, "label": "ok"})
    (folder / "sample.jsonl").write_bytes(line)
    return folder


def test_a_run_says_all_it_measured(run: Run, policy: Path, tmp_path: Path) -> None:
    file, figure = tmp_path / "bench.json", tmp_path / "bench.png"
    status, out, err = run(*SHORT, "--policy", policy, "--json", file, "--plot", figure)
    assert status == 0, err
    result: dict[str, Any] = json.loads(file.read_text())
    assert {
        *("chip", "dtype", "threads", "peak_flops", "flops_per_event", "prefix", "suffix"),
        *("ideal_gain", "rows", "peak_rss_bytes"),
    } <= set(result)
    assert (result["prefix"], result["suffix"], result["dtype"]) == (320, 16, "float32")
    assert result["threads"] == 1
    systems = [(row["system"], row["batch"]) for row in result["rows"]]
    assert systems == [
        *(("full", 1), ("transformers", 1), ("transformers", 16), ("decision", 1)),
        *(("ours", 1), ("ours", 3)),
    ]
    for row in result["rows"]:
        assert row["events_per_s"] == pytest.approx(1e3 * row["batch"] / row["p50_ms"])
        assert row["p99_ms"] >= row["p50_ms"] > 0
        assert row["fraction_of_peak"] > 0
        assert row["gain"] > 0
    assert result["rows"][0]["gain"] == 1
    assert result["largest_difference"] < result["tolerance"]
    assert result["peak_rss_bytes"] >= result["peak_rss_ours_bytes"] > 2**20
    assert result["host_ms_per_event"] > 0
    assert result["notes"] == []
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "transformers" in out
    assert "matrix-product peak" in out
    assert f"{result['ideal_gain']:.2f}x" in out


def test_a_sweep_is_a_list_and_a_figure(run: Run, tmp_path: Path) -> None:
    file, figure = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    lists = ("--prefix", "32,64", "--suffix", "16", "--batch", "1,4", "--topics", "1,2")
    status, out, err = run("--sweep", *lists, "--rounds", "1", "--json", file, "--plot", figure)
    assert status == 0, err
    results: list[dict[str, Any]] = json.loads(file.read_text())
    assert [(r["factor"], r["value"]) for r in results] == [
        *(("prefix", 32), ("prefix", 64), ("suffix", 16)),
        *(("batch", 1), ("batch", 4), ("topics", 1), ("topics", 2)),
    ]
    assert [row["system"] for row in results[-1]["rows"]] == ["full", "transformers", "ours"]
    assert (results[-1]["topics"], results[-1]["rows"][1]["batch"]) == (2, 4)
    assert results[1] | {"factor": "", "value": 0} == results[2] | {"factor": "", "value": 0}
    assert "<svg" in figure.read_text()
    assert "ideal" in out


@pytest.mark.parametrize("system", [Ours, StockCache])
def test_a_wrong_answer_is_never_timed(
    system: type[Ours | StockCache], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = system.score

    def wrong(self: Any, places: Sequence[int]) -> Any:
        """Right for all but the last event of a batch of three or more."""
        answers = right(self, places)
        return answers[:-1] + answers[:1] if len(places) > 2 else answers

    monkeypatch.setattr(system, "score", wrong)
    file = tmp_path / "bench.json"
    status, out, err = run(*SHORT, "--skip", "decision", "--json", file)
    assert status == 1
    assert "disagree" in err
    assert not out
    assert not file.exists()


def test_what_is_left_out_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(*_: object) -> None:
        raise Unavailable("this version of transformers has none")

    monkeypatch.setattr(Decision, "__init__", absent)
    monkeypatch.chdir(tmp_path)  # no policies here
    status, out, err = run(*SHORT, "--skip", "full", "--stock-batch", "2", "--json", "bench.json")
    assert status == 0, err
    result = json.loads(Path("bench.json").read_text())
    assert [row["gain"] for row in result["rows"]] == [None] * 3
    assert any("transformers has none" in note for note in result["notes"])
    assert any("host work was not timed" in note for note in result["notes"])
    assert result["host_ms_per_event"] is None
    assert "note: " in out


def test_the_decision_pipeline_needs_room_for_its_template(model: Path) -> None:
    loaded = load_model(str(model), dtype="float32", device="cpu", cache_dir=CACHE)
    stock = load_stock(loaded)
    with pytest.raises(Unavailable, match="template alone"):
        Decision(loaded, stock, tokens=8, seed=1)
    pipeline = Decision(loaded, stock, tokens=300, seed=1)
    assert abs(pipeline.tokens - 300) <= 3
    assert len(pipeline.score([0, 1])) == 2
    assert len(loaded.tokenizer) == len(type(loaded.tokenizer).from_pretrained(model))


def test_work_is_seeded_and_ordinary(model: Path) -> None:
    loaded = load_model(str(model), dtype="float32", device="cpu", cache_dir=CACHE)
    work = random_work(loaded, 50, 10, topics=3, seed=4)
    assert work == random_work(loaded, 50, 10, topics=3, seed=4)
    assert work != random_work(loaded, 50, 10, topics=3, seed=5)
    assert [len(prefix) for prefix in work.prefixes] == [50] * 3
    assert len(set(work.prefixes)) == 3
    used = {token for ids in (*work.prefixes, *work.suffixes, work.labels) for token in ids}
    assert used.isdisjoint(map(loaded.tokenizer.convert_tokens_to_ids, [*SPECIAL, "<tool_call>"]))
    assert len({work.key(place) for place in range(48)}) == 48
    assert work.event(3)[0] == 0


def test_the_chip_is_named(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Some Chip\nflags\t\t: fpu avx2 avx512f amx_bf16\n")
    device = torch.device("cpu")
    assert bench_chip.chip_name(device, cpuinfo) == "Some Chip (amx_bf16, avx512f, avx2)"
    assert bench_chip.chip_name(device, tmp_path / "none")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--prefix", "10,20"), ("--prefix", "10,20", "--sweep")),
        (("--prefix", "0"), ("--prefix", "0", "from 1 up")),
        (("--batch", "1,x"), ("--batch", "1,x", "from 1 up")),
        (("--prefix", "9000"), ("--prefix", "9000", "1024")),
        (("--skip", "llama"), ("--skip", "llama", "full, transformers")),
        (("--skip", "full", "--skip", "transformers", "--skip", "ours", "--sweep"), ("--skip",)),
        (("--json", "nowhere/x.json"), ("--json", "nowhere")),
        (("--plot", "nowhere/x.png"), ("--plot", "nowhere")),
        (("--plot", "x.jpeg"), ("--plot", "x.jpeg", ".svg")),
        (("--policy", "nowhere"), ("nowhere", "no such file")),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    arguments: tuple[str, ...], parts: tuple[str, ...], run: Run
) -> None:
    status, out, err = run(*arguments)
    assert status == 2
    assert not out
    assert len(err.strip().splitlines()) == 1
    assert all(part in err for part in parts)
