"""Metadata of one dialect in two files, of which the first leaves out what the second holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import bf16, fp8_tensor, gptq
from tests.support.resolving import codes, only, resolve, schemes

INT8 = {"m.weight": ("I8", (64, 64)), "m.weight_scale": ("F32", (64, 1)), "m.weight_offset": ("F32", (64, 1))}
AWQ = {"m.qweight": ("I32", (64, 8)), "m.qzeros": ("I32", (1, 8)), "m.scales": ("F16", (1, 64))}
MIXED = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m": {"quant_algo": "FP8"}}}
FULL: dict[str, tuple[str, Any, Any, str]] = {
    "ascend": ("quant_model_description.json", {"m.weight": "W8A8_DYNAMIC"}, INT8, "int8-channel/int8-token"),
    "modelopt": ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": MIXED},
                 fp8_tensor("m", 64, 64), "fp8-tensor/fp8-tensor-static"),
    "gptq": ("quantize_config.json", {"bits": 8, "group_size": 32, "desc_act": False, "sym": True},
             gptq("m", 64, 64, 8, 32), "int8-g32/a16"),
    "awq": ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, AWQ,
            "uint4-g64/a16"),
}  # fmt: skip


@pytest.mark.parametrize("method", FULL)
@pytest.mark.parametrize("more", [{}, {"version": "1.0", "group_size": None}])
def test_a_config_that_only_names_the_method_leaves_the_rest_to_its_file(
    tmp_path: Path, method: str, more: dict[str, Any]
) -> None:
    name, content, tensors, scheme = FULL[method]
    tensors = {**tensors, "n.weight": bf16(64, 64)}
    found = resolve(tmp_path, {"quant_method": method, **more}, tensors, files={name: content})
    assert schemes(found) == {"m": scheme, "n": "bf16/a16"}
    assert "metadata-conflict" not in codes(found)
    assert codes(found, severity="error") == []


@pytest.mark.parametrize("config", [{"quant_algo": "MIXED_PRECISION"}, {"ignore": ["n"]}, {"quant_algo": None}])
def test_what_a_config_lacks_is_taken_from_the_other_file_and_said(tmp_path: Path, config: dict[str, Any]) -> None:
    name, content, tensors, scheme = FULL["modelopt"]
    own = {"quant_method": "modelopt", **config, "config_groups": {}}
    tensors = {**tensors, "n.weight": bf16(64, 64)}
    found = resolve(tmp_path / "both", own, tensors, files={name: content})
    assert schemes(found)["m"] == scheme
    assert only(found, "metadata-conflict").message.endswith("hf_quant_config.json was used")
    alone = resolve(tmp_path / "alone", own, tensors)
    assert codes(alone, severity="error") == ["unsupported-option"]
    other = resolve(tmp_path / "other", own, tensors, files={"quantize_config.json": FULL["gptq"][1]})
    assert codes(other, severity="error") == ["unsupported-option"]
