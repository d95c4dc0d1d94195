"""What DESIGN says of the tree, held by reading it: who imports whom, and how long files are."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import grimp
import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "processor"


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("processor", include_external_packages=True, cache_dir=None)


def importers(graph: grimp.ImportGraph, *packages: str) -> set[str]:
    known = graph.modules.intersection(packages)
    return {module for name in known for module in graph.find_modules_that_directly_import(name)}


def test_imports_go_one_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0, capsys.readouterr().out


def test_the_model_libraries_are_imported_in_the_engine_only(graph: grimp.ImportGraph) -> None:
    found = importers(graph, "torch", "transformers", "safetensors", "tokenizers", "gguf")
    assert found
    assert {module for module in found if not module.startswith("processor.engine")} == set()


def test_the_kafka_client_is_imported_in_one_module_only(graph: grimp.ImportGraph) -> None:
    assert set(importers(graph, "confluent_kafka")) == {"processor.broker.kafka"}


def test_the_core_has_no_clock_no_socket_no_thread(graph: grimp.ImportGraph) -> None:
    impure = "time datetime random socket threading asyncio os subprocess logging torch".split()
    found = importers(graph, *impure)
    assert {module for module in found if module.startswith("processor.core")} == set()


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for file in PACKAGE.rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > 300} == {}


# Mirrors and machines differ: where packages come from and where files lie is said by the
# environment, never by a tracked file.
REGISTRIES = (
    r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs\.org|docker\.io|ghcr\.io"
    r"|quay\.io|gcr\.io|repo1?\.maven\.|huggingface\.co|hf\.co"
)
FORBIDDEN = re.compile(rf"{REGISTRIES}|(?<![\w.])/(?:work|root|home|Users)/\w|index-url\s+\S+:")


def tracked_files() -> list[Path]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_registry_and_no_machine_path_is_tracked() -> None:
    found = []
    for file in tracked_files():
        if file == Path(__file__) or not file.is_file():
            continue
        text = file.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if match := FORBIDDEN.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


def test_a13_the_client_is_new_enough() -> None:
    """librdkafka before 2.12 loses records on a sequence error inside a transaction (#3575 in its
    changes), and KIP-848 is not finished there; what is installed is what is locked."""
    from confluent_kafka import libversion

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [bound] = [d for d in project["dependencies"] if d.startswith("confluent-kafka")]
    assert tuple(map(int, bound.partition(">=")[2].split("."))) >= (2, 15)
    assert libversion()[1] >= 0x020F00FF
