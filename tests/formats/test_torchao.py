"""torchao: configurations as objects and by old names, both spellings of flattened tensors, int4, tables by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omniplat.errors import InvalidCheckpointError
from omniplat.oracle import element_values
from tests.support.checkpoints import bf16
from tests.support.resolving import codes, only, resolve, schemes
from tests.support.values import values_of


def config(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": data}


def torchao(quant_type: Any, **more: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": quant_type}, "modules_to_not_convert": None, **more}


def granularity(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 1, "_data": data}


def flat(module: str, *, spelling: str = "_weight_{}", **parts: Any) -> dict[str, Any]:
    return {f"{module}.{spelling.format(name)}": value for name, value in parts.items()}


INT8 = {"qdata": ("I8", (64, 96)), "scale": ("F32", (64, 1)), "zero_point": ("I8", (64, 1))}
INT8_GROUPS = {"qdata": ("I8", (64, 96)), "scale": ("BF16", (64, 3)), "zero_point": ("I8", (64, 3))}
FLOAT8 = {"qdata": ("F8_E4M3", (64, 96)), "scale": ("F32", (64, 1))}
FLOAT8_TENSOR = {"qdata": ("F8_E4M3", (64, 96)), "scale": ("F32", (1, 1))}
FLOAT8_BLOCKS = {"qdata": ("F8_E4M3", (256, 128)), "scale": ("F32", (2, 1))}
INT4 = {"qdata": ("I8", (64, 64)), "scale": ("BF16", (4, 64)), "zero_point": ("BF16", (4, 64))}
FP4 = {"qdata": ("U8", (64, 32)), "scale": ("F8_E4M3", (64, 4)), "per_tensor_scale": ("F32", ())}
MX = {"qdata": ("F8_E4M3", (64, 64)), "scale": ("F8_E8M0", (64, 2))}


@pytest.mark.parametrize(
    ("quant_type", "parts", "scheme"),
    [
        (config("Int8WeightOnlyConfig", group_size=None, granularity=granularity("PerRow", dim=-1)), INT8,
         "int8-channel/a16"),
        (config("Int8WeightOnlyConfig", group_size=32), INT8_GROUPS, "int8-g32/a16"),
        (config("Int8WeightOnlyConfig", granularity=granularity("PerGroup", group_size=32)), INT8_GROUPS,
         "int8-g32/a16"),
        (config("Int8DynamicActivationInt8WeightConfig"), INT8, "int8-channel/int8-token"),
        (config("Float8WeightOnlyConfig"), FLOAT8, "fp8-channel/a16"),
        (config("Float8WeightOnlyConfig"), FLOAT8_TENSOR, "fp8-tensor/a16"),
        (config("Float8DynamicActivationFloat8WeightConfig"), FLOAT8_TENSOR, "fp8-tensor/fp8-tensor"),
        (config("Float8DynamicActivationFloat8WeightConfig",
                granularity=[granularity("PerTensor"), granularity("PerRow")]), FLOAT8, "fp8-channel/fp8-token"),
        (config("Float8DynamicActivationFloat8WeightConfig", granularity=granularity("PerBlock")), FLOAT8_BLOCKS,
         "fp8-block128x128/fp8-g128"),
        (config("IntxWeightOnlyConfig", weight_dtype={"_type": "torch.dtype", "_data": "int4"},
                granularity=granularity("PerGroup", group_size=32)), INT8_GROUPS, "int4-g32/a16"),
        (config("Int8DynamicActivationIntxWeightConfig", weight_dtype="torch.int4",
                weight_granularity=granularity("PerAxis", axis=0)), INT8, "int4-channel/int8-token-asym"),
        (config("Int8DynamicActivationInt4WeightConfig", group_size=32,
                act_mapping_type={"_type": "MappingType", "_data": "SYMMETRIC"}), INT8_GROUPS, "int4-g32/int8-token"),
        (config("Int4WeightOnlyConfig", group_size=32), INT4, "uint4-g32/a16"),
        (config("NVFP4DynamicActivationNVFP4WeightConfig"), FP4, "nvfp4/nvfp4"),
        (config("MXDynamicActivationMXWeightConfig", weight_dtype="float8_e4m3fn"), MX, "mxfp8/mxfp8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spelling", ["_weight_{}", "weight:{}"])
def test_every_configuration(tmp_path: Path, quant_type: Any, parts: Any, scheme: str, spelling: str) -> None:
    tensors = {**flat("m", spelling=spelling, **parts), "lm_head.weight": bf16(8, 8)}
    found = resolve(tmp_path, torchao(quant_type), tensors)
    assert schemes(found)["m"] == scheme
    assert codes(found) == []
    assert {m.declared.id for m in found.modules if m.declared and m.name == "m"} == {scheme}


@pytest.mark.parametrize(
    ("name", "arguments", "parts", "scheme"),
    [
        ("int8_weight_only", {}, INT8, "int8-channel/a16"),
        ("int4_weight_only", {"group_size": 32}, INT4, "uint4-g32/a16"),
        ("float8_weight_only", None, FLOAT8, "fp8-channel/a16"),
    ],
)
def test_old_names(tmp_path: Path, name: str, arguments: Any, parts: Any, scheme: str) -> None:
    config = {"quant_method": "torchao", "quant_type": name, "quant_type_kwargs": arguments}
    found = resolve(tmp_path, config, flat("m", **parts))
    assert schemes(found) == {"m": scheme}


def test_int4_values(tmp_path: Path) -> None:
    """w = signed code * scale + zero, scale and zero [G, N]; the even column lies in the low nibble."""
    random = np.random.default_rng(5)
    n, k, group = 8, 64, 32
    code = random.integers(-8, 8, (n, k))
    scale = random.uniform(0.5, 1, (k // group, n)).astype(np.float32)
    zero = random.uniform(-1, 1, (k // group, n)).astype(np.float32)
    packed = ((code[:, 0::2] & 15) | ((code[:, 1::2] & 15) << 4)).astype(np.uint8)
    parts = {"qdata": ("I8", (n, k // 2)), "scale": ("F32", scale.shape), "zero_point": ("F32", scale.shape)}
    data = {"m._weight_qdata": packed.tobytes(), "m._weight_scale": scale.tobytes(),
            "m._weight_zero_point": zero.tobytes()}  # fmt: skip
    found = resolve(
        tmp_path, torchao(config("Int4WeightOnlyConfig", group_size=group)), flat("m", **parts), values=data
    )
    wide = np.repeat(scale.astype(float), group, axis=0).T
    expected = code * wide + np.repeat(zero.astype(float), group, axis=0).T
    assert np.abs(values_of(found, "m") - expected).max() < 1e-5


def swizzled(scale: np.ndarray) -> np.ndarray:
    """[N, G] as torchao's `to_blocked` stores it: tiles of 128 rows and 4 groups, padded, 32 x 16 numbers each."""
    rows, groups = scale.shape
    tall, wide = -(-rows // 128), -(-groups // 4)
    padded = np.zeros((tall * 128, wide * 4), scale.dtype)
    padded[:rows, :groups] = scale
    tiles = padded.reshape(tall, 128, wide, 4).transpose(0, 2, 1, 3).reshape(-1, 4, 32, 4)
    return tiles.transpose(0, 2, 1, 3).reshape(tall * 32, wide * 16)


@pytest.mark.parametrize(("n", "k"), [(32, 64), (64, 256), (128, 128), (130, 352), (256, 1024)])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_swizzled_scales(tmp_path: Path, name: str, n: int, k: int) -> None:
    """What transformers saves of MXTensor and NVFP4Tensor: the block scales lie as the products want them."""
    random = np.random.default_rng(n + k)
    group = 16 if name == "nvfp4" else 32
    if name == "mxfp8":
        code = random.integers(0, 120, (n, k), dtype=np.uint8)
        number = element_values("fp8_e4m3")[code]
        qdata = ("F8_E4M3", (n, k))
    else:
        code = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
        table = element_values("fp4_e2m1")
        number = np.stack([table[code & 15], table[code >> 4]], axis=-1).reshape(n, k)
        qdata = ("U8", (n, k // 2))
    scale = random.integers(40, 110, (n, k // group), dtype=np.uint8)
    multiplier = element_values("fp8_e4m3")[scale] * 0.5 if name == "nvfp4" else 2.0 ** (scale.astype(float) - 127)
    stored = swizzled(scale)
    parts: dict[str, Any] = {"qdata": qdata, "scale": ("F8_E4M3" if name == "nvfp4" else "F8_E8M0", stored.shape)}
    data = {"m._weight_qdata": code.tobytes(), "m._weight_scale": stored.tobytes()}
    if name == "nvfp4":
        parts["per_tensor_scale"] = ("F32", ())
        data["m._weight_per_tensor_scale"] = np.float32(0.5).tobytes()
        quant = config("NVFP4WeightOnlyConfig", use_dynamic_per_tensor_scale=True)
    else:
        dtype = "float8_e4m3fn" if name == "mxfp8" else "float4_e2m1fn_x2"
        quant = config("MXDynamicActivationMXWeightConfig", weight_dtype=dtype, activation_dtype=dtype)
    found = resolve(tmp_path, torchao(quant), flat("m", **parts), values=data)
    assert schemes(found) == {"m": f"{name}/a16" if name == "nvfp4" else f"{name}/{name}"}
    assert codes(found) == []
    np.testing.assert_array_equal(values_of(found, "m"), number * np.repeat(multiplier, group, axis=1))


def test_scales_of_no_layout_are_refused(tmp_path: Path) -> None:
    parts = {"qdata": ("F8_E4M3", (64, 256)), "scale": ("F8_E8M0", (64, 16))}
    found = resolve(tmp_path, torchao(config("MXDynamicActivationMXWeightConfig")), flat("m", **parts))
    assert found.modules[0].status == "invalid"
    assert "fits no granularity" in only(found, "tensors-contradict-config").message


@pytest.mark.parametrize(
    ("quant_type", "rule"),
    [
        (config("Int8DynamicActivationInt8WeightConfig"), "half-range"),
        (config("Int8DynamicActivationIntxWeightConfig", weight_dtype="torch.int8",
                weight_granularity=granularity("PerAxis", axis=0)), "absmax"),
    ],
)  # fmt: skip
def test_symmetric_inputs_are_divided_by_half_the_range_of_codes(tmp_path: Path, quant_type: Any, rule: str) -> None:
    """`choose_qparams_affine`: amax / 127.5 where codes run from -128 to 127; (high - low) / 255 for a range."""
    found = resolve(tmp_path, torchao(quant_type), flat("m", **INT8))
    activation = found.modules[0].scheme.activation
    assert activation is not None
    assert activation.scale_rule == rule


def test_zero_points_of_a_symmetric_weight_have_to_be_zero(tmp_path: Path) -> None:
    parts = {"qdata": ("I8", (2, 4)), "scale": ("F32", (2, 1)), "zero_point": ("I8", (2, 1))}
    data = {"m._weight_scale": np.ones(2, np.float32).tobytes(), "m._weight_zero_point": b"\0\1"}
    found = resolve(tmp_path, torchao(config("Int8WeightOnlyConfig")), flat("m", **parts), values=data)
    with pytest.raises(InvalidCheckpointError, match="zero points differ"):
        values_of(found, "m")


@pytest.mark.parametrize("shape", [(64, 12), (8, 2, 32, 4)])
def test_layouts_of_a_device_are_understood_and_refused(tmp_path: Path, shape: Any) -> None:
    parts = {"qdata": ("I32", shape), "scale_and_zero": ("BF16", (8, 64, 2))}
    found = resolve(tmp_path, torchao(config("Int4WeightOnlyConfig", group_size=32)), flat("m", **parts))
    assert found.modules[0].status == "unsupported"
    assert found.modules[0].out_features == 64
    assert only(found, "unsupported-option").modules == ("m",)


TABLE = {
    "_default": config("Int8WeightOnlyConfig"),
    "a.skipped": None,
    "a.float": config("Float8WeightOnlyConfig"),
    "re:b\\..*_proj": config("Float8WeightOnlyConfig"),
}


@pytest.mark.parametrize("place", ["inside", "beside", "old"])
def test_configurations_by_module_name(tmp_path: Path, place: str) -> None:
    tensors = {
        **flat("a.default", **INT8),
        **flat("a.float", **FLOAT8),
        **flat("b.q_proj", **FLOAT8),
        "a.skipped.weight": bf16(8, 8),
    }
    inside = torchao(config("FqnToConfig", fqn_to_config=TABLE))
    beside = {"quant_method": "torchao", "quant_type": None, "module_fqn_to_config": TABLE}
    old = torchao(config("ModuleFqnToConfig", module_fqn_to_config=TABLE))
    found = resolve(tmp_path, {"inside": inside, "beside": beside, "old": old}[place], tensors)
    assert schemes(found) == {
        "a.default": "int8-channel/a16",
        "a.float": "fp8-channel/a16",
        "a.skipped": "bf16/a16",
        "b.q_proj": "fp8-channel/a16",
    }
    assert codes(found) == []


def test_skipped_names_bind_on_dots(tmp_path: Path) -> None:
    tensors = {**flat("model.layers.10.mlp.up", **INT8), "model.layers.1.mlp.up.weight": bf16(8, 8)}
    found = resolve(tmp_path, torchao(config("Int8WeightOnlyConfig"), modules_to_not_convert=["layers.1"]), tensors)
    assert [m.declared.id for m in found.modules if m.declared] == ["bf16/a16", "int8-channel/a16"]
    assert codes(found, severity="error") == []


@pytest.mark.parametrize(
    ("quantization", "code", "key"),
    [
        (torchao(config("Int3FancyConfig")), "unsupported-option", "_data"),
        ({"quant_method": "torchao", "quant_type": "int3_fancy"}, "unsupported-option", "quant_type"),
        (torchao(config("IntxWeightOnlyConfig", weight_dtype="int12")), "unsupported-option", "weight_dtype"),
        (torchao(config("Int8WeightOnlyConfig", group_size="32")), "metadata-unreadable", "group_size"),
        ({"quant_method": "torchao", "quant_type": 7}, "metadata-unreadable", "quant_type"),
        (torchao(config("Float8WeightOnlyConfig", weight_dtype=8)), "metadata-unreadable", "weight_dtype"),
        ({"quant_method": "torchao"}, "metadata-unreadable", "quant_type"),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path: Path, quantization: Any, code: str, key: str) -> None:
    found = resolve(tmp_path, quantization, {"m.weight": bf16(8, 8)})
    assert only(found, code).where.rule.endswith(key)
