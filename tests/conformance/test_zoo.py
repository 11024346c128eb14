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


def test_what_the_tiers_say(runs: Runs) -> None:
    """Each fault of numbers is found by the tier that is there for it."""

    def tiers(name: str) -> set[str]:
        return {item["id"].partition("/")[2].partition(":")[0] for item in runs.reports[name]["failed"]}

    assert {"exact", "bound"} <= tiers("zoo-nibbles")
    assert "bound" in tiers("zoo-scale-row")
    assert {"noise", "range_of_rows"} <= tiers("zoo-bf16-fallback")
    assert "range_of_rows" in tiers("zoo-per-tensor")
    assert tiers("zoo-own-rule") == {"rules_for_activations"}
    assert {"exact_of_experts", "bound_of_experts"} <= tiers("zoo-routing-weights")
