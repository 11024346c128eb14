"""HQQ's packings and quanto's tensors: values against packing by hand, metadata of both spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import bf16
from tests.support.resolving import codes, only, resolve, schemes
from tests.support.values import values_of


def hqq(bits: Any, group: int | None, **more: Any) -> dict[str, Any]:
    params = {"nbits": bits, "group_size": group, "axis": 1, "channel_wise": True, **more}
    config = {"weight_quant_params": params, "scale_quant_params": None, "zero_quant_params": None}
    return {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}


class Packed:
    """Random codes in HQQ's layout: rows are groups, the first range of rows lies in the highest bits of a word."""

    def __init__(self, n: int, k: int, bits: int, group: int) -> None:
        random = np.random.default_rng(bits)
        rows = n * k // group
        code = random.integers(0, 2**bits, (rows, group))
        per_word = 10 if bits == 3 else 8 // bits
        top = 27 if bits == 3 else 8 - bits
        padded = np.zeros((-(-rows // per_word) * per_word, group), np.int64)
        padded[:rows] = code
        ranges = padded.reshape(per_word, -1, group)
        words = sum(ranges[i] << (top - bits * i) for i in range(per_word))
        self.words = np.asarray(words).astype(np.int32 if bits == 3 else np.uint8)
        self.scale = random.uniform(0.1, 1, (rows, 1)).astype(np.float32)
        self.zero = random.uniform(0, 2**bits, (rows, 1)).astype(np.float32)
        self.values = ((code - self.zero.astype(float)) * self.scale.astype(float)).reshape(n, k)
        self.state = {
            "shape": np.array([n, k], np.int64), "nbits": np.array(bits, np.int32), "axis": np.array(1, np.int32)
        }  # fmt: skip

    def tensors(self, module: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        arrays = {"W_q": self.words, "scale": self.scale, "zero": self.zero, **self.state}
        names = {np.dtype(np.uint8): "U8", np.dtype(np.int32): "I32", np.dtype(np.int64): "I64",
                 np.dtype(np.float32): "F32"}  # fmt: skip
        shapes = {f"{module}.{leaf}": (names[array.dtype], array.shape) for leaf, array in arrays.items()}
        return shapes, {f"{module}.{leaf}": array.tobytes() for leaf, array in arrays.items()}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(12, 64, 32), (8, 128, 128), (24, 16, 16)])
def test_values_survive(tmp_path: Path, bits: int, n: int, k: int, group: int) -> None:
    made = Packed(n, k, bits, group)
    shapes, data = made.tensors("m")
    found = resolve(tmp_path, hqq(bits, group if group < k else None), shapes, values=data)
    assert schemes(found) == {"m": f"uint{bits}-{f'g{group}' if group < k else 'channel'}/a16"}
    assert codes(found) in ([], ["rule-matches-nothing"])
    assert np.allclose(values_of(found, "m"), made.values, rtol=0, atol=1e-5)


def test_one_shape_for_each_module(tmp_path: Path) -> None:
    a, da = Packed(16, 64, 4, 32).tensors("a")
    b, db = Packed(32, 32, 4, 32).tensors("b")
    found = resolve(tmp_path, hqq(4, 32), {**a, **b}, values={**da, **db})
    assert [(m.out_features, m.in_features) for m in found.modules] == [(16, 64), (32, 32)]


@pytest.mark.parametrize("shape", [[0, 0], [16, 65], [-16, 64], [1 << 60, 64]])
def test_a_shape_that_does_not_fit(tmp_path: Path, shape: list[int]) -> None:
    made = Packed(16, 64, 4, 32)
    made.state["shape"] = np.array(shape, np.int64)
    shapes, data = made.tensors("m")
    found = resolve(tmp_path, hqq(4, 32), shapes, values=data)
    assert found.modules[0].status == "invalid"
    assert codes(found, severity="error") != []


@pytest.mark.parametrize(
    ("change", "key"),
    [({"nbits": 5}, "nbits"), ({"axis": 2}, "axis")],
)
def test_options_of_hqq(tmp_path: Path, change: Any, key: str) -> None:
    found = resolve(tmp_path, hqq(4, 64, **change), {"m.weight": bf16(8, 8)})
    assert only(found, "unsupported-option").where.rule.endswith(key)


def test_settings_for_quantized_scales_are_without_effect(tmp_path: Path) -> None:
    """hqq writes no file with quantized scales: it ignores the setting, and its older releases refused to save them."""
    config = hqq(4, 32)
    config["quant_config"]["scale_quant_params"] = {"nbits": 8, "group_size": 128}
    made = Packed(16, 64, 4, 32)
    shapes, data = made.tensors("m")
    found = resolve(tmp_path / "plain", config, shapes, values=data)
    assert schemes(found) == {"m": "uint4-g32/a16"}
    assert "no effect" in only(found, "known-quirk").message
    assert np.allclose(values_of(found, "m"), made.values, rtol=0, atol=1e-5)
    quantized = {name.replace("scale", "scale_q"): value for name, value in shapes.items()}
    left = {name: value for name, value in data.items() if name in quantized}
    found = resolve(tmp_path / "quantized", config, quantized, values=left)
    assert found.modules[0].status == "invalid"
    assert only(found, "missing-tensor").message


def test_one_configuration_for_each_kind_of_layer(tmp_path: Path) -> None:
    a, da = Packed(16, 64, 4, 32).tensors("l.0.self_attn.q_proj")
    b, db = Packed(16, 64, 8, 64).tensors("l.0.mlp.up_proj")
    kinds = {"self_attn.q_proj": {"nbits": 4, "group_size": 32}, "mlp.up_proj": {"nbits": 8, "group_size": None}}
    tensors = {**a, **b, "l.0.mlp.gate.weight": bf16(8, 8)}
    found = resolve(tmp_path, {"quant_method": "hqq", "quant_config": kinds}, tensors, values={**da, **db})
    assert schemes(found) == {
        "l.0.mlp.gate": "bf16/a16",
        "l.0.mlp.up_proj": "uint8-channel/a16",
        "l.0.self_attn.q_proj": "uint4-g32/a16",
    }
    assert codes(found) == []


def quanto(module: str, dtype: str, n: int, k: int) -> dict[str, Any]:
    return {
        f"{module}.weight._data": (dtype, (n, k)),
        f"{module}.weight._scale": ("F32", (n, 1)),
        f"{module}.input_scale": ("F32", ()),
        f"{module}.output_scale": ("F32", ()),
    }


@pytest.mark.parametrize(
    ("name", "old", "dtype", "scheme"),
    [
        ("int8", "qint8", "I8", "int8-channel/a16"),
        ("float8", "qfloat8", "F8_E4M3", "fp8-channel/a16"),
        ("float8", "qfloat8_e4m3fn", "F8_E4M3", "fp8-channel/a16"),
    ],
)
def test_quanto_in_both_spellings(tmp_path: Path, name: str, old: str, dtype: str, scheme: str) -> None:
    tensors = {**quanto("a.m", dtype, 16, 32), "lm_head.weight": bf16(8, 8)}
    config = {"quant_method": "quanto", "weights": name, "activations": None, "modules_to_not_convert": None}
    found = resolve(tmp_path / "config", config, tensors)
    assert schemes(found) == {"a.m": scheme, "lm_head": "bf16/a16"}
    assert codes(found) == []
    files = {"quanto_qmap.json": {"a.m": {"weights": old, "activations": "none"}}}
    mapped = resolve(tmp_path / "map", None, tensors, files=files)
    assert (mapped.format, schemes(mapped), codes(mapped)) == ("quanto", schemes(found), [])


def test_calibrated_activations_are_static(tmp_path: Path) -> None:
    config = {"quant_method": "quanto", "weights": "int8", "activations": "int8"}
    assert schemes(resolve(tmp_path, config, quanto("m", "I8", 16, 32))) == {"m": "int8-channel/int8-tensor-static"}


@pytest.mark.parametrize(("key", "value"), [("weights", "int3"), ("activations", "int4")])
def test_types_without_a_scheme(tmp_path: Path, key: str, value: str) -> None:
    config = {"quant_method": "quanto", "weights": "int8", "activations": None, key: value}
    found = resolve(tmp_path, config, {"m.weight": bf16(8, 8)})
    assert only(found, "unsupported-option").where.rule.endswith(key)
