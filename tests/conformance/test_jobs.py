"""Checks shared by several processes: the report is that of one process, and what happens to a process is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omniplat.cli import conformance
from omniplat.errors import BackendNotInstalledError
from omniplat.registry import is_installed
from tests.conformance.conftest import FAULTS, Runs
from tests.conformance.test_command import command
from tests.conformance.test_honesty import ENTRY, suite

#: Faults of two groups; the first fails several checks.
SHARED = ("zoo-bf16-fallback", "zoo-expert-order")


def without_run(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what belongs to the run itself, and of reasons the first line: in which process pytest imported
    the suite decides whether it explains an assertion."""
    kept = {key: value for key, value in report.items() if key not in ("plugins", "date", "seconds")}
    return kept | {"failed": [{**item, "reason": item["reason"].partition("\n")[0]} for item in report["failed"]]}


@pytest.mark.parametrize("name", SHARED)
def test_the_report_is_that_of_one_process(tmp_path: Path, site: Path, runs: Runs, name: str) -> None:
    """Every count, and every failed check in the same place with the same reason."""
    shared = ("--profile", "quick", "-k", f"test_{FAULTS[name]}", "--jobs", "2", "--report", "r.json")
    done = command(tmp_path, site, name, *shared)
    report = json.loads((tmp_path / "r.json").read_text())
    assert (done.returncode, report["result"], report["plugins"]) == (1, "failure", ["xdist"])
    assert {item["group"] for item in report["failed"]} == {FAULTS[name]}
    assert without_run(report) == without_run(runs.reports[name])


def test_other_processes_look_for_no_device_and_tell_what_happens(tmp_path: Path, site: Path) -> None:
    """A check that ends its process has failed, as known where that is known, and others go on in another; what all
    processes find is told once. Many that asked a vendor's tool for the device at once might get no answer."""
    ends = ("names_are_unique", "probing_is_light")
    hook = f"""
import os, pytest
from omniplat.conformance import session
def find_subject(*arguments, **options):
    raise SystemExit("a worker looks for the device")
if "PYTEST_XDIST_WORKER" in os.environ:
    session.find_subject = find_subject
def pytest_runtest_call(item):
    if any(name in item.nodeid for name in {ends}):
        os._exit(7)
@pytest.fixture(autouse=True)
def shim():
    yield
"""
    (tmp_path / "shim.py").write_text(hook)
    (tmp_path / "known.toml").write_text(ENTRY.format(f"manifest/{ends[1]}:*"))
    more = ("-p", "shim", "-o", "pythonpath=.", "--omniplat-known-failures", "known.toml")
    code, report = suite(tmp_path, site, "zoo-correct", *more, "-p", "xdist.plugin", "-n", "2")
    assert (code, report["result"]) == (1, "failure")
    assert [(item["id"], item["reason"]) for item in report["failed"]] == [
        (f"manifest/{ends[0]}:zoo-correct", "the process running it ended")
    ]
    assert [(item["id"], item["reason"]) for item in report["known"]] == [
        (f"manifest/{ends[1]}:zoo-correct", "the driver (https://example.org/1)")
    ]
    counts = report["groups"]["manifest"]
    assert counts == {"passed": counts["passed"], "failed": 1, "skipped": 0, "known": 1}
    assert counts["passed"] > 10, "others do not go on"
    assert [item["code"] for item in report["problems"]] == ["foreign-fixture"]


def test_a_missing_library_is_named(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "is_installed", lambda name: name != "pytest-xdist" and is_installed(name))
    options: dict[str, Any] = {"profile": "quick", "report": None, "known_failures": None, "commit": ""}
    options |= {"render_as": None, "allow_partial": False, "select": "unique", "emulated": None, "json_output": True}
    with pytest.raises(BackendNotInstalledError, match="needs pytest-xdist, which is not installed; run: pip install"):
        conformance.conformance_command("cpu", jobs=2, **options)
    assert command(tmp_path, site, "zoo-correct", "--jobs", "0").returncode == 2
