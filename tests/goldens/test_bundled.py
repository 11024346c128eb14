"""The checkpoints of this repository: their schemes, and every value that their producers computed."""

from __future__ import annotations

import pytest

from tests.goldens.check import check, plan_of, wrong_schemes
from tests.goldens.entries import Entry, bundled

ENTRIES = bundled()


def test_there_are_entries() -> None:
    assert len(ENTRIES) >= 12


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_schemes_are_what_the_producer_reports(entry: Entry) -> None:
    planned = plan_of(entry)
    assert wrong_schemes(planned, dict(entry.weights)) == []
    assert [item for item in planned.plan.findings if item.severity == "error"] == []


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_values_are_the_producers(entry: Entry) -> None:
    result = check(entry)
    assert result.modules > 0
