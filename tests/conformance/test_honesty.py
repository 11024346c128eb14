"""Integrity: known failures, skips, foreign fixtures, deselected checks, no device, other runs of pytest."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from omniplat.backend import BackendSpec
from omniplat.capability import ARCHIVED, Capability
from omniplat.conformance.known import KnownFailure, read_known_failures
from omniplat.conformance.matrix import committed_reports, support_rows
from omniplat.conformance.render import render
from omniplat.conformance.report import Outcome, result_of
from omniplat.conformance.subject import Subject
from omniplat.device import Device
from omniplat.errors import UsageError
from omniplat.registry import BACKENDS, default_registry
from tests.conformance.conftest import Runs, environment

MANIFEST = "omniplat.conformance.suite.test_manifest"
ENTRY = '[[failure]]\nid = "{}"\nreason = "the driver"\nlink = "https://example.org/1"\n'


def run_pytest(folder: Path, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pytest", "-p", "omniplat.conformance.plugin", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=folder, env=environment(site))


def suite(folder: Path, site: Path, name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    report = folder / "report.json"
    done = run_pytest(
        folder, site, "--pyargs", MANIFEST, "--omniplat-backend", name, "--omniplat-profile", "quick",
        "--omniplat-report", str(report), *arguments,
    )  # fmt: skip
    assert report.is_file(), done.stdout + done.stderr
    return done.returncode, json.loads(report.read_text())


def test_a_known_failure_is_counted_and_is_no_success(tmp_path: Path, site: Path) -> None:
    (tmp_path / "known.toml").write_text(ENTRY.format("manifest/loading_is_light:*") + ENTRY.format("manifest/pro*"))
    code, report = suite(tmp_path, site, "zoo-heavy", "--omniplat-known-failures", "known.toml")
    assert code == 0
    assert report["counts"]["known"] == 2
    assert report["counts"]["failed"] == 0
    assert report["result"] == "partial"
    assert {item["reason"] for item in report["known"]} == {"the driver (https://example.org/1)"}


@pytest.mark.parametrize(
    ("identity", "says"), [("manifest/names_are_unique:*", "passes"), ("manifest/nonesuch:*", "nonesuch")]
)
def test_a_known_failure_that_passes_or_matches_nothing_fails(
    tmp_path: Path, site: Path, identity: str, says: str
) -> None:
    (tmp_path / "known.toml").write_text(ENTRY.format(identity))
    code, report = suite(tmp_path, site, "zoo-correct", "--omniplat-known-failures", "known.toml")
    assert code == 1
    assert report["result"] == "failure"
    messages = [item["reason"] for item in report["failed"]] + [item["message"] for item in report["problems"]]
    assert any(says in message for message in messages)


@pytest.mark.parametrize(
    "text",
    [
        "not toml",
        "[[failures]]\nid = 'a'",
        "[[failure]]\nid = 'a'\nreason = 'r'",
        "[[failure]]\nid = 'a'\nreason = ''\nlink = 'l'",
        "[[failure]]\nid = '*'\nreason = 'r'\nlink = 'l'",
        ENTRY.format("a") + ENTRY.format("a"),
    ],
)
def test_a_file_of_known_failures_is_read_strictly(tmp_path: Path, text: str) -> None:
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(UsageError, match=r"known\.toml"):
        read_known_failures(tmp_path / "known.toml")


def test_ids_end_in_a_star_or_are_whole() -> None:
    assert KnownFailure("a/b:*", "r", "l").matches("a/b:c")
    assert not KnownFailure("a/b", "r", "l").matches("a/b:c")


def test_a_deselected_check_leaves_the_run_partial(tmp_path: Path, site: Path) -> None:
    code, report = suite(tmp_path, site, "zoo-correct", "-k", "unique")
    assert (code, report["result"]) == (0, "partial")
    assert report["counts"]["passed"] == 1
    assert report["counts"]["left_out"] > 100


def test_a_foreign_fixture_fails_the_run(tmp_path: Path, site: Path) -> None:
    hook = "import pytest\n@pytest.fixture(autouse=True)\ndef shim():\n    yield\n"
    (tmp_path / "shim.py").write_text(hook)
    code, report = suite(tmp_path, site, "zoo-correct", "-p", "shim", "-o", "pythonpath=.")
    assert code == 1
    assert report["problems"][0]["code"] == "foreign-fixture"
    assert "shim" in report["plugins"]


def test_a_skip_from_outside_leaves_the_run_partial(tmp_path: Path, site: Path) -> None:
    hook = "import pytest\ndef pytest_runtest_setup(item):\n    pytest.skip('not today')\n"
    (tmp_path / "shim.py").write_text(hook)
    _, report = suite(tmp_path, site, "zoo-correct", "-p", "shim", "-o", "pythonpath=.")
    assert report["result"] == "partial"
    assert {item["reason"] for item in report["skipped"]} == {"skipped from outside the suite: not today"}


def test_without_a_device_the_run_is_partial(tmp_path: Path, site: Path) -> None:
    code, report = suite(tmp_path, site, "ascend")
    assert report["device"]["present"] is False
    assert (code, report["result"]) == (0, "partial")
    assert all("no device" in item["reason"] and item["leaves_partial"] for item in report["skipped"])
    assert {item["evidence"] for item in report["capabilities"]} == {"declared"}


def test_an_emulated_device_is_evidence_of_its_own_kind(tmp_path: Path, site: Path) -> None:
    """Kernels run on the CPU without the vendor's distribution, and the run is no success: no device was here."""
    report = tmp_path / "report.json"
    groups = [f"omniplat.conformance.suite.test_{name}" for name in ("manifest", "contract")]
    done = run_pytest(
        tmp_path, site, "--pyargs", *groups, "--omniplat-backend", "zoo-emulated", "--omniplat-profile", "quick",
        "--omniplat-report", str(report),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = json.loads(report.read_text())
    device = found["device"]
    assert (device["kind"], device["arch"], device["emulated"], device["present"]) == ("npu", "a5", True, False)
    assert (found["result"], found["counts"]["failed"], found["skipped"]) == ("partial", 0, [])
    assert {item["evidence"] for item in found["capabilities"]} == {"emulated"}
    assert "PARTIAL: zoo-emulated on npu:a5 (emulated)" in done.stdout
    spec = replace(default_registry().load(BACKENDS, "cpu"), name="zoo-emulated")
    entry = {**found["capabilities"][0], "name": spec.capabilities[0].name, "executes": spec.capabilities[0].executes}
    keys = ("weights", "activations", "scale_rules", "roundings")
    entry |= {key: list(getattr(spec.capabilities[0], key)) for key in keys}
    (first, *others) = support_rows([spec], [{**found, "profile": "full", "capabilities": [entry]}])
    assert first.evidence == "emulated"
    assert {row.evidence for row in others} == {"declared"}


@pytest.mark.parametrize("left_out", [0, 1])
def test_an_emulated_run_is_never_a_success(left_out: int) -> None:
    passed = Outcome("a", "numerics", "c", "passed")
    assert result_of([passed], (), left_out, emulated=True) == "partial"
    assert result_of([Outcome("a", "numerics", "c", "failed")], (), left_out, emulated=True) == "failure"


def test_an_unknown_backend_and_no_backend_are_usage_errors(tmp_path: Path, site: Path) -> None:
    done = run_pytest(tmp_path, site, "--pyargs", MANIFEST, "--omniplat-backend", "nonesuch")
    assert done.returncode == 4
    assert "nonesuch" in done.stderr
    done = run_pytest(tmp_path, site, "--pyargs", MANIFEST)
    assert done.returncode != 0
    assert "--omniplat-backend" in done.stdout + done.stderr


def test_other_runs_are_not_touched(tmp_path: Path, site: Path) -> None:
    """Beside somebody's own tests the plugin imports nothing and reports nothing."""
    code = (
        "import sys\n"
        "def test_light(subject=None, case=None):\n"
        "    held = [m for m in sys.modules if m.startswith(('torch', 'numpy', 'omniplat.'))]\n"
        "    assert sorted(held) == ['omniplat._version', 'omniplat.conformance', 'omniplat.conformance.plugin']\n"
    )
    (tmp_path / "test_own.py").write_text(code)
    done = run_pytest(tmp_path, site, "-q", "test_own.py")
    assert done.returncode == 0, done.stdout
    assert "conformance" not in done.stdout


def test_rendering(runs: Runs) -> None:
    report = runs.reports["zoo-per-tensor"]
    assert "FAILURE: zoo-per-tensor on cpu:" in render(report, "text")
    assert "| `int8` | linear |" in render(report, "markdown")
    assert report["failed"]
    for form in ("text", "markdown"):
        assert all(f"failed {item['id']}: " in " ".join(render(report, form).split()) for item in report["failed"][:20])
    many = render({**report, "failed": report["failed"][:1] * 23}, "text")
    assert many.count(report["failed"][0]["id"]) == 20
    assert "and 3 more" in many
    tree = ElementTree.fromstring(render(report, "junit").encode())
    failures = {item.get("name"): int(item.get("failures", "0")) for item in tree}
    assert failures["numerics"] == report["groups"]["numerics"]["failed"] == len(tree.findall(".//failure"))


def test_reports_follow_their_schema(runs: Runs) -> None:
    import jsonschema

    from omniplat.conformance.report import report_schema

    for report in (*runs.reports.values(), *committed_reports()):
        jsonschema.validate(report, report_schema())


def test_committed_reports_verify_only_what_ran_there() -> None:
    for report in committed_reports():
        for entry in report["capabilities"]:
            if entry["evidence"].startswith("verified"):
                assert entry["obstacle"] == ""
                assert not entry["archs"] or report["device"]["arch"] in entry["archs"]


def test_committed_reports_prove_what_is_declared() -> None:
    """The cpu backend's report is a success without a skip, and speaks of the capabilities as they are now."""
    reports = committed_reports()
    (own,) = [item for item in reports if item["backend"]["name"] == "cpu"]
    assert own["result"] == "success"
    assert own["skipped"] == []
    rows = support_rows([default_registry().load(BACKENDS, "cpu")], reports)
    assert all(row.evidence.startswith("verified on cpu:") for row in rows)


@pytest.mark.parametrize("backend", ["ascend", "rocm", "xpu"])
def test_an_emulated_row_names_the_architectures_that_ran(backend: str) -> None:
    """And no other that the capability is declared for: `xpu` has kernels for lnl that no report has run as lnl."""
    reports = committed_reports()
    ran = {item["device"]["arch"] for item in reports if item["backend"]["name"] == backend}
    rows = [row for row in support_rows([default_registry().load(BACKENDS, backend)], reports) if row.emulated_archs]
    assert rows
    for row in rows:
        declared = set(row.archs or ran)
        assert set(row.emulated_archs) == declared & ran, row.capability.name
        assert row.shown.startswith(f"emulated as {', '.join(row.emulated_archs)}")


def test_a_report_of_another_declaration_proves_nothing(runs: Runs) -> None:
    spec = default_registry().load(BACKENDS, "cpu")
    changed = replace(spec, capabilities=tuple(replace(c, weights=(*c.weights, "x")) for c in spec.capabilities))
    assert {row.evidence for row in support_rows([changed], committed_reports())} == {"declared"}


@pytest.mark.parametrize(("maturity", "is_gap"), [("stable", True), ("experimental", True), (ARCHIVED, False)])
def test_only_what_is_archived_may_lack_a_kernel(maturity: str, is_gap: bool) -> None:
    capability = Capability("nothing", "linear", ("int4-g128",), ("a16",), maturity=maturity)
    spec = BackendSpec("zoo", 1, ("cpu",), (capability,))
    obstacle = Subject(spec, Device("cpu", "avx2")).obstacle(capability)
    assert obstacle is not None
    assert obstacle.is_gap == is_gap
