"""SVDQuant: tensors of vllm-omni in rows and of nunchaku in warp order, and the layer that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat import plan
from omniplat.errors import InvalidCheckpointError
from omniplat.oracle import dequantize, linear, quantize_activation
from omniplat.scheme import parse_activation_id
from tests.support.arrays import canonical, relative, run, write_arrays
from tests.support.checkpoints import bf16
from tests.support.resolving import codes, only, resolve, schemes

Array = np.ndarray[Any, Any]
Shapes = dict[str, tuple[str, tuple[int, ...]]]
OMNI = {"quant_method": "svdquant", "rank": 32, "precision": "nvfp4"}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def shapes(module: str, n: int, k: int, precision: str = "nvfp4", rank: int = 32) -> Shapes:
    fp4 = precision == "nvfp4"
    tensors: Shapes = {
        f"{module}.qweight": ("I8", (n, k // 2)),
        f"{module}.wscales": ("F8_E4M3", (k // 16, n)) if fp4 else ("BF16", (k // 64, n)),
        f"{module}.proj_down": ("BF16", (k, rank)),
        f"{module}.proj_up": ("BF16", (n, rank)),
        f"{module}.smooth_factor": ("BF16", (k,)),
        f"{module}.bias": ("BF16", (n,)),
    }
    return tensors | ({f"{module}.wcscales": ("BF16", (n,)), f"{module}.wtscale": ("BF16", (1,))} if fp4 else {})


@pytest.mark.parametrize(
    ("precision", "scheme"), [("nvfp4", "svdq-nvfp4/svdq-nvfp4"), ("int4", "svdq-int4-g64/svdq-int4")]
)
def test_both_precisions(tmp_path: Path, precision: str, scheme: str) -> None:
    tensors = {**shapes("a.to_qkv", 384, 128, precision), "proj_out.weight": bf16(64, 128)}
    config = {**OMNI, "precision": precision, "modules_to_not_convert": ["proj_out"]}
    found = resolve(tmp_path, config, tensors)
    assert schemes(found) == {"a.to_qkv": scheme, "proj_out": "bf16/a16"}
    assert codes(found) == []
    assert plan(tmp_path, "cpu").ok


@pytest.mark.parametrize("leaf", ["wscales", "proj_down", "proj_up", "smooth_factor", "wcscales", "wtscale"])
def test_every_tensor_is_needed(tmp_path: Path, leaf: str) -> None:
    tensors = shapes("m", 128, 128)
    del tensors[f"m.{leaf}"]
    found = resolve(tmp_path, OMNI, tensors)
    assert found.modules[0].status == "invalid"
    assert leaf in only(found, "missing-tensor").message


def test_scales_of_the_other_precision_do_not_fit(tmp_path: Path) -> None:
    tensors = {**shapes("m", 128, 128), "m.wscales": ("F8_E4M3", (2, 128))}
    found = resolve(tmp_path, OMNI, tensors)
    assert found.modules[0].status == "invalid"
    assert only(found, "tensors-contradict-config").severity == "error"


def test_without_metadata_the_order_of_the_codes_is_unknown(tmp_path: Path) -> None:
    found = resolve(tmp_path, None, shapes("m", 128, 128))
    assert found.modules[0].status == "unsupported"
    assert "rows or in tiles" in only(found, "unsupported-option").message


@pytest.mark.parametrize(
    ("config", "code", "key"),
    [
        ({**OMNI, "precision": "fp6"}, "unsupported-option", "precision"),
        ({**OMNI, "act_unsigned": True}, "unsupported-option", "act_unsigned"),
        ({**OMNI, "act_unsigned": "no"}, "metadata-unreadable", "act_unsigned"),
        ({**OMNI, "modules_to_not_convert": 1}, "metadata-unreadable", "modules_to_not_convert"),
    ],
)
def test_wrong_values_name_file_and_key(tmp_path: Path, config: Any, code: str, key: str) -> None:
    findings = resolve(tmp_path, config, shapes("m", 128, 128)).findings
    (finding,) = [found for found in findings if found.where.file == "config.json"]
    assert finding.code == code
    assert key in finding.where.rule


# --- values: a layer made of known numbers, packed here element by element -------------------------------------------


class Layer:
    """fp4 or int4 residual codes, group scales, two globals, smoothing, a pair and a bias, all random."""

    def __init__(self, n: int, k: int, precision: str, seed: int = 0, rank: int = 32) -> None:
        random = np.random.default_rng(seed)
        self.n, self.k, self.fp4 = n, k, precision == "nvfp4"
        self.group = 16 if self.fp4 else 64
        self.codes = random.integers(0, 16, (n, k)).astype(np.uint8)
        raw = random.uniform(0.5, 4, (n, k // self.group))
        self.scale = raw.astype(ml_dtypes.float8_e4m3fn if self.fp4 else ml_dtypes.bfloat16)
        self.smooth = random.uniform(0.5, 2, k).astype(ml_dtypes.bfloat16)
        self.channel = random.uniform(0.5, 2, n).astype(ml_dtypes.bfloat16)
        self.tensor = np.array([0.0625], ml_dtypes.bfloat16)
        self.down = random.normal(0, 0.1, (k, rank)).astype(ml_dtypes.bfloat16)
        self.up = random.normal(0, 0.1, (n, rank)).astype(ml_dtypes.bfloat16)
        self.bias = random.normal(0, 1, n).astype(ml_dtypes.bfloat16)

    def residual(self) -> Array:
        table = [*E2M1, *(-v for v in E2M1)] if self.fp4 else [*range(8), *range(-8, 0)]
        values = np.array(table, np.float64)[self.codes] * np.repeat(self.scale.astype(np.float64), self.group, axis=1)
        if self.fp4:
            values = values * (self.channel.astype(np.float64)[:, None] * float(self.tensor[0]))
        return values

    def output(self, x: Array, *, quantized: bool) -> Array:
        smoothed = x.astype(np.float64) / self.smooth.astype(np.float64)
        if quantized:
            kind = parse_activation_id("svdq-nvfp4" if self.fp4 else "svdq-int4")
            assert kind is not None
            smoothed = quantize_activation((x * (np.float32(1) / self.smooth.astype(np.float32))), kind)
        pair = (x.astype(np.float64) @ self.down.astype(np.float64)) @ self.up.astype(np.float64).T
        return smoothed @ self.residual().T + pair + self.bias.astype(np.float64)

    def named(self, codes: Array, scale: Array, vectors: dict[str, Array], down: Array, up: Array) -> dict[str, Array]:
        tensors = {"qweight": codes.view(np.int8), "wscales": scale, "proj_down": down, "proj_up": up}
        tensors |= {"smooth_factor": vectors["smooth"], "bias": vectors["bias"]}
        if self.fp4:
            tensors |= {"wcscales": vectors["channel"], "wtscale": self.tensor}
        return {f"m.{leaf}": array for leaf, array in tensors.items()}

    def in_rows(self) -> dict[str, Array]:
        packed = self.codes[:, 0::2] | (self.codes[:, 1::2] << 4)
        vectors = {"smooth": self.smooth, "bias": self.bias, "channel": self.channel}
        return self.named(packed, self.scale.T, vectors, self.down, self.up)

    def in_warp_order(self) -> dict[str, Array]:
        vectors = {"smooth": self.smooth, "bias": self.bias, "channel": self.channel}
        return self.named(
            warp_codes(self.codes),
            warp_fp8_scales(self.scale) if self.fp4 else warp_scales(self.scale),
            {name: warp_scales(vector[:, None]).reshape(-1) for name, vector in vectors.items()},
            warp_pair(self.down.T, is_down=True),
            warp_pair(self.up, is_down=False),
        )


def warp_codes(codes: Array) -> Array:
    """nunchaku's order, one code after the other: where row r, column c ends up in the packed bytes."""
    n, k = codes.shape
    out = np.zeros(n * k // 2, np.uint8)
    for r in range(n):
        for c in range(k):
            tile, pack, half_n, lane_n = r // 128, r % 128 // 16, r % 16 // 8, r % 8
            tile_k, half_k, lane_k, element = c // 64, c % 64 // 32, c % 32 // 8, c % 8
            register = ((((tile * (k // 64) + tile_k) * 8 + pack) * 8 + lane_n) * 4 + lane_k) * 4 + half_n * 2 + half_k
            out[register * 4 + element // 2] |= int(codes[r, c]) << (4 * (element % 2))
    return out.reshape(n, k // 2)


def warp_scales(scale: Array) -> Array:
    """[N, G] of 16-bit scales: 128 rows by groups of two pairs, eight rows apart."""
    n, groups = scale.shape
    out = np.empty(n * groups, scale.dtype)
    for r in range(n):
        for g in range(groups):
            row = r % 128
            slot = ((row // 16 * 4 + row % 8 // 2) * 2 + row % 16 // 8) * 2 + row % 2
            out[(r // 128 * groups + g) * 128 + slot] = scale[r, g]
    return out.reshape(groups, n)


def warp_fp8_scales(scale: Array) -> Array:
    """[N, G] of fp8 scales: four groups of a row in one word, rows 32 apart next to each other."""
    n, groups = scale.shape
    out = np.empty(n * groups, scale.dtype)
    for r in range(n):
        for g in range(groups):
            row = r % 128
            slot = (row % 8 * 4 + row % 32 // 8) * 4 + row // 32
            out[((r // 128 * (groups // 4) + g // 4) * 128 + slot) * 4 + g % 4] = scale[r, g]
    return out.reshape(groups, n)


def warp_pair(weight: Array, *, is_down: bool) -> Array:
    """nunchaku's packer of low-rank factors, with its own steps: [R, C] (down) or [C, R] to [C, R]."""
    tensor = torch.from_numpy(weight.astype(np.float32))
    if is_down:
        r, c = tensor.shape
        tiles = tensor.view(r // 16, 16, c // 16, 16).permute(2, 0, 1, 3)
    else:
        c, r = tensor.shape
        tiles = tensor.view(c // 16, 16, r // 16, 16).permute(0, 2, 1, 3)
    lanes = tiles.reshape(c // 16, r // 16, 2, 8, 1, 2, 4, 2).permute(0, 1, 3, 6, 2, 5, 4, 7)
    return lanes.contiguous().view(c, r).numpy().astype(weight.dtype)


def write(folder: Path, layer: Layer, precision: str, *, nunchaku: bool) -> None:
    if not nunchaku:
        write_arrays(folder, layer.in_rows(), config={"quantization_config": {**OMNI, "precision": precision}})
        return
    dtype = "fp4_e2m1_all" if layer.fp4 else "int4"
    content = {"method": "svdquant", "weight": {"dtype": dtype, "group_size": layer.group}, "activation": {}}
    write_arrays(folder, layer.in_warp_order(), metadata={"quantization_config": json.dumps(content)})


@pytest.mark.parametrize("nunchaku", [False, True])
@pytest.mark.parametrize("precision", ["nvfp4", "int4"])
def test_the_layer_is_what_its_parts_say(tmp_path: Path, precision: str, nunchaku: bool) -> None:
    layer = Layer(256, 256, precision)
    write(tmp_path, layer, precision, nunchaku=nunchaku)
    weight = canonical(tmp_path, "m")
    x = np.random.default_rng(9).normal(0, 1, (5, 256)).astype(np.float32)
    np.testing.assert_allclose(
        linear(x, weight, activation=False), layer.output(x, quantized=False), rtol=1e-5, atol=1e-5
    )
    assert relative(linear(x, weight), layer.output(x, quantized=True)) < 1e-5
    assert relative(linear(x, weight), layer.output(x, quantized=False)) > 0.01
    assert relative(run(tmp_path, "m", x), layer.output(x, quantized=True)) < 1e-5


def test_the_dequantized_weight_holds_the_pair(tmp_path: Path) -> None:
    """What convert writes, W * pre_scale, is the layer without activation quantization."""
    layer = Layer(128, 128, "nvfp4", seed=3)
    write(tmp_path, layer, "nvfp4", nunchaku=False)
    weight = canonical(tmp_path, "m")
    full = dequantize(weight) * weight.tensors["pre_scale"].astype(np.float64)
    x = np.random.default_rng(1).normal(0, 1, (4, 128)).astype(np.float32)
    wanted = layer.output(x, quantized=False) - layer.bias.astype(np.float64)
    assert relative(x.astype(np.float64) @ full.T, wanted) < 1e-6


def test_the_two_orders_differ(tmp_path: Path) -> None:
    """Reading nunchaku's tensors as rows gives another layer: the order must come from the metadata."""
    layer = Layer(128, 128, "nvfp4", seed=4)
    write_arrays(tmp_path, layer.in_warp_order(), config={"quantization_config": OMNI})
    x = np.random.default_rng(1).normal(0, 1, (4, 128)).astype(np.float32)
    assert relative(linear(x, canonical(tmp_path, "m"), activation=False), layer.output(x, quantized=False)) > 0.5


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_smoothing_vector_without_inverse_is_refused(tmp_path: Path, bad: float) -> None:
    layer = Layer(128, 128, "nvfp4")
    layer.smooth[7] = bad
    write(tmp_path, layer, "nvfp4", nunchaku=False)
    with pytest.raises(InvalidCheckpointError, match="smooth_factor"):
        canonical(tmp_path, "m")


def test_parts_are_never_fused(tmp_path: Path) -> None:
    tensors: Shapes = {}
    for part in ("to_q", "to_k", "to_v"):
        tensors |= shapes(f"transformer_blocks.0.attn.{part}", 128, 128)
    found = resolve(tmp_path, OMNI, tensors, config={"_class_name": "QwenImageTransformer2DModel"})
    assert len(found.modules) == 3
    assert len(plan(tmp_path, "cpu").layers) == 3
