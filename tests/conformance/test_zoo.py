"""The suite tested: correct backends pass all of it, and every fault of the zoo fails in the group named for it."""

from __future__ import annotations

import pytest

from tests.conformance.conftest import CORRECT, FAULTS, Runs
from tests.plugins.install import HERE, read_pyproject


def test_every_animal_is_tested() -> None:
    names = read_pyproject(HERE / "zoo")["project"]["entry-points"]["omniplat.backends"]
    assert set(names) == {*FAULTS, "zoo-correct", "zoo-emulated"}


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_backend_passes_everything(runs: Runs, name: str) -> None:
    report = runs.reports[name]
    assert (report["failed"], report["problems"]) == ([], [])
    assert report["result"] == "success"
    assert report["counts"]["skipped"] == report["counts"]["left_out"] == 0
    assert runs.codes[name] == 0
    evidence = {item["evidence"].partition(" on ")[0] for item in report["capabilities"]}
    assert evidence == {"verified"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_in_its_group(runs: Runs, name: str) -> None:
    report = runs.reports[name]
    assert report["result"] == "failure"
    assert {item["group"] for item in report["failed"]} == {FAULTS[name]}
    assert runs.codes[name] == 1
    assert all(item["reason"] for item in report["failed"])


def failing(runs: Runs, name: str) -> set[str]:
    """The checks that a backend failed, without their cases."""
    return {item["id"].partition("/")[2].partition(":")[0] for item in runs.reports[name]["failed"]}


def test_generated_code_shows_what_tracing_does_not(runs: Runs) -> None:
    assert failing(runs, "zoo-column-major") == {"opcheck", "generated_code"}


def test_what_lies_beyond_the_usual_layer_of_experts_is_asked(runs: Runs) -> None:
    assert failing(runs, "zoo-silu-only") == failing(runs, "zoo-no-limit") == {"activations_of_experts"}
    assert failing(runs, "zoo-two-choices") == {"any_number_of_choices"}
    assert failing(runs, "zoo-one-scheme") == {"experts_of_two_schemes"}


def test_what_the_tiers_say(runs: Runs) -> None:
    """Each fault of numbers is found by the tier that is there for it."""
    assert {"exact", "bound"} <= failing(runs, "zoo-nibbles")
    assert "bound" in failing(runs, "zoo-scale-row")
    assert {"noise", "range_of_rows"} <= failing(runs, "zoo-bf16-fallback")
    assert "range_of_rows" in failing(runs, "zoo-per-tensor")
    assert failing(runs, "zoo-own-rule") == {"rules_for_activations", "ties_of_activations"}
    assert failing(runs, "zoo-ties-away") == {"ties_of_activations"}
    assert "one_rounding" in failing(runs, "zoo-rounds-twice")
    assert failing(runs, "zoo-bf16-input") == {"bound"}
    assert {"exact_of_experts", "bound_of_experts"} <= failing(runs, "zoo-routing-weights")
