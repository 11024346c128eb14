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


#: vllm-omni as it is after 0.30: configs are looked up in vLLM's registry, and builders cannot be registered.
_WITHOUT_BUILDERS = """
import json, logging, os, sys
import vllm_omni
from vllm_omni.quantization import factory
from vllm.model_executor.layers.quantization import get_quantization_config
from omniplat.integrations.vllm_plugin import register_for_omni
stock = {name: get_quantization_config(name) for name in ("modelopt", "fp8", "compressed-tensors")}
del factory.register_quantization_override, factory._OVERRIDES
os.environ["OMNIPLAT_DISPATCH"] = "gaps"
lines = []
handler = logging.Handler(logging.ERROR)
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("vllm.omniplat").addHandler(handler)
before = set(sys.modules)
answer = [register_for_omni() for _ in range(2)]
heavy = [name for name in set(sys.modules) - before if not name.startswith("omniplat")]
changed = [name for name, found in stock.items() if get_quantization_config(name) is not found]
made = get_quantization_config("modelopt").from_config({"quant_method": "modelopt", "quant_algo": "FP8"})
print(json.dumps({
    "answer": answer, "lines": lines, "changed": changed, "heavy": heavy,
    "stock": isinstance(made, stock["modelopt"]), "name": made.get_name(),
}))
"""


def test_where_vllm_omni_takes_no_builders_that_is_said_and_nothing_raised() -> None:
    environment = {**os.environ, "OMNIPLAT_DISPATCH": "off"}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_BUILDERS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["answer"] == [None, None]
    assert report["lines"]
    assert "takes no builders of quantization methods" in report["lines"][0]
    assert "Not active in it: omniplat's methods for diffusion models" in report["lines"][0]
    # What vLLM's own registry allows is done all the same, and for language models it is vLLM's own config.
    assert report["changed"] == ["modelopt"]
    assert report["heavy"] == []
    assert (report["stock"], report["name"]) == (True, "modelopt")
