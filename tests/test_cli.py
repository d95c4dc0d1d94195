"""The commands, in process, over a tiny model on disk and small policies."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import orjson
import pytest

from processor import cli
from processor.demo.damage import DAMAGES, reason
from processor.demo.orders import orders
from tests.engine.conftest import text_policy
from tests.engine.tiny import save_tiny_model

SCHEMAS = Path(__file__).parent.parent / "schemas"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies with samples, named unlike the example policies."""
    parent = tmp_path_factory.mktemp("policies")
    for name, labels in (("mail", ["ok", "fraud"]), ("desk", ["events.find", "events.buy", "ok"])):
        lines = [
            orjson.dumps({"key": str(n), "event": {"text": f"see you {n}"}, "label": labels[n % 2]})
            for n in range(30)
        ]
        folder = text_policy(parent, name, labels)
        (folder / "sample.jsonl").write_bytes(b"\n".join(lines))
    return parent


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path) -> Run:
    """`run("score", ...)`: exit status, standard output, standard error."""
    monkeypatch.setenv("PROCESSOR_MODEL__SOURCE", str(model))
    monkeypatch.setenv("PROCESSOR_MODEL__DTYPE", "float32")
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["processor", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_score_prints_the_published_decision(run: Run, policies: Path, tmp_path: Path) -> None:
    event = tmp_path / "event.json"
    event.write_text('{"text":"hello"}')
    status, out, _ = run("score", policies / "mail", event, "--json", "--key", "k1")
    decision = json.loads(out)
    assert status == 0
    jsonschema_rs.validate(json.loads((SCHEMAS / "decision.json").read_text()), decision)
    assert decision["label"] in ("ok", "fraud")
    assert sum(decision["scores"].values()) == pytest.approx(1)
    assert decision["event"]["key"] == "k1"
    assert (decision["policy"]["name"], decision["policy"]["version"]) == ("mail", "1")
    _, again, _ = run("score", policies / "mail", event, "--json")
    assert json.loads(again)["scores"] == decision["scores"]  # every bit, in another run
    status, table, _ = run("score", policies / "mail", event)
    assert status == 0
    assert decision["label"] in table
    assert "margin" in table


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "empty_payload"),
        (b'{"text":NaN}', "not_finite"),
        (b'{"text":"a","text":"b"}', "duplicate_key"),
        (b'{"text":1}', "schema"),
        (b"\xff", "not_utf8"),
    ],
)
def test_score_rejects(value: bytes, reason: str, run: Run, policies: Path, tmp_path: Path) -> None:
    event = tmp_path / "event.json"
    event.write_bytes(value)
    status, out, _ = run("score", policies / "mail", event, "--json")
    rejection = json.loads(out)
    assert status == 3
    assert rejection["reason"] == reason
    jsonschema_rs.validate(json.loads((SCHEMAS / "rejection.json").read_text()), rejection)


