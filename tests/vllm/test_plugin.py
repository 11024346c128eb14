"""The entry points, as the engines call them: in a process that has loaded an engine and nothing of omniplat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

#: Entry points by group, and what a process has loaded by the time that the engine calls them. vllm-omni calls its own
#: while it is imported, when it has loaded a part of that; it loads the rest in the same breath.
HOOKS = {
    "vllm.general_plugins": "import vllm.plugins, vllm.engine.arg_utils, vllm.model_executor.layers.quantization",
    "vllm_omni.platform_plugins": "import vllm_omni",
}
#: Seconds of the processor that a hook may take.
BOUND = 0.030
_REPORT = """
import json, os, sys, time
from importlib.metadata import entry_points
os.environ["OMNIPLAT_DISPATCH"] = "off"
{engine}
os.environ["OMNIPLAT_DISPATCH"] = "{mode}"
for name in [name for name in sys.modules if name.partition(".")[0] == "omniplat"]:
    del sys.modules[name]
before = set(sys.modules)
start = time.process_time()
for _ in range(2):
    for entry in entry_points(group="{group}"):
        if entry.name == "omniplat":
            entry.load()()
spent = time.process_time() - start
new = sorted(set(sys.modules) - before)
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
factory = sys.modules.get("vllm_omni.quantization.factory")
builders = [] if factory is None else [name for name, item in factory._OVERRIDES.items() if "omniplat" in repr(item)]
count = QUANTIZATION_METHODS.count("omniplat")
print(json.dumps({{"seconds": spent, "new": new, "count": count, "builders": sorted(builders)}}))
"""
#: What decides in engines which code runs, and where something could be left behind.
_REGISTRIES = """
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
import torch, vllm_omni
from vllm.model_executor import custom_op
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers import linear, quantization
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm_omni.platforms import current_omni_platform
from vllm_omni.quantization import factory
tables = {name: {str(key): [item.__name__ for item in row] for key, row in table.items()}
          for name, table in vars(kernels).items() if name.startswith("_POSSIBLE") and isinstance(table, dict)}
print(json.dumps({
    "methods": quantization.QUANTIZATION_METHODS,
    "configs": {name: repr(item) for name, item in quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.items()},
    "builders": {name: getattr(item, "__qualname__", repr(item)) for name, item in factory._OVERRIDES.items()},
    "supported": sorted(factory.SUPPORTED_QUANTIZATION_METHODS),
    "kernels": tables,
    "replaced": sorted(custom_op.op_registry_oot),
    "loaders": sorted(linear.WEIGHT_LOADER_V2_SUPPORTED),
    "models": sorted(ModelRegistry.get_supported_archs()),
    "platforms": [type(current_platform).__qualname__, type(current_omni_platform).__qualname__],
    "operators": sorted(name for name in torch._C._dispatch_get_all_op_names() if not name.startswith("aten")),
    "modules": sorted(name for name in sys.modules if name.partition(".")[0] == "omniplat"),
}, sort_keys=True))
"""
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


def run(script: str, mode: str | None, *, installed: bool = True) -> dict[str, Any]:
    """What a script prints in a process of its own; not `installed` is one without omniplat's entry points and code."""
    environment = {key: value for key, value in os.environ.items() if key != "OMNIPLAT_DISPATCH"}
    if mode is not None:
        environment["OMNIPLAT_DISPATCH"] = mode
    if not installed:
        del environment["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def registered(group: str, mode: str) -> dict[str, Any]:
    return run(_REPORT.format(engine=HOOKS[group], group=group, mode=mode), None)


@pytest.mark.parametrize("group", HOOKS)
def test_registering_is_quick_and_happens_once(group: str) -> None:
    report = registered(group, "gaps")
    if group == "vllm.general_plugins":
        assert report["count"] == 1
    else:
        assert {"omniplat", "mxfp4", "inc", "auto_round"} <= set(report["builders"])
    # Both calls together, with the search for the entry point; the engine has loaded the rest. Time of the processor:
    # other processes may be busy.
    assert report["seconds"] < BOUND, report
    assert [name for name in report["new"] if not name.startswith("omniplat")] == []


@pytest.mark.parametrize("group", HOOKS)
def test_off_registers_nothing(group: str) -> None:
    report = registered(group, "off")
    assert report["count"] == 0
    assert report["builders"] == []
    assert set(report["new"]) <= {
        "omniplat", "omniplat._version", "omniplat.errors", "omniplat.integrations", "omniplat.integrations.dispatch",
        "omniplat.integrations.vllm_plugin",
    }  # fmt: skip


def test_off_leaves_engines_as_they_are_without_omniplat() -> None:
    off, without = run(_REGISTRIES, "off"), run(_REGISTRIES, None, installed=False)
    loaded = off.pop("modules")
    assert loaded
    assert without.pop("modules") == []
    assert "fp8" in off["methods"]
    assert off["kernels"]
    assert off == without


def test_unknown_modes_are_errors() -> None:
    with pytest.raises(AssertionError, match="OMNIPLAT_DISPATCH='some' is none of gaps, all, off"):
        registered("vllm.general_plugins", "some")


def test_where_vllm_omni_takes_no_builders_that_is_said_and_nothing_raised() -> None:
    report = run(_WITHOUT_BUILDERS, "off")
    assert report["answer"] == [None, None]
    assert report["lines"]
    assert "takes no builders of quantization methods" in report["lines"][0]
    assert "Not active in it: omniplat's methods for diffusion models" in report["lines"][0]
    # What vLLM's own registry allows is done all the same, and for language models it is vLLM's own config.
    assert report["changed"] == ["modelopt"]
    assert report["heavy"] == []
    assert (report["stock"], report["name"]) == (True, "modelopt")


#: What a hook prints that fails in the way that `broken` makes it, and the platform that vllm-omni has then.
_FAILING = """
import json, logging, os
lines = []
handler = logging.Handler(logging.ERROR)
handler.emit = lambda record: lines.append([record.getMessage(), str(record.exc_info and record.exc_info[1])])
import vllm
logging.getLogger("vllm.omniplat").addHandler(handler)
{broken}
import vllm_omni
from vllm_omni.platforms import current_omni_platform
from vllm_omni.quantization import factory
builders = [name for name, item in factory._OVERRIDES.items() if "omniplat" in repr(item)]
print(json.dumps({{"lines": lines, "platform": type(current_omni_platform).__name__, "builders": builders}}))
"""


def test_what_fails_while_registering_in_vllm_omni_is_logged() -> None:
    """vllm-omni itself says nothing of it, and goes on."""
    report = run(_FAILING.format(broken='os.environ["OMNIPLAT_DISPATCH"] = "some"'), None)
    ((line, error),) = {tuple(entry) for entry in report["lines"] if "registered" in entry[0]}
    assert line == "omniplat is not registered in vllm-omni"
    assert error == "OMNIPLAT_DISPATCH='some' is none of gaps, all, off"
    assert report["builders"] == []


def test_what_fails_in_the_platform_for_cpus_is_logged() -> None:
    broken = """
os.environ["OMNIPLAT_VLLM_OMNI_CPU"] = "1"
import torch
def is_available():
    raise RuntimeError("no driver")
torch.accelerator.is_available = is_available
"""
    report = run(_FAILING.format(broken=broken), None)
    assert set(map(tuple, report["lines"])) == {
        ("omniplat's platform for CPUs is not active in vllm-omni", "no driver")
    }
    assert report["platform"] == "UnspecifiedOmniPlatform"
