"""Reading policy folders while they change."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from processor.core.policy import Policy, load_policy
from processor.errors import ConfigError
from processor.runtime.versions import Found, Reader, read_version
from tests.core.builders import make_policy, write_policy
from tests.runtime.world import await_


def same(policy: Policy) -> Policy:
    return policy


def test_nothing_new_is_compiled_by_nobody(tmp_path: Path) -> None:
    running = make_policy(tmp_path)

    def never(policy: Policy) -> Policy:
        raise AssertionError(policy)

    found = read_version(running, never)
    assert (found.policy, found.compiled, found.refused) == (running, None, "")


def test_a_new_version_is_compiled(tmp_path: Path) -> None:
    running = make_policy(tmp_path)
    write_policy(tmp_path, version="2", prefix_text="Be kind.")
    found = read_version(running, same)
    assert found.compiled is not None
    assert (found.compiled.spec.version, found.compiled.prefix) == ("2", "Be kind.")
    assert {"render", "validate", "fingerprint"} <= vars(found.compiled).keys()  # nobody waits


def test_a_config_map_is_read_through_its_new_link(tmp_path: Path) -> None:
    """Kubernetes: `policy.yaml -> ..data/policy.yaml`, `..data -> ..2026_1`, and the second link
    is replaced."""
    write_policy(tmp_path / "..2026_1")
    write_policy(tmp_path / "..2026_2", version="2")
    (tmp_path / "..data").symlink_to("..2026_1")
    for name in ("policy.yaml", "prefix.md", "event.json"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    running = load_policy(tmp_path)
    (tmp_path / "..next").symlink_to("..2026_2")
    (tmp_path / "..next").replace(tmp_path / "..data")
    found = read_version(running, same)
    assert found.compiled is not None
    assert found.compiled.spec.version == "2"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "topics.output = 'elsewhere': was 'out': needs a restart"),
        ("name: [", "policy.yaml"),
        ("name: orders\nversoin: 2\n", "versoin"),
        (" \x00", "policy.yaml"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, text: str | None, why: str) -> None:
    running = make_policy(tmp_path)
    write_policy(tmp_path, text=text, topics={"output": "elsewhere"})
    found = read_version(running, same)
    assert found.policy is None
    assert why in found.refused
    assert len(found.refused.splitlines()) == 1


def test_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    running = make_policy(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert "policy.yaml" in read_version(running, same).refused


@pytest.mark.parametrize("error", [ConfigError("x", "prefix", "y", "no room"), RuntimeError("no")])
def test_what_the_model_cannot_serve_is_refused(tmp_path: Path, error: Exception) -> None:
    running = make_policy(tmp_path)
    write_policy(tmp_path, version="2")

    def fail(policy: Policy) -> Policy:
        raise error

    assert str(error) in read_version(running, fail).refused


def test_half_of_a_version_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read meets a new policy.yaml beside an old prefix."""
    running = make_policy(tmp_path)
    write_policy(tmp_path, version="2")
    monkeypatch.setattr(
        "processor.runtime.versions.time.sleep",
        lambda _: (tmp_path / "prefix.md").write_text("New.", encoding="utf-8"),
    )
    found = read_version(running, same)
    assert found.compiled is not None
    assert found.compiled.prefix == "New."


def test_a_folder_that_never_rests_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = make_policy(tmp_path)
    write_policy(tmp_path, version="2")
    count = iter(range(99))

    def change(_: float) -> None:
        (tmp_path / "prefix.md").write_text(f"{next(count)}", encoding="utf-8")

    monkeypatch.setattr("processor.runtime.versions.time.sleep", change)
    assert "changes all the time" in read_version(running, same).refused


def test_a_reader_gives_each_result_once(tmp_path: Path) -> None:
    running = make_policy(tmp_path)
    gate = threading.Event()

    def wait(policy: Policy) -> Policy:
        gate.wait(5)
        return policy

    reader = Reader(wait)
    write_policy(tmp_path, version="2")
    reader.begin([running])
    time.sleep(0.02)
    assert (reader.busy, reader.take()) == (True, [])
    gate.set()
    results: list[Found[Policy]] = []

    def taken() -> bool:
        results.extend(reader.take())
        return bool(results)

    await_(taken)
    assert (reader.busy, reader.take(), len(results)) == (False, [], 1)
