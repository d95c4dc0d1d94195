"""All interleavings that a model of the loop can draw keep the laws, and each deliberate mistake
in the loop is found by the same model."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.runtime.model import Model, Mutation
from tests.runtime.model_mutants import MUTANTS, no_metadata_guard

# The same examples in every run: a test that fails by chance is no use to who has changed
# something else. The slow test draws new ones.
SETTINGS = settings(
    max_examples=300,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_the_loop_keeps_its_laws() -> None:
    run_state_machine_as_test(Model, settings=settings(SETTINGS, max_examples=150))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_loop_keeps_its_laws_for_long() -> None:
    longer = settings(
        SETTINGS,
        max_examples=1000,  # mutants are found in fewer than 10, with the worst of seeds in 120
        stateful_step_count=50,
        derandomize=False,
        print_blob=True,
    )
    run_state_machine_as_test(Model, settings=longer)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mistake_is_found(mutant: Mutation, capsys: pytest.CaptureFixture[str]) -> None:
    members = {"mutation": staticmethod(mutant), "always_lax": mutant is no_metadata_guard}
    mutated = type("Mutated", (Model,), members)
    once = settings(SETTINGS, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(mutated, settings=once)
    capsys.readouterr()  # the steps that led to it
