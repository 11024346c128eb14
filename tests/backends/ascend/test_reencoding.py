"""MXFP4 checkpoints on a2 and a3, which have no MX units: weight-only int8, by values that the preflight has seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat import load, plan
from omniplat.canonical import Array
from omniplat.emulation import Emulation
from omniplat.errors import UnsupportedCombinationError
from omniplat.oracle import linear
from tests.support.arrays import canonical, relative, write_arrays

Emulate = Callable[[str], Emulation]

DESCRIPTION = "quant_model_description.json"
HIDDEN, INNER, EXPERTS, TOKENS = 128, 64, 3, 6
LAYER = "model.layers.0.mlp.experts"
CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}


def weight(rows: int, columns: int, span: int, seed: int) -> dict[str, Array]:
    """Every code occurs; one row's scales span so many binades, those of the others fewer."""
    rng = np.random.default_rng(seed)
    scale = rng.integers(120, 120 + min(span, 2) + 1, (rows, columns // 32))
    scale[rows // 2, :2] = 120, 120 + span
    codes = rng.integers(0, 256, (rows, columns // 2))
    return {"weight": codes.astype(np.uint8), "weight_scale": scale.astype(np.uint8)}


def write(folder: Path, modules: dict[str, dict[str, Array]], kind: str, config: dict[str, Any] | None = None) -> Path:
    arrays = {f"{name}.{leaf}": array for name, held in modules.items() for leaf, array in held.items()}
    kinds = {f"{name}.weight": kind for name in modules}
    write_arrays(folder, arrays, config=config, files={DESCRIPTION: {"version": "1.0.0", **kinds}})
    return folder


def experts(folder: Path, span: int, kind: str = "W4A4_MXFP4") -> Path:
    modules = {}
    for expert in range(EXPERTS):
        for index, (part, shape) in enumerate(
            {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}.items()
        ):
            modules[f"{LAYER}.{expert}.{part}"] = weight(*shape, span, 10 * expert + index)
    return write(folder, modules, kind, CONFIG)


def only_layer(document: dict[str, Any]) -> dict[str, Any]:
    (layer,) = (item for item in document["layers"] if item["status"] != "unquantized")
    return dict(layer)


def codes_of(document: dict[str, Any]) -> set[str]:
    return {item["code"] for item in document["findings"]}


@pytest.mark.parametrize("arch", ["a2", "a3"])
@pytest.mark.parametrize("kind", ["W4A4_MXFP4", "W4A8_MXFP", "W4A16_MXFP4"])
@pytest.mark.parametrize("span", [0, 3, 4, 30])
def test_linear_layers_keep_their_group_scales(
    tmp_path: Path, omniplat_emulate: Emulate, arch: str, kind: str, span: int
) -> None:
    """Exactly, whatever a row spans: every product of a row of ones is the weight."""
    folder = write(tmp_path, {"m": weight(48, HIDDEN, span, 1)}, kind)
    emulation = omniplat_emulate(f"npu:{arch}")
    document = plan(folder, emulation.device).to_dict()
    layer = only_layer(document)
    assert (layer["status"], layer["kernel"], layer["via"]) == ("ok", "weight_quant_batchmatmul_mxfp4", "int8-g32")
    assert layer["executes"] == "mxfp4/a16"
    assert ("weight-only" in codes_of(document)) is (kind != "W4A16_MXFP4")
    module = load(folder, emulation.device)["m"]
    with torch.no_grad():
        found = module(torch.eye(HIDDEN, dtype=torch.bfloat16)).double().numpy()
    np.testing.assert_array_equal(found, linear(np.eye(HIDDEN), canonical(folder, "m"), activation=False))
    assert not emulation.violations


@pytest.mark.parametrize("arch", ["a2", "a3"])
@pytest.mark.parametrize("span", [0, 3])
def test_experts_have_one_scale_per_row_up_to_three_binades(
    tmp_path: Path, omniplat_emulate: Emulate, arch: str, span: int
) -> None:
    folder = experts(tmp_path, span)
    emulation = omniplat_emulate(f"npu:{arch}")
    document = plan(folder, emulation.device).to_dict()
    layer = only_layer(document)
    assert (layer["status"], layer["kernel"], layer["via"]) == ("ok", "grouped_matmul_mxfp4_w8a16", "int8-channel")
    assert layer["scale_spans"] == {"mxfp4": span}
    assert "weight-only" in codes_of(document)
    found = run(load(folder, emulation.device)[LAYER])
    # Nothing is quantized on the CPU either where the metadata asks for the weights alone.
    wanted = run(load(experts(tmp_path / "alone", span, "W4A16_MXFP4"), "cpu")[LAYER])
    assert relative(found, wanted) < 0.01
    assert not emulation.violations


def run(layer: torch.nn.Module) -> Array:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(TOKENS)])
    with torch.no_grad():
        found: Array = layer(x, ids, torch.full((TOKENS, 2), 0.5)).double().numpy()
    return found


@pytest.mark.parametrize("arch", ["a2", "a3"])
@pytest.mark.parametrize("span", [4, 30])
def test_experts_beyond_are_refused_by_the_plan_and_by_loading(
    tmp_path: Path, omniplat_emulate: Emulate, arch: str, span: int
) -> None:
    folder = experts(tmp_path, span)
    emulation = omniplat_emulate(f"npu:{arch}")
    document = plan(folder, emulation.device).to_dict()
    layer = only_layer(document)
    assert layer["status"] == "unsupported"
    (reason,) = (entry for entry in layer["trace"] if entry["kernel"] == "grouped_matmul_mxfp4_w8a16")
    needed = {"rule": "span of scales", "needed": "<= 3 binades for int8-channel", "found": str(span)}
    assert reason["rejected"] == needed
    refused = next(item for item in document["findings"] if item["code"] == "reencode-refused")
    assert refused["severity"] == "error"
    with pytest.raises(UnsupportedCombinationError, match="span of scales"):
        load(folder, emulation.device)


@pytest.mark.parametrize("span", [3, 30])
def test_a5_has_units_for_them(tmp_path: Path, omniplat_emulate: Emulate, span: int) -> None:
    emulation = omniplat_emulate("npu:a5")
    layer = only_layer(plan(experts(tmp_path, span), emulation.device).to_dict())
    assert (layer["status"], layer["kernel"], layer["via"]) == ("ok", "grouped_matmul_mxfp4", None)


@pytest.mark.parametrize("arch", ["a2", "a3"])
def test_mxfp8_has_no_integers_that_hold_it(tmp_path: Path, omniplat_emulate: Emulate, arch: str) -> None:
    held = weight(48, HIDDEN, 1, 1)
    held["weight"] = np.ones((48, HIDDEN), ml_dtypes.float8_e4m3fn)
    folder = write(tmp_path, {"m": held}, "W8A8_MXFP8")
    assert only_layer(plan(folder, omniplat_emulate(f"npu:{arch}").device).to_dict())["status"] == "unsupported"