def test_demo_accounts_for_every_record(run: Run, policies: Path, tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    status, out, _ = run("demo", "--policies", policies, "--json", file)
    result: dict[str, Any] = json.loads(file.read_text())
    assert status == 0
    assert result["lost"] == result["doubled"] == 0
    assert result["records"] == result["decisions"] + result["rejections"] == 40
    assert result["rejections"] >= len(DAMAGES) - 1 > 13
    assert set(result["policies"]) == {"desk", "mail"}
    mail = result["policies"]["mail"]
    assert mail["metric"] == "accuracy"
    assert 0 <= mail["value"] <= 1
    prompts = sum(
        p["events"] * (p["prefix_tokens"] + p["suffix_tokens_mean"])
        for p in result["policies"].values()
    )
    computed = sum(
        p["prefix_tokens"] + p["events"] * p["suffix_tokens_mean"]
        for p in result["policies"].values()
    )
    assert result["prompt_tokens_saved"] == pytest.approx(1 - computed / prompts)
    assert "0 lost, 0 doubled" in out.replace("\n", " ")
    reasons = dict(part.split() for part in out.split("Rejected: ")[1].split(", "))
    assert set(reasons) == {reason(name) for name in DAMAGES}  # each kind, by its type
    assert sum(map(int, reasons.values())) == result["rejections"]


def test_policy_check_and_warm(run: Run, policies: Path) -> None:
    status, out, _ = run("policy", "check", policies / "mail", policies / "desk", "--json")
    mail, desk = json.loads(out)
    assert status == 0
    assert mail["samples"] == 24
    assert 0 < mail["label_mass"] < 1
    assert (mail["label_rows"], desk["labels"]) == (0, 3)
    assert desk["label_rows"] >= 1  # "events." is shared, and branches
    low = mail["label_mass"] < 0.5
    assert bool(mail["warnings"]) == low
    status, _, err = run("policy", "check", policies / "mail", "--strict")
    assert status == (3 if low else 0)
    assert ("label mass" in err) == low
    status, out, _ = run("policy", "warm", policies / "mail", "--json")
    assert status == 0
    assert json.loads(out)["policies"][0]["intact"] is True


def test_generate_is_seeded_and_complete(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "orders.jsonl"
    assert run("generate", "orders", "--count", "5", "--seed", "9", "--to", file)[0] == 0
    stream = orders(9)
    expected = [next(stream).event for _ in range(5)]
    assert [orjson.loads(line) for line in file.read_bytes().splitlines()] == expected
    assert run("generate", "telemetry", "--count", "3", "--labels", "--to", file)[0] == 0
    assert set(orjson.loads(file.read_bytes().splitlines()[0])) == {"key", "event", "label"}


def test_schema_is_what_the_repository_holds(run: Run, tmp_path: Path) -> None:
    assert run("schema", "--check", SCHEMAS)[0] == 0
    status, _, err = run("schema", "--check", tmp_path)
    assert status == 1
    assert "outdated" in err
    assert json.loads(run("schema", "decision")[1])["title"] == "Decision"


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"\xff",
        b"[]",
        b'{"key":"a","event":{"wrong":1},"label":"ok"}',
        b'{"key":"a","event":{"text":"b"},"label":"maybe"}',
    ],
)
def test_a_bad_sample_is_named(line: bytes, run: Run, tmp_path: Path) -> None:
    folder = text_policy(tmp_path, "mail", ["ok", "fraud"])
    good = b'{"key":"a","event":{"text":"b"},"label":"ok"}'
    (folder / "sample.jsonl").write_bytes(good + b"\n" + line)
    status, _, err = run("policy", "check", folder)
    assert status == 2
    assert "sample.jsonl: line 2" in err


def test_labels_are_text_and_not_markup(run: Run, tmp_path: Path) -> None:
    folder = text_policy(tmp_path, "mail", [{"name": "[ok]", "action": "[/x]"}, "fraud"])
    (tmp_path / "event.json").write_text('{"text":"hello"}')
    status, out, _ = run("score", folder, tmp_path / "event.json")
    assert status == 0
    assert "score [ok]" in out


def test_log_level(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "debug")
    assert run("schema", "decision")[0] == 0
    monkeypatch.setenv("LOG_LEVEL", "loud")
    status, _, err = run("schema", "decision")
    assert status == 2
    assert "LOG_LEVEL" in err


def test_demo_with_shared_topics_and_few_events(run: Run, tmp_path: Path) -> None:
    parent = tmp_path / "policies"
    for name in ("mail", "desk"):
        folder = text_policy(parent, name, ["ok", "fraud"])
        file = folder / "policy.yaml"
        file.write_text(file.read_text().replace(f"{name}.dlq", "shared.dlq"))
        (folder / "sample.jsonl").write_text('{"key":"a","event":{"text":"b"},"label":"ok"}')
    status, _, _ = run("demo", "--policies", parent, "--json", tmp_path / "demo.json")
    result = json.loads((tmp_path / "demo.json").read_text())
    assert status == 0
    assert (result["records"], result["rejections"], result["doubled"]) == (2, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("score", "nowhere"), ("nowhere", "no such file")),
        (("score", "{policies}/mail", "nowhere.json"), ("EVENT", "nowhere.json")),
        (("generate", "weather"), ("STREAM", "weather", "orders, telemetry")),
        (("schema", "weather"), ("NAME", "weather", "decision")),
        (("run",), ("policies", "at least one")),
        (("demo", "--policies", "nowhere"), ("--policies", "nowhere")),
        (("demo", "--json", "nowhere/x.json"), ("--json", "nowhere")),
        (("generate", "orders", "--to", "nowhere/x"), ("--to", "nowhere")),
        (("schema", "--write", "nowhere/x"), ("--write", "nowhere")),
        (("policy", "check", "{policies}/mail", "{policies}/mail"), ("name", "mail", "rename")),
        (("policy", "check", "{policies}/mail", "--model", "no/such.gguf"), ("model.source",)),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    arguments: tuple[str, ...], parts: tuple[str, ...], run: Run, policies: Path
) -> None:
    status, out, err = run(*(a.format(policies=policies) for a in arguments))
    assert status == 2
    assert not out
    assert len(err.strip().splitlines()) == 1
    assert all(part in err for part in parts)
