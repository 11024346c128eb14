"""Plugins as a stranger installs them: own distributions, seen by a process of its own."""

from __future__ import annotations

import json

import pytest

from omniplat.cli.info import info
from tests.registry.conftest import Ask

LOAD = """
import json
from omniplat.errors import OmniplatError
from omniplat.registry import BACKENDS, default_registry
try:
    found = default_registry().load(BACKENDS, {name!r})
    print(json.dumps({{"name": found.name, "capabilities": len(found.capabilities)}}))
except OmniplatError as error:
    cause = type(error.__cause__).__name__ if error.__cause__ else ""
    print(json.dumps({{**error.to_dict(), "cause": cause}}))
"""
EXAMINE = """
import json
from omniplat.info import backend_reports
print(json.dumps({report.name: [report.state, report.distribution, report.reason] for report in backend_reports()}))
"""
EVERY = (
    "toy",
    "raises",
    "wrong_type",
    "wrong_api",
    "wrong_name",
    "needs_runtime",
    "broken_library",
    "exits",
    "bad_probe",
)


def load(ask: Ask, name: str, *plugins: str) -> dict[str, object]:
    answer = ask(LOAD.format(name=name), *plugins)
    assert isinstance(answer, dict)
    return answer


def test_stranger_is_found_and_loaded(ask: Ask) -> None:
    assert load(ask, "toy", "toy") == {"name": "toy", "capabilities": 1}


def test_unknown_name_lists_what_is_available(ask: Ask) -> None:
    answer = load(ask, "nonesuch", "toy")
    assert answer["error"] == "UsageError"
    assert answer["available"] == ["ascend", "cpu", "cuda", "rocm", "toy", "xpu"]
    assert 'ascend (pip install "omniplat[ascend]")' in str(answer["message"])
    assert "toy (pip install omniplat-toy)" in str(answer["message"])
    assert "\n" not in str(answer["message"])


def test_two_distributions_with_one_name(ask: Ask) -> None:
    answer = load(ask, "toy", "toy", "duplicate")
    assert answer["error"] == "BackendConflictError"
    assert sorted(answer["distributions"]) == ["omniplat-toy 1.2.3", "omniplat-toy-again 0.5"]  # type: ignore[call-overload]


def test_conflict_is_listed_and_imports_neither(ask: Ask) -> None:
    code = """
import json, sys
from omniplat.registry import BACKENDS, default_registry
names = {p.name: sorted(p.distributions) for p in default_registry().plugins(BACKENDS)}
print(json.dumps([names["toy"], sorted(m for m in sys.modules if m.startswith(("omniplat_", "stevedore")))]))
"""
    assert ask(code, "toy", "duplicate") == [["omniplat-toy 1.2.3", "omniplat-toy-again 0.5"], []]


def test_conflict_breaks_no_other(ask: Ask) -> None:
    assert "error" not in load(ask, "cuda", "toy", "duplicate")


@pytest.mark.parametrize(
    ("plugin", "error", "words", "cause"),
    [
        ("raises", "BackendLoadError", "RuntimeError: driver and runtime disagree", "RuntimeError"),
        ("wrong_type", "BackendLoadError", "is dict, not a BackendSpec", ""),
        ("wrong_api", "BackendApiError", "speaks interface version 99; this omniplat speaks 1", ""),
        ("wrong_name", "BackendLoadError", "names itself 'another-name'", ""),
        (
            "needs_runtime",
            "BackendNotInstalledError",
            "needs acme-runtime, which is not installed",
            "ModuleNotFoundError",
        ),
        ("broken_library", "BackendLoadError", "No module named 'acme_hidden_dependency'", "ModuleNotFoundError"),
        ("exits", "BackendLoadError", "SystemExit: no licence", "SystemExit"),
    ],
)
def test_broken(ask: Ask, plugin: str, error: str, words: str, cause: str) -> None:
    answer = load(ask, plugin.replace("_", "-"), plugin)
    assert answer["error"] == error
    assert words in str(answer["message"])
    assert answer["cause"] == cause


def test_missing_requirement_carries_the_install_line(ask: Ask) -> None:
    answer = load(ask, "needs-runtime", "needs_runtime")
    assert answer["install"] == "pip install omniplat-needs-runtime"


def test_broken_ones_are_listed_and_break_no_other(ask: Ask) -> None:
    reports = ask(EXAMINE, *EVERY)
    states = {name: state for name, (state, _, _) in reports.items()}
    assert states["toy"] == "available"
    assert {
        name: states[name] for name in ("raises", "wrong-type", "wrong-name", "broken-library", "exits")
    } == dict.fromkeys(("raises", "wrong-type", "wrong-name", "broken-library", "exits"), "broken")
    assert states["wrong-api"] == "incompatible"
    assert states["needs-runtime"] == "not-installed"
    assert states["bad-probe"] == "unavailable"
    assert "its probe failed: OSError: the device does not answer" in reports["bad-probe"][2]
    assert reports["raises"][1] == "omniplat-raises 1.0"
    for name in ("cuda", "rocm", "xpu", "ascend"):
        assert states[name] in ("available", "unavailable")


def test_loading_one_imports_no_other(ask: Ask) -> None:
    code = """
import json, sys
from omniplat.registry import BACKENDS, default_registry
default_registry().load(BACKENDS, "toy")
print(json.dumps(sorted(m for m in sys.modules if m.startswith("omniplat_") or m == "torch")))
"""
    assert ask(code, "toy", "heavy", "raises") == ["omniplat_toy", "omniplat_toy.spec"]


def test_heavy_import_is_seen(ask: Ask) -> None:
    """The check that the first-party specs pass does catch a spec that imports torch."""
    code = """
import json, sys
from omniplat.registry import BACKENDS, default_registry
default_registry().load(BACKENDS, "heavy")
print(json.dumps("torch" in sys.modules))
"""
    assert ask(code, "heavy") is True


@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu", "ascend", "cpu"])
def test_first_party_spec_is_light(ask: Ask, name: str) -> None:
    code = f"""
import json, sys
from omniplat.registry import BACKENDS, default_registry
default_registry().load(BACKENDS, {name!r})
heavy = ("torch", "torch_npu", "triton", "vllm", "aiter", "humming", "bitsandbytes", "flashinfer", "numpy")
print(json.dumps([module for module in heavy if module in sys.modules]))
"""
    assert ask(code) == []


def test_info_shows_conflict_and_broken(ask: Ask) -> None:
    code = "from omniplat.cli.info import info; raise SystemExit(info(True))"
    report = ask(code, "toy", "duplicate", "raises")
    assert report["schema"] == "omniplat.info/1"
    backends = {backend["name"]: backend for backend in report["backends"]}
    assert backends["toy"]["state"] == "conflict"
    assert "omniplat-toy 1.2.3" in backends["toy"]["reason"]
    assert "omniplat-toy-again 0.5" in backends["toy"]["reason"]
    assert backends["raises"]["state"] == "broken"
    assert backends["cuda"]["distribution"].startswith("omniplat 0.")


def test_info_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert info(False) == 0
    text = capsys.readouterr().out
    for word in ("devices", "backends", "cuda", "omniplat[cuda]", "formats"):
        assert word in text


def test_info_as_json_keeps_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert info(True) == 0
    report = json.loads(capsys.readouterr().out)
    assert sorted(report) == [
        "backends", "default_backend", "default_device", "default_reason", "devices", "formats", "models", "omniplat",
        "platform", "python", "schema", "versions",
    ]  # fmt: skip
