"""Quark: specifications, packings, layer patterns, layer types and exclusions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omniplat.oracle import element_values
from tests.support.checkpoints import bf16, fp8_channel, fp8_tensor
from tests.support.resolving import codes, only, resolve, schemes
from tests.support.values import values_of

EXPORT = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}


def spec(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": True, "group_size": None, **more}


FP8 = spec("fp8_e4m3", "per_tensor")
FP4 = spec("fp4", "per_group", group_size=32, scale_format="e8m0", symmetric=None)
NVFP4 = [
    spec("fp4", "per_group", group_size=16, scale_format="float32"),
    spec("fp8_e4m3", "per_tensor", is_scale_quant=True),
]
RUNTIME_FP4 = {**FP4, "is_dynamic": True}


def quark(weight: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    whole = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "export": EXPORT, "global_quant_config": whole, "exclude": [], **more}


def mxfp4(module: str, n: int, k: int) -> dict[str, Any]:
    return {f"{module}.weight": ("U8", (n, k // 2)), f"{module}.weight_scale": ("U8", (n, k // 32))}


def int4(module: str, n: int, k: int, group: int) -> dict[str, Any]:
    return {
        f"{module}.weight": ("I32", (k, n // 8)),
        f"{module}.weight_scale": ("F32", (k // group, n)),
        f"{module}.weight_zero_point": ("I32", (k // group, n // 8)),
    }


@pytest.mark.parametrize(
    ("weight", "inputs", "tensors", "scheme"),
    [
        (FP8, FP8, fp8_tensor("m", 64, 96), "fp8-tensor/fp8-tensor-static"),
        (spec("fp8_e4m3", "per_channel"), spec("fp8_e4m3", "per_token", is_dynamic=True),
         {"m.weight": ("F8_E4M3", (64, 96)), "m.weight_scale": ("F32", (64,))}, "fp8-channel/fp8-token"),
        (spec("fp8_e4m3", "per_block", block_size=[128, 128]), spec("fp8_e4m3", "per_group", group_size=128,
                                                                  is_dynamic=True),
         {"m.weight": ("F8_E4M3", (256, 128)), "m.weight_scale": ("F32", (2, 1))}, "fp8-block128x128/fp8-g128"),
        (FP4, RUNTIME_FP4, mxfp4("m", 64, 64), "mxfp4/mxfp4"),
        (FP4, None, mxfp4("m", 64, 64), "mxfp4/a16"),
        (FP4, FP8, {**mxfp4("m", 64, 64), "m.input_scale": ("F32", ())}, "mxfp4/fp8-tensor-static"),
        (spec("fp6_e2m3", "per_group", group_size=32, scale_format="e8m0"), None,
         {"m.weight": ("U8", (64, 48)), "m.weight_scale": ("U8", (64, 2))}, "mxfp6e2m3/a16"),
        (spec("mx", "per_group", group_size=32, mx_element_dtype="fp6_e3m2"), None,
         {"m.weight": ("U8", (64, 48)), "m.weight_scale": ("U8", (64, 2))}, "mxfp6e3m2/a16"),
        (NVFP4, [{**NVFP4[0], "is_dynamic": True}, NVFP4[1]],
         {"m.weight": ("U8", (64, 32)), "m.weight_scale": ("F8_E4M3", (64, 4)), "m.weight_scale_2": ("F32", ()),
          "m.input_scale_2": ("F32", ())}, "nvfp4/nvfp4"),
        (spec("int8", "per_tensor"), spec("int8", "per_tensor"),
         {"m.weight": ("I8", (64, 96)), "m.weight_scale": ("F32", ()), "m.weight_zero_point": ("I8", ()),
          "m.input_scale": ("F32", ()), "m.input_zero_point": ("I8", ())}, "int8-tensor/int8-tensor-static"),
        (spec("int8", "per_channel"), spec("int8", "per_token", is_dynamic=True),
         {"m.weight": ("I8", (64, 96)), "m.weight_scale": ("F32", (64,)), "m.weight_zero_point": ("I8", (64,))},
         "int8-channel/int8-token"),
        (spec("int4", "per_group", group_size=32), None, int4("m", 64, 128, 32), "int4-g32/a16"),
        (spec("uint4", "per_group", group_size=64, symmetric=False), None, int4("m", 64, 128, 64), "uint4-g64/a16"),
        (spec("int4", "per_channel"), None, {"m.weight": ("I32", (64, 16)), "m.weight_scale": ("F32", (64,))},
         "int4-channel/a16"),
        (spec("int4", "per_tensor"), None, {"m.weight": ("I32", (64, 16)), "m.weight_scale": ("F32", ())},
         "int4-tensor/a16"),
        (spec("uint8", "per_channel", symmetric=False), None,
         {"m.weight": ("U8", (64, 96)), "m.weight_scale": ("F32", (64,)), "m.weight_zero_point": ("U8", (64,))},
         "uint8-channel/a16"),
    ],
)  # fmt: skip
def test_every_specification(tmp_path: Path, weight: Any, inputs: Any, tensors: Any, scheme: str) -> None:
    found = resolve(tmp_path, quark(weight, inputs), tensors)
    assert schemes(found) == {"m": scheme}
    assert codes(found) == []
    assert found.modules[0].declared is not None
    assert found.modules[0].declared.id == scheme


@pytest.mark.parametrize("mode", ["even", "floor", "ceil"])
def test_the_rule_of_power_of_two_scales_is_the_exporters(tmp_path: Path, mode: str) -> None:
    inputs = {**RUNTIME_FP4, "scale_calculation_mode": mode}
    activation = resolve(tmp_path, quark(FP4, inputs), mxfp4("m", 8, 64)).modules[0].scheme.activation
    assert activation is not None
    assert activation.scale_rule == mode


@pytest.mark.parametrize(("method", "order"), [("reorder", (0, 4, 1, 5, 2, 6, 3, 7)), ("order", tuple(range(8)))])
@pytest.mark.parametrize("signed", [True, False])
def test_words_hold_twos_complement(tmp_path: Path, method: str, order: tuple[int, ...], signed: bool) -> None:
    """Eight rows of one column a word; row `i` of a block lies in nibble `order[i]`."""
    n, k, group = 16, 64, 32
    random = np.random.default_rng(3)
    codes_ = random.integers(0, 16, (k, n))
    zero = np.zeros((k // group, n), int) if signed else random.integers(0, 16, (k // group, n))
    scale = random.uniform(0.1, 1, (k // group, n)).astype(np.float32)

    def words(values: Any) -> bytes:
        blocks = values.reshape(values.shape[0], -1, 8)
        packed = sum(blocks[:, :, i].astype(np.uint64) << np.uint64(4 * order[i]) for i in range(8))
        return np.asarray(packed).astype(np.uint32).tobytes()

    data = {"m.weight": words(codes_), "m.weight_zero_point": words(zero), "m.weight_scale": scale.tobytes()}
    dtype = "int4" if signed else "uint4"
    config = quark(
        spec(dtype, "per_group", group_size=group, symmetric=signed), export={**EXPORT, "pack_method": method}
    )
    found = resolve(tmp_path, config, int4("m", n, k, group), values=data)
    values = element_values("int4")[codes_] if signed else codes_ - np.repeat(zero, group, axis=0)
    expected = (values * np.repeat(scale.astype(float), group, axis=0)).T
    assert (values_of(found, "m") == expected).all()


@pytest.mark.parametrize(("method", "order"), [("reorder", (0, 4, 1, 5, 2, 6, 3, 7)), ("order", tuple(range(8)))])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("per", ["channel", "tensor"])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (64, 64), (64, 16), (20, 24)])
def test_words_run_along_rows_where_no_group_has_a_scale(
    tmp_path: Path, method: str, order: tuple[int, ...], signed: bool, per: str, n: int, k: int
) -> None:
    """Only per group does the tool transpose: nothing but the shape of the scale shows it where N = K."""
    random = np.random.default_rng(n)
    rows = n if per == "channel" else 1
    codes_ = random.integers(0, 16, (n, k))
    zero = np.zeros(rows, int) if signed else random.integers(0, 16, rows)
    scale = random.uniform(0.1, 1, rows).astype(np.float32)

    def words(values: Any) -> bytes:
        padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % 8)])
        blocks = padded.reshape(*padded.shape[:-1], -1, 8)
        packed = sum(blocks[..., i].astype(np.uint64) << np.uint64(4 * order[i]) for i in range(8))
        return np.asarray(packed).astype(np.uint32).tobytes()

    shape = (n,) if per == "channel" else ()
    tensors = {"m.weight": ("I32", (n, k // 8)), "m.weight_scale": ("F32", shape)}
    data = {"m.weight": words(codes_), "m.weight_scale": scale.tobytes()}
    if per == "channel":
        tensors["m.weight_zero_point"] = ("I32", (-(-n // 8),))
        data["m.weight_zero_point"] = words(zero)
    else:
        tensors["m.weight_zero_point"] = ("I32", ())
        data["m.weight_zero_point"] = zero.astype(np.int32).tobytes()
    dtype = "int4" if signed else "uint4"
    config = quark(spec(dtype, f"per_{per}", symmetric=signed), export={**EXPORT, "pack_method": method})
    found = resolve(tmp_path, config, tensors, values=data)
    assert schemes(found) == {"m": f"{dtype}-{per}/a16"}
    values = element_values("int4")[codes_] if signed else codes_ - zero.reshape(-1, 1)
    assert (values_of(found, "m") == values * scale.astype(float).reshape(-1, 1)).all()


def test_six_bits_are_a_little_endian_stream(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    codes_ = random.integers(0, 64, (8, 64))
    bits = ((codes_[..., None] >> np.arange(6)) & 1).reshape(8, -1).astype(np.uint8)
    data = {"m.weight": np.packbits(bits, axis=1, bitorder="little").tobytes(), "m.weight_scale": bytes([127] * 16)}
    config = quark(spec("fp6_e2m3", "per_group", group_size=32, scale_format="e8m0"))
    found = resolve(tmp_path, config, {"m.weight": ("U8", (8, 48)), "m.weight_scale": ("U8", (8, 2))}, values=data)
    assert (values_of(found, "m") == element_values("fp6_e2m3")[codes_]).all()


LAYERS = {**mxfp4("l.0.mlp.up_proj", 64, 64), **fp8_tensor("l.0.self_attn.o_proj", 64, 64)}
OVERRIDE = {"weight": FP8, "input_tensors": FP8, "output_tensors": None, "bias": None}


@pytest.mark.parametrize("pattern", ["*self_attn*", "*.o_proj", "l.0.self_attn.o_proj", "l.?.self_attn.o_proj"])
def test_layer_patterns_are_globs_over_the_whole_name(tmp_path: Path, pattern: str) -> None:
    found = resolve(tmp_path, quark(FP4, RUNTIME_FP4, layer_quant_config={pattern: OVERRIDE}), LAYERS)
    assert schemes(found) == {
        "l.0.mlp.up_proj": "mxfp4/mxfp4",
        "l.0.self_attn.o_proj": "fp8-tensor/fp8-tensor-static",
    }
    assert codes(found) == []


def test_a_layer_type_covers_what_no_pattern_names(tmp_path: Path) -> None:
    """Engines compare class objects with these names and never match: the tensors tell that the producer did."""
    config = quark(FP4, RUNTIME_FP4, layer_type_quant_config={"<class 'torch.nn.modules.linear.Linear'>": OVERRIDE})
    found = resolve(tmp_path, config, fp8_tensor("a.b", 64, 64))
    assert schemes(found) == {"a.b": "fp8-tensor/fp8-tensor-static"}
    assert found.modules[0].decided_by.reading == "producer"
    assert codes(found) == ["rule-readings-differ"]


@pytest.mark.parametrize("entry", ["l.1.mlp.gate", "re:.*\\.gate$", "*.gate", "l.1.mlp"])
def test_exclusions(tmp_path: Path, entry: str) -> None:
    tensors = {**mxfp4("l.0.mlp.up_proj", 64, 64), "l.1.mlp.gate.weight": bf16(8, 8), "l.10.mlp.x.weight": bf16(8, 8)}
    found = resolve(tmp_path, quark(FP4, exclude=[entry]), tensors)
    assert {m.name: m.declared.id for m in found.modules if m.declared}["l.1.mlp.gate"] == "bf16/a16"
    assert only(found, "tensors-contradict-config").modules == ("l.10.mlp.x",)


@pytest.mark.parametrize(
    ("weight", "key"),
    [
        (spec("int5", "per_tensor"), "dtype"),
        (spec("fp8_e4m3", "per_head"), "qscheme"),
        (spec("fp4", "per_group", group_size=64, scale_format="e8m0"), "group_size"),
        ([spec("int4", "per_channel"), FP8], "weight[0]"),
    ],
)
def test_specifications_without_a_scheme(tmp_path: Path, weight: Any, key: str) -> None:
    found = resolve(tmp_path, quark(weight), {"m.weight": bf16(8, 8)})
    assert only(found, "unsupported-option").where.rule.endswith(key)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"exclude": [None]}, "exclude"),
        ({"global_quant_config": []}, "global_quant_config"),
        ({"global_quant_config": {"weight": ["fp4"]}}, "weight"),
        ({"global_quant_config": {"weight": {**FP8, "dtype": 8}}}, "dtype"),
        ({"global_quant_config": {"weight": spec("int4", "per_group", group_size=-2)}}, "group_size"),
        ({"layer_quant_config": {"a": 3}}, "layer_quant_config.a"),
        ({"export": "none"}, "export"),
    ],
)
def test_wrong_types_name_their_key(tmp_path: Path, change: Any, key: str) -> None:
    found = resolve(tmp_path, {**quark(FP8), **change}, {"m.weight": bf16(8, 8)})
    assert only(found, "metadata-unreadable").where.rule.endswith(key)


def test_words_without_metadata_are_not_guessed(tmp_path: Path) -> None:
    found = resolve(tmp_path, None, int4("m", 64, 128, 32))
    assert schemes(found)["m"].endswith("invalid")


@pytest.mark.parametrize(
    ("algorithm", "refused"),
    [
        ({"name": "rotation", "r1": True, "r2": True, "r3": True, "r4": False}, set()),
        ({"name": "rotation", "r1": True, "r4": True}, {"a.down_proj"}),
        ({"name": "rotation", "online_r1_rotation": True}, {"a.down_proj", "a.up_proj"}),
        ({"name": "quarot", "online_had": True}, {"a.down_proj", "a.up_proj"}),
        ({"name": "rotation", "online_config": {"online_rotation_layers": ["a.up_proj"]}}, {"a.up_proj"}),
        ({"name": "smooth", "alpha": 0.5}, set()),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_a_rotation_at_run_time_is_refused(tmp_path: Path, algorithm: Any, refused: set[str], listed: bool) -> None:
    specification = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": False}
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": specification},
        "exclude": ["lm_head"],
        "algo_config": [algorithm] if listed else algorithm,
    }
    tensors = fp8_channel("a.up_proj", 64, 64) | fp8_channel("a.down_proj", 64, 64) | {"lm_head.weight": bf16(64, 64)}
    found = schemes(resolve(tmp_path, config, tensors))
    assert {name for name, scheme in found.items() if scheme.endswith("unsupported")} == refused


def test_a_layer_without_a_specification_is_not_quantized(tmp_path: Path) -> None:
    specification = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": False}
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": specification, "bias": specification},
        "layer_quant_config": {"*n": None},
    }
    found = resolve(tmp_path, config, fp8_channel("m", 64, 64) | {"n.weight": bf16(64, 64)})
    assert schemes(found) == {"m": "fp8-channel/a16", "n": "bf16/a16"}
    assert "global_quant_config.bias" in only(found, "known-quirk").message
