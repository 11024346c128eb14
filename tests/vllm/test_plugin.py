"""The entry points, as vLLM calls them: in a process that has loaded vLLM and nothing of omniplat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

#: What a process has loaded by the time that vLLM calls its plugins.
_ENGINE = "import vllm.plugins, vllm.engine.arg_utils, vllm.model_executor.layers.quantization as methods"
_REPORT = """
import json, sys, time
from importlib.metadata import entry_points
before = set(sys.modules)
start = time.process_time()
for _ in range(2):
    for entry in entry_points(group="vllm.general_plugins"):
        if entry.name == "omniplat":
            entry.load()()
spent = time.process_time() - start
new = sorted(set(sys.modules) - before)
print(json.dumps({"seconds": spent, "new": new, "count": methods.QUANTIZATION_METHODS.count("omniplat")}))
"""


def registered(mode: str | None) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "OMNIPLAT_DISPATCH"}
    if mode is not None:
        environment["OMNIPLAT_DISPATCH"] = mode
    done = subprocess.run(
        [sys.executable, "-c", _ENGINE + _REPORT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_registering_is_quick_and_happens_once() -> None:
    report = registered(None)
    assert report["count"] == 1
    # Both calls together, with the search for the entry point; the engine has loaded the rest. Time of the processor:
    # other processes may be busy.
    assert report["seconds"] < 0.030, report
    assert [name for name in report["new"] if not name.startswith("omniplat")] == []


def test_off_registers_nothing() -> None:
    report = registered("off")
    assert report["count"] == 0
    assert set(report["new"]) <= {
        "omniplat", "omniplat._version", "omniplat.errors", "omniplat.integrations", "omniplat.integrations.dispatch",
        "omniplat.integrations.vllm_plugin",
    }  # fmt: skip


def test_unknown_modes_are_errors() -> None:
    with pytest.raises(AssertionError, match="OMNIPLAT_DISPATCH='some' is none of gaps, all, off"):
        registered("some")
