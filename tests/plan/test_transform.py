"""Inputs that are transformed before they are quantized (FlatQuant): what it means, and who may run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from omniplat import load, plan
from omniplat.api import make_planned
from omniplat.canonical import TRANSFORM_ROLES, Array
from omniplat.conformance.inputs import random_input
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError, UsageError
from omniplat.oracle import dequantize, linear
from omniplat.oracle.linear import transformed, untransformed
from omniplat.runtime.slicer import take_columns
from tests.support.arrays import canonical, relative, write_arrays

N, A, B = 24, 8, 16
K = A * B
DESCRIPTION = "quant_model_description.json"
KIND = "W4A4_FLATQUANT_DYNAMIC"


def arrays(name: str = "m", *, clip: float = 0.8, seed: int = 5) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        f"{name}.weight": rng.integers(-8, 8, (N, K)).astype(np.int8),
        f"{name}.weight_scale": rng.uniform(0.001, 0.01, (N, 1)).astype(np.float32),
        f"{name}.weight_offset": np.zeros((N, 1), np.float32),
        f"{name}.left_trans": rng.standard_normal((A, A)).astype(np.float32),
        f"{name}.right_trans": rng.standard_normal((B, B)).astype(np.float32),
        f"{name}.clip_ratio": np.array([clip], np.float32),
    }


def write(folder: Path, held: Mapping[str, Array], config: Mapping[str, object] | None = None) -> Path:
    names = [name for name in held if name.endswith(".weight")]
    write_arrays(folder, held, config=config, files={DESCRIPTION: {"version": "1.0.0", **dict.fromkeys(names, KIND)}})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, arrays())


def test_the_order_is_the_producers(folder: Path) -> None:
    """msModelSlim multiplies runs of B values by the right matrix, then columns of A of them by the left one."""
    weight = canonical(folder, "m")
    x = np.random.default_rng(1).standard_normal((3, K))
    right = (x.reshape(-1, B) @ weight.tensors["right_transform"]).reshape(3, A, B)
    wanted = np.stack([weight.tensors["left_transform"].T @ matrix for matrix in right]).reshape(3, K)
    np.testing.assert_allclose(transformed(x, weight), wanted, rtol=1e-12)
    folded = untransformed(dequantize(weight), weight)
    np.testing.assert_allclose(x @ folded.T, linear(x, weight, activation=False), rtol=1e-9)


def test_scales_are_clipped_and_codes_saturate(folder: Path) -> None:
    weight = canonical(folder, "m")
    x = np.random.default_rng(2).standard_normal((5, K)).astype(np.float32)
    values = transformed(x, weight)
    scale = np.abs(values).max(1, keepdims=True) * 0.8 / 7
    codes = np.clip(np.rint(values / scale), -8, 7)
    assert (codes == 7).sum() + (codes == -8).sum() > 5
    wanted = codes * scale @ dequantize(weight).T
    np.testing.assert_allclose(linear(x, weight), wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_computes_what_it_means(folder: Path, dtype: torch.dtype) -> None:
    layer = load(folder, "cpu")["m"]
    x = random_input(7, K, np.random.default_rng(3), "bf16")
    with torch.no_grad():
        found = layer(torch.from_numpy(x).to(dtype)).double().numpy()
    weight = canonical(folder, "m")
    assert relative(found, linear(x, weight)) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    without = replace(weight, tensors={**weight.tensors, "clip_ratio": np.ones(1, np.float32)})
    assert relative(found, linear(x, without)) > 0.02


def test_kernels_that_do_not_transform_say_so(folder: Path) -> None:
    found = plan(folder, "cuda:sm90").to_dict()["layers"][0]
    assert found["status"] == "unsupported"
    assert found["details"]["transform"] == [A, B]
    refused = [entry for entry in found["trace"] if "transform" in json.dumps(entry)]
    assert refused
    assert all("8 x 8 and 16 x 16" in json.dumps(entry) for entry in refused)
    with pytest.raises(UnsupportedCombinationError, match="transform of the input none"):
        load(folder, "cuda:sm90")


def test_matrices_beyond_the_devices_are_refused(tmp_path: Path) -> None:
    held = arrays()
    held["m.left_trans"], held["m.right_trans"] = np.eye(32, dtype=np.float32), np.eye(4, dtype=np.float32)
    found = plan(write(tmp_path, held), "npu:a2").to_dict()["layers"][0]
    assert found["status"] == "unsupported"
    assert "right transform" in json.dumps(found["trace"])


def test_columns_cannot_be_cut(folder: Path) -> None:
    with pytest.raises(UsageError, match="transformed"):
        take_columns(canonical(folder, "m"), range(K // 2))


@pytest.mark.parametrize("clip", [0.0, 1.5, np.nan])
def test_ratios_that_clip_nothing_sensible_are_errors(tmp_path: Path, clip: float) -> None:
    with pytest.raises(InvalidCheckpointError, match="clip_ratio"):
        load(write(tmp_path, arrays(clip=clip)), "cpu")


@pytest.mark.parametrize("role", [None, *TRANSFORM_ROLES])
def test_parts_are_fused_where_their_transforms_are_the_same(tmp_path: Path, role: str | None) -> None:
    prefix = "model.layers.0.self_attn."
    names = {f"{prefix}{part}_proj": part for part in "qkv"}
    held: dict[str, Array] = {}
    for name in names:
        held |= arrays(name)
    if role is not None:
        leaf = {"left_transform": "left_trans", "right_transform": "right_trans"}.get(role, role)
        held[f"{prefix}v_proj.{leaf}"] = held[f"{prefix}v_proj.{leaf}"] * np.float32(0.5)
    config = {"model_type": "qwen3", "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    planned = make_planned(write(tmp_path, held, config), "cpu")
    found = {item.layer.name for item in planned.layers}
    assert found == ({f"{prefix}qkv_proj"} if role is None else set(names))
