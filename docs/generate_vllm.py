"""Write docs/vllm-support.md: what vLLM and vllm-omni do by themselves against what they do with omniplat.

Runs where both are installed (tests/vllm/environment.sh): python docs/generate_vllm.py [--check]
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "vllm-support.md"

#: Platforms of vllm-omni and the devices that stand for them.
PLATFORMS = {"cuda": "cuda:sm90", "rocm": "rocm:gfx950", "xpu": "xpu:bmg", "npu": "npu:a5", "cpu": "cpu:avx2"}
#: What vllm-omni makes of methods that it has a config of its own for: module and class of these.
STOCK = {
    "int8": ("int8_config", "DiffusionInt8Config"),
    "mxfp8": ("mxfp8_config", "DiffusionMXFP8Config"),
    "mxfp4": ("mxfp4_config", "DiffusionMXFP4Config"),
    "mxfp4_dualscale": ("mxfp4_config", "DiffusionMXFP4DualScaleMixedConfig"),
    "bitsandbytes": ("bitsandbytes_config", "DiffusionBitsAndBytesConfig"),
}
#: Online methods that vllm-omni has, and that look at the device itself when they are made.
ASK_THE_DEVICE = {("mxfp8", "xpu"): "VllmMxfp8OnlineLinearMethod", ("mxfp4", "rocm"): "for gfx950"}


def stock_cell(method: str, platform: str) -> str:
    """What vllm-omni's own config answers for a linear layer on a platform: a method's name or an error's."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    if (method, platform) in ASK_THE_DEVICE:
        return f"{ASK_THE_DEVICE[method, platform]} (read, not run)"
    if method not in STOCK:
        return registered_cell(method)
    name, kind = STOCK[method]
    module = importlib.import_module(f"vllm_omni.quantization.{name}")
    kinds = ("cuda", "rocm", "xpu", "npu", "musa")
    answers: dict[str, Any] = {f"is_{kind}": lambda kind=kind: kind == platform for kind in kinds}
    seen = SimpleNamespace(**answers, get_device_capability=lambda *_: None, device_name=platform)
    layer = ReplicatedLinear.__new__(ReplicatedLinear)
    with mock.patch.object(module, "current_omni_platform", seen):
        try:
            return type(getattr(module, kind)().get_quant_method(layer, "blocks.7.attn1.to_q")).__name__
        except Exception as error:
            return type(error).__name__


