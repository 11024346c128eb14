"""Tensors beside a quantized weight that no role explains: reported, and refused where they change the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import bf16, fp8_channel, fp8_tensor, gptq, int4_packed, mxfp4
from tests.support.resolving import codes, only, resolve, schemes

BLOCK = {"m.weight": ("F8_E4M3", (128, 128)), "m.weight_scale_inv": ("F32", (1, 1))}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}


NVFP4 = {**fp8_tensor("m", 64, 64), "m.weight": ("U8", (64, 32)), "m.weight_scale": ("F8_E4M3", (64, 4)),
         "m.weight_scale_2": ("F32", ())}  # fmt: skip


def compressed(weights: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


STORED: list[tuple[Any, Any]] = [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, BLOCK),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor("m", 64, 64)),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4),
    ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}, gptq("m", 64, 64, 4, 64)),
    (compressed(INT4), int4_packed("m", 64, 64, 64)),
    (compressed(MX), mxfp4("m", 64, 64)),
    (None, fp8_channel("m", 64, 64)),
]


@pytest.mark.parametrize(("config", "tensors"), STORED)
@pytest.mark.parametrize("leaf", ["weight_scale_3", "act_offset", "weight_amax", "weight_zero_points", "sub_scales"])
def test_an_unknown_tensor_of_quantization_is_reported(tmp_path: Path, config: Any, tensors: Any, leaf: str) -> None:
    found = resolve(tmp_path, config, {**tensors, f"m.{leaf}": ("F32", (64,))})
    assert only(found, "unexpected-tensor").message == f"no role explains {leaf} of m"
    assert codes(found, severity="error") == []


@pytest.mark.parametrize(("config", "tensors"), STORED)
@pytest.mark.parametrize("leaf", ["svdquant_lora_a", "lora_b", "proj_up", "input_rotation", "smoothing"])
def test_what_changes_the_output_is_not_left_out(tmp_path: Path, config: Any, tensors: Any, leaf: str) -> None:
    found = resolve(tmp_path, config, {**tensors, f"m.{leaf}": ("BF16", (64, 16))})
    assert schemes(found)["m"].endswith(" unsupported")
    assert leaf in only(found, "unsupported-option").message


@pytest.mark.parametrize(("config", "tensors"), STORED)
@pytest.mark.parametrize("leaf", ["k_scale", "v_scale", "output_scale", "kv_cache_offset", "e_score_correction_bias"])
def test_what_is_not_about_the_weight_is_no_surprise(tmp_path: Path, config: Any, tensors: Any, leaf: str) -> None:
    plain = resolve(tmp_path / "plain", config, tensors)
    found = resolve(tmp_path / "more", config, {**tensors, f"m.{leaf}": ("F32", (1,))})
    assert (codes(found), schemes(found)) == (codes(plain), schemes(plain))


def test_a_float_weight_may_have_anything_beside_it(tmp_path: Path) -> None:
    tensors = {**fp8_channel("m", 64, 64), "n.weight": bf16(64, 64), "n.layer_scale": bf16(64), "n.lora_alpha": bf16(1)}
    assert codes(resolve(tmp_path, None, tensors)) == ["inferred-from-headers"]
