"""A minute of the soak; `make soak` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kafka.node import Unavailable
from tests.kafka.soak import KINDS, WORKERS, is_clean, plan, soak

EVENTS, SECONDS = 13_500, 60.0


@pytest.mark.kafka
@pytest.mark.timeout(400)
def test_a_minute_of_random_faults(tmp_path: Path) -> None:
    try:
        found = soak(seed=7, events=EVENTS, seconds=SECONDS, keep=tmp_path)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert is_clean(found), found
    assert found["decided"] + found["rejected"] == found["input"] == EVENTS
    assert min(found["kills_of_each"]) >= 3


def test_a_seed_is_a_plan() -> None:
    faults = plan(3, 1200, 22)
    assert faults == plan(3, 1200, 22) != plan(4, 1200, 22)
    assert {fault.kind for fault in faults} == set(KINDS)
    for worker in range(WORKERS):
        assert sum(f.kind == "kill" and f.target == worker for f in faults) >= 3
