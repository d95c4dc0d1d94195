"""Two versions of one policy in one pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from processor.core.decision import Decision
from processor.core.pipeline import Pipeline, Prepared
from processor.errors import ConfigError
from tests.core.builders import TIMINGS, CharTokenizer, LengthScorer, make_policy, published, record


def test_versions_have_different_keys(tmp_path: Path) -> None:
    versions = [make_policy(tmp_path / str(n), version=str(n)) for n in range(3)]
    assert len({version.key for version in versions}) == 3
    assert all(version.key.startswith("orders@") for version in versions)
    assert make_policy(tmp_path / "again", version="1").key == versions[1].key


def test_what_was_prepared_before_keeps_its_version(tmp_path: Path) -> None:
    old = make_policy(tmp_path / "old")
    new = make_policy(tmp_path / "new", version="2", labels=["no", "yes", "hold"])
    pipeline = Pipeline([old], CharTokenizer(), LengthScorer())
    before, poison = pipeline.prepare(record()), pipeline.prepare(record(None))
    pipeline.swap(new)
    after = pipeline.prepare(record(offset=1))
    assert isinstance(before, Prepared)
    assert isinstance(after, Prepared)
    assert [item.suffix.policy for item in (before, after)] == [old.key, new.key]
    found = [
        pipeline.finish(item, scores, TIMINGS)
        for item, scores in zip((before, after), pipeline.score([before, after]), strict=True)
    ]
    assert [o.policy.version for o in found] == ["1", "2"]
    assert [o.policy.fingerprint for o in found] == [old.fingerprint, new.fingerprint]
    assert [o.label for o in found if isinstance(o, Decision)] == ["allow", "no"]
    assert not isinstance(poison, Prepared)
    assert poison.policy.version == "1"
    assert [published(o, record()).topic for o in (*found, poison)] == ["out", "out", "dead"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "refunds"}, "name = 'refunds': was 'orders': needs a restart"),
        ({"topics": {"input": "in2"}}, r"topics\.input = 'in2': is not read"),
        ({"topics": {"output": "o2"}}, r"topics\.output = 'o2': was 'out': needs a restart"),
        ({"topics": {"dead_letter": "d2"}}, r"topics\.dead_letter = 'd2': was 'dead'"),
        ({"tenant": "acme"}, "tenant = 'acme': was None"),
        ({"share_prefix": True}, "share_prefix = True: was False"),
    ],
)
def test_what_only_a_start_can_change(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    old, other = (make_policy(tmp_path / name) for name in ("old", "other"))
    new = make_policy(tmp_path / "new", **changes)
    pipeline = Pipeline([old], CharTokenizer(), LengthScorer())
    with pytest.raises(ConfigError, match=message):
        pipeline.swap(new)
    assert pipeline.policies == {"in": old}
    pipeline.swap(other)
    assert pipeline.policies == {"in": other}
