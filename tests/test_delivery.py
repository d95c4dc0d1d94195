"""The page on delivery lists a test for each row of public failures, and these tests exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| ([ABCD]\d+) \|.*\| (U|K|U K) \|$", re.MULTILINE)
TEST = re.compile(r"def test_([abcd]\d+)_")


def rows_of(file: Path) -> set[str]:
    return {row.upper() for row in TEST.findall(file.read_text(encoding="utf-8"))}


def test_each_row_has_its_tests_at_the_levels_that_are_said() -> None:
    found: dict[str, set[str]] = {}
    for file in (ROOT / "tests").rglob("*.py"):
        level = "K" if file.parent.name == "kafka" else "U"
        for row in rows_of(file):
            found.setdefault(row, set()).add(level)
    said = {
        row: set(levels.split())
        for row, levels in ROW.findall((ROOT / "docs/delivery.md").read_text(encoding="utf-8"))
    }
    assert said == found