def registered_cell(method: str) -> str:
    """The same of a method that vllm-omni looks up in vLLM's registry, whose configs ask for no platform."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    from omniplat.integrations.vllm_probe import ModelSurface

    if method not in QUANTIZATION_METHODS:
        return "no such method"
    layer = ReplicatedLinear.__new__(ReplicatedLinear)
    current = VllmConfig(device_config=DeviceConfig("cpu"))
    current.model_config = ModelSurface()
    with set_current_vllm_config(current):
        made = get_quantization_config(method)().get_quant_method(layer, "blocks.7.attn1.to_q")
    return f"{type(made).__name__} (vLLM's)"


def own_cell(method: str, device: str) -> str:
    """What omniplat plans for the same layer, whose inputs and outputs are those of a large model."""
    from omniplat.api import make_target
    from omniplat.document import PlanCheckpoint
    from omniplat.formats.resolved import DecidedBy, ResolvedModule
    from omniplat.formats.storage import Storage
    from omniplat.layer import LayerSpec
    from omniplat.online import parse_method
    from omniplat.packed import PackedLayer, Part
    from omniplat.planner import plan_layers
    from omniplat.scheme import Scheme

    parsed = parse_method(method)
    scheme = Scheme(parsed.weight, parsed.activation)
    rows = columns = 5120
    decided = DecidedBy("", method)
    module = ResolvedModule("layer", "", scheme, scheme, Storage("plain", ""), rows, columns, {}, decided, "ok")
    layer = PackedLayer(LayerSpec("layer", "linear", rows, columns, scheme, parts=(rows,)), (Part(module),))
    planned = plan_layers(PlanCheckpoint("", (), ("",)), [layer], make_target(device))
    found = planned.layers[0]
    if found.capability is None:
        return "no kernel"
    runs = "" if found.capability.impl else " (planned only)"
    return f"`{found.layer.backend}/{found.layer.kernel}`{runs}"


def methods_table() -> list[str]:
    from omniplat.online import METHODS

    head = " | ".join(f"{platform} ({device})" for platform, device in PLATFORMS.items())
    lines = [f"| method | | {head} |", "|---" * (len(PLATFORMS) + 2) + "|"]
    for method in METHODS:
        stock = [stock_cell(method, platform) for platform in PLATFORMS]
        own = [own_cell(method, device) for device in PLATFORMS.values()]
        lines.append(f"| `{method}` | vllm-omni | {' | '.join(stock)} |")
        lines.append(f"| | omniplat | {' | '.join(own)} |")
    return lines


def checkpoints_table() -> list[str]:
    """The repository's checkpoints of language models on this machine, a CPU."""
    from vllm.transformers_utils.config import get_config

    from omniplat.integrations.dispatch import GAPS
    from omniplat.integrations.vllm_claim import judge
    from tests.goldens.entries import bundled

    lines = ["| checkpoint | weights | vLLM's method | vLLM alone | with omniplat |", "|---|---|---|---|---|"]
    for entry in bundled():
        if not (entry.checkpoint / "config.json").is_file() or "qwen" not in entry.name:
            continue
        config = get_config(str(entry.checkpoint), trust_remote_code=False)
        verdict = judge(str(entry.checkpoint), dict(config.quantization_config), config, GAPS)
        weights = ", ".join(f"`{item}`" for item in sorted(set(entry.weights.values()) - {"bf16"}))
        alone = _short(verdict.native_problem) or "runs"
        ours = f"refused: {_short(verdict.problem)}" if verdict.problem else "runs"
        with_ours = ours if verdict.claimed else "vLLM's own path, untouched"
        lines.append(f"| {entry.name} | {weights} | {verdict.native_method or '-'} | {alone} | {with_ours} |")
    return lines


def _short(text: str) -> str:
    """One line for a cell: without the layer's name, and with nothing that differs between two runs."""
    first = text.strip().splitlines()[0] if text else ""
    if first.startswith("model.layers."):
        first = first.partition(": ")[2]
    first = re.sub(r"^cpu:\S+ \([^)]*\) ", "", first)
    for end in (" Reasons:", ", currently only", ". Must be one of", " currently only supports:", "(weight_key"):
        first = first.partition(end)[0]
    return first.strip().rstrip(".").replace("|", "\\|")[:160]


def page() -> str:
    from importlib.metadata import version

    import vllm

    return "\n".join(
        [
            "# vLLM and vllm-omni, alone and with omniplat",
            "",
            f"Generated by `python docs/generate_vllm.py` with vLLM {vllm.__version__} and vllm-omni "
            f"{version('vllm-omni')} on a CPU.",
            "",
            "## Methods that quantize while loading",
            "",
            "Above: the method that vllm-omni's own config gives a linear layer, or the error that it raises, where",
            "its platform is set to the column's; two of its methods look at the device itself, those were read in its",
            "code. What it has no config for, it looks up in vLLM's registry: `(vLLM's)` is the method of that config,",
            "asked on this CPU, which gives the same on all platforms and looks for a kernel when a layer is made.",
            "Below: the kernel that omniplat plans for the device, which is described, not there;",
            "`docs/support-matrix.md` says what was verified on which hardware. Experts of a mixture: vllm-omni leaves",
            "them unquantized for every method of its own here, omniplat quantizes them or refuses.",
            "",
            *methods_table(),
            "",
            "## Checkpoints of language models on a CPU",
            "",
            "vLLM's answers are what its own layers raise when they are built for the checkpoint, which is what",
            "`OMNIPLAT_DISPATCH=gaps` asks them.",
            "",
            *checkpoints_table(),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not what would be written")
    made = page()
    if parser.parse_args().check:
        if PAGE.read_text() != made:
            print(f"{PAGE.relative_to(ROOT)} is out of date: run {Path(__file__).name}")
            return 1
        return 0
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
