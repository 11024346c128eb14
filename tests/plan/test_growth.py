"""The cost of planning is linear in tensors: calls are counted, not seconds."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import omniplat
from tests.support.checkpoints import bf16, fp8_tensor, mxfp4, write_checkpoint

FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.gate"]}
MX = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": 32,
      "data_type": "mx_fp", "extra_config": {r".*\.gate$": {"bits": 16}, "lm_head": {"bits": 16}}}  # fmt: skip


def model(module: Callable[[str, int, int], dict[str, Any]], layers: int, experts: int, widths: bool) -> dict[str, Any]:
    """`widths` gives every layer a shape of its own, so that nothing is recognised or matched for all at once."""
    found: dict[str, Any] = {"lm_head.weight": bf16(32, 64)}
    for layer in range(layers):
        block, rows = f"model.layers.{layer}", 64 * (layer + 1) if widths else 64
        for part in ("q_proj", "k_proj", "v_proj"):
            found |= module(f"{block}.self_attn.{part}", rows, 64)
        found[f"{block}.mlp.gate.weight"] = bf16(experts, 64)
        for expert in range(experts):
            found |= module(f"{block}.mlp.experts.{expert}.gate_proj", rows, 64)
            found |= module(f"{block}.mlp.experts.{expert}.up_proj", rows, 64)
            found |= module(f"{block}.mlp.experts.{expert}.down_proj", 64, rows)
    return found


def calls(folder: Path, quantization: dict[str, Any], tensors: dict[str, Any]) -> int:
    config = {"model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    write_checkpoint(folder, {**config, "quantization_config": quantization}, tensors, shards=2)
    omniplat.plan(folder, "cuda:sm90")  # what is loaded once is not counted
    profile = cProfile.Profile()
    profile.enable()
    omniplat.plan(folder, "cuda:sm90")
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize("widths", [False, True])
@pytest.mark.parametrize("dialect", ["modelopt", "auto-round"])
@pytest.mark.parametrize("grown", ["layers", "experts"])
def test_four_times_the_tensors_are_four_times_the_calls(
    tmp_path: Path, dialect: str, grown: str, widths: bool
) -> None:
    quantization, module = (FP8, fp8_tensor) if dialect == "modelopt" else (MX, mxfp4)
    sizes = {"layers": (6, 8), "experts": (2, 24)}[grown]
    larger = (sizes[0] * 4, sizes[1]) if grown == "layers" else (sizes[0], sizes[1] * 4)
    small = calls(tmp_path / "small", quantization, model(module, *sizes, widths))
    large = calls(tmp_path / "large", quantization, model(module, *larger, widths))
    assert large < 4.6 * small


def test_a_module_that_contradicts_costs_the_same_whatever_the_length_of_the_list(tmp_path: Path) -> None:
    """A list of exclusions that were quantized otherwise, beside modules that nobody excluded and nobody quantized."""
    names = [f"model.layers.{i // 20}.mlp.experts.{i % 20}.up_proj" for i in range(600)]
    tensors = {f"{name}.weight": bf16(64, 64) for name in names}

    def cost(entries: int) -> int:
        return calls(tmp_path / str(entries), {**FP8, "ignore": names[:entries]}, tensors)

    few, many = cost(10), cost(210)
    assert many - few < 100 * 200
