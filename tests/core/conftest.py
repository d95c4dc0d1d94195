"""Fixtures of the core's tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

from processor.core.policy import Policy
from tests.core.builders import make_policy

# A shared machine must not fail a property for being slow.
settings.register_profile("core", deadline=None)
settings.load_profile("core")


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(tmp_path_factory.mktemp("policy"))
