"""Every checkpoint of the folder that OMNIPLAT_CORPUS names, as far as its dialect is read."""

from __future__ import annotations

import os

import pytest

from tests.goldens.check import check, plan_of, wrong_schemes
from tests.goldens.entries import VARIABLE, Entry, corpus
from tests.goldens.moe import check_layers, check_quantized_activations, has_experts

pytestmark = pytest.mark.corpus

ENTRIES = corpus()
WITH_EXPERTS = [entry for entry in ENTRIES if has_experts(entry)]


def test_the_folder_holds_checkpoints() -> None:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} is not set: no checkpoint of the corpus is tried")
    assert ENTRIES


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_schemes_are_what_the_producer_reports(entry: Entry) -> None:
    planned = plan_of(entry)
    assert wrong_schemes(planned, dict(entry.weights)) == []
    assert [item for item in planned.plan.findings if item.severity == "error"] == []


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_values_are_the_producers(entry: Entry) -> None:
    assert check(entry).modules > 0


@pytest.mark.parametrize("entry", WITH_EXPERTS, ids=lambda entry: entry.name)
def test_layers_of_experts_compute_what_the_producers_weights_say(entry: Entry) -> None:
    check_layers(entry)
    check_quantized_activations(entry)
