"""Tensors beside the codes of a dtype or size that loading would refuse: the plan says so, naming them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import fp8_tensor, gptq
from tests.support.resolving import codes, only, resolve, schemes

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}
PACKED = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": INT4}}}
DIALECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gptq": (GPTQ, {**gptq("m", 64, 128, 4, 64), "m.g_idx": ("I32", (128,)), "m.bias": ("F16", (64,))}),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64},
        {"m.qweight": ("I32", (128, 8)), "m.qzeros": ("I32", (2, 8)), "m.scales": ("F16", (2, 64))},
    ),
    "compressed-tensors": (
        PACKED,
        {
            "m.weight_packed": ("I32", (64, 16)),
            "m.weight_scale": ("BF16", (64, 2)),
            "m.weight_zero_point": ("I32", (8, 2)),
            "m.weight_shape": ("I64", (2,)),
        },
    ),
    "fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, {**fp8_tensor("m", 64, 128), "m.bias": ("BF16", (64,))}),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {
            **fp8_tensor("m", 64, 128),
            "m.weight": ("U8", (64, 64)),
            "m.weight_scale": ("F8_E4M3", (64, 8)),
            "m.weight_scale_2": ("F32", ()),
        },
    ),
}
BESIDE = ("qzeros", "scales", "g_idx", "bias", "weight_zero_point", "input_scale", "weight_scale_2")


def misfits() -> Iterator[tuple[str, str, tuple[str, tuple[int, ...]]]]:
    for dialect, (_, tensors) in DIALECTS.items():
        for name, (dtype, shape) in tensors.items():
            leaf = name.removeprefix("m.")
            if leaf in BESIDE:
                yield dialect, leaf, ("I8" if dtype == "I64" else "I64" if leaf != "g_idx" else "F16", shape)
                yield dialect, leaf, (dtype, (*shape[:-1], shape[-1] + 3) if shape else (3,))
                yield dialect, leaf, (dtype, (0, *shape[1:]) if shape else (0,))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_fits_says_nothing(tmp_path: Path, dialect: str) -> None:
    config, tensors = DIALECTS[dialect]
    assert codes(resolve(tmp_path, config, tensors)) == []


@pytest.mark.parametrize(("dialect", "leaf", "found"), list(misfits()))
def test_what_does_not_fit_is_found_while_planning(
    tmp_path: Path, dialect: str, leaf: str, found: tuple[str, tuple[int, ...]]
) -> None:
    config, tensors = DIALECTS[dialect]
    resolution = resolve(tmp_path, config, {**tensors, f"m.{leaf}": found})
    assert schemes(resolution)["m"].endswith(" invalid")
    problem = only(resolution, "tensors-contradict-config")
    assert problem.severity == "error"
    if leaf not in ("scales", "g_idx"):  # these tell N and K, and the weight no longer fits them
        assert f"{leaf} {found[0]} {list(found[1])} does not fit" in problem.message
