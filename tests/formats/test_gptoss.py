"""gpt-oss: stacked blocks of the routed experts, everything else in 16 bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omniplat.oracle import element_values
from tests.support.checkpoints import bf16, mxfp4
from tests.support.resolving import codes, only, resolve, schemes
from tests.support.values import values_of

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
NAME = "model.layers.0.mlp.experts.down_proj"
REST = {"model.layers.0.self_attn.q_proj.weight": bf16(8, 8), "model.layers.0.mlp.router.weight": bf16(4, 8)}


def stacked(experts: int, n: int, k: int) -> dict[str, Any]:
    return {
        f"{NAME}_blocks": ("U8", (experts, n, k // 32, 16)),
        f"{NAME}_scales": ("U8", (experts, n, k // 32)),
        f"{NAME}_bias": ("BF16", (experts, n)),
    }


@pytest.mark.parametrize(("experts", "n", "k"), [(2, 4, 64), (3, 16, 32), (1, 2, 128)])
def test_blocks_scales_and_bias_are_one_module(tmp_path: Path, experts: int, n: int, k: int) -> None:
    random = np.random.default_rng(k)
    blocks = random.integers(0, 256, (experts, n, k // 32, 16), dtype=np.uint8)
    scales = random.integers(120, 134, (experts, n, k // 32), dtype=np.uint8)
    data = {f"{NAME}_blocks": blocks.tobytes(), f"{NAME}_scales": scales.tobytes()}
    found = resolve(tmp_path, MXFP4, {**stacked(experts, n, k), **REST}, values=data)
    (module,) = [m for m in found.modules if m.name == NAME]
    assert (module.scheme.id, module.experts, module.out_features, module.in_features) == ("mxfp4/a16", experts, n, k)
    assert set(module.tensors) == {"codes", "scale", "bias"}
    assert codes(found, severity="error") == []
    assert "tensors-contradict-config" not in codes(found)
    table = element_values("fp4_e2m1")
    pairs = np.stack([table[blocks & 15], table[blocks >> 4]], axis=-1).reshape(experts, n, k // 32, 32)
    expected = (pairs * 2.0 ** (scales.astype(float)[..., None] - 127)).reshape(experts, n, k)
    assert (values_of(found, NAME, experts - 1) == expected[-1]).all()


def test_lists_of_globs_name_whole_subtrees(tmp_path: Path) -> None:
    found = resolve(tmp_path, MXFP4, {**stacked(2, 4, 64), **REST})
    assert schemes(found)["model.layers.0.self_attn.q_proj"] == "bf16/a16"
    assert "rule-matches-nothing" not in codes(found)


def test_an_entry_that_names_nothing_is_reported(tmp_path: Path) -> None:
    config = {**MXFP4, "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.attention"]}
    found = resolve(tmp_path, config, {**stacked(2, 4, 64), **REST})
    assert "attention'" in only(found, "rule-matches-nothing").where.rule


def test_a_packed_linear_outside_of_experts_is_quantized_all_the_same(tmp_path: Path) -> None:
    found = resolve(tmp_path, MXFP4, {**stacked(2, 4, 64), **mxfp4("head", 8, 64), **REST})
    assert schemes(found)["head"] == "mxfp4/a16"
    assert only(found, "tensors-contradict-config").modules == ("head",)


def test_missing_scales(tmp_path: Path) -> None:
    tensors = stacked(2, 4, 64)
    del tensors[f"{NAME}_scales"]
    assert only(resolve(tmp_path, MXFP4, {**tensors, **REST}), "missing-tensor").modules == (NAME,)


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 5, 2), (3, 4, 2)])
def test_scales_that_do_not_fit(tmp_path: Path, shape: Any) -> None:
    tensors = {**stacked(2, 4, 64), f"{NAME}_scales": ("U8", shape)}
    found = resolve(tmp_path, MXFP4, {**tensors, **REST})
    assert schemes(found)[NAME].endswith("invalid")


def test_an_engines_own_mxfp4_is_not_claimed(tmp_path: Path) -> None:
    config = {"quant_method": "mxfp4", "is_checkpoint_serialized": True}
    assert resolve(tmp_path, config, {"m.weight": bf16(8, 8)}).format != "mxfp4"
