"""vllm-omni's own formats: flags, engine names in `ignored_layers`, numbers in containers, dual-level scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat import plan
from omniplat.errors import InvalidCheckpointError
from omniplat.formats.omni_native import checkpoint_names
from omniplat.oracle import dequantize, linear
from tests.support.arrays import canonical, relative, run, write_arrays
from tests.support.checkpoints import bf16, mxfp8
from tests.support.resolving import codes, only, resolve, schemes

Shapes = dict[str, tuple[str, tuple[int, ...]]]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dual(module: str, n: int, k: int, container: str = "F8_E4M3") -> Shapes:
    columns = k // 2 if container == "U8" else k
    return {
        f"{module}.weight": (container, (n, columns)),
        f"{module}.weight_scale": ("U8", (n, k // 32)),
        f"{module}.weight_dual_scale": ("F32", (n, -(-k // 512), 1)),
        f"{module}.mul_scale": ("F32", (k,)),
    }


def serialized(method: str, **extra: Any) -> dict[str, Any]:
    flag = {
        "mxfp8": "is_checkpoint_mxfp8_serialized",
        "mxfp4": "is_checkpoint_mxfp4_serialized",
        "mxfp4_dualscale": "is_checkpoint_serialized",
        "int8": "is_checkpoint_int8_serialized",
    }[method]
    return {"quant_method": method, flag: True, **extra}


@pytest.mark.parametrize(
    ("method", "tensors", "scheme"),
    [
        ("mxfp8", mxfp8("m", 64, 96), "mxfp8/mxfp8"),
        ("mxfp8", {"m.weight": bf16(64, 96), "m.weight_scale": ("U8", (64, 3))}, "mxfp8/mxfp8"),
        ("mxfp4", {"m.weight": ("F8_E4M3", (64, 96)), "m.weight_scale": ("U8", (64, 3))}, "mxfp4/mxfp4"),
        ("mxfp4", {"m.weight": bf16(64, 96), "m.weight_scale": ("U8", (64, 3))}, "mxfp4/mxfp4"),
        ("mxfp4", {"m.weight": ("U8", (64, 48)), "m.weight_scale": ("U8", (64, 3))}, "mxfp4/mxfp4"),
        ("mxfp4_dualscale", dual("m", 64, 1024), "mxfp4-dual/mxfp4-dual"),
        ("mxfp4_dualscale", dual("m", 64, 1536, "I8"), "mxfp4-dual/mxfp4-dual"),
        ("mxfp4_dualscale", dual("m", 64, 1024, "U8"), "mxfp4-dual/mxfp4-dual"),
        ("int8", {"m.weight": ("I8", (64, 96)), "m.weight_scale": ("F32", (64, 1))}, "int8-channel/int8-token"),
    ],
)
def test_every_method_and_container(tmp_path: Path, method: str, tensors: Shapes, scheme: str) -> None:
    found = resolve(tmp_path, serialized(method), tensors)
    assert schemes(found) == {"m": scheme}
    assert codes(found) == []
    assert found.modules[0].scheme.pre_scale is ("m.mul_scale" in tensors)


def test_the_same_tensors_without_the_method_are_mxfp8(tmp_path: Path) -> None:
    """fp4 numbers in an fp8 container look like MXFP8: only the metadata tells."""
    tensors: Shapes = {"m.weight": ("F8_E4M3", (64, 96)), "m.weight_scale": ("U8", (64, 3))}
    assert schemes(resolve(tmp_path, None, tensors)) == {"m": "mxfp8/a16"}


@pytest.mark.parametrize("method", ["mxfp8", "mxfp4_dualscale", "int8"])
def test_without_the_flag_it_is_a_wish_for_a_16_bit_checkpoint(tmp_path: Path, method: str) -> None:
    found = resolve(tmp_path, {"quant_method": method}, {"m.weight": bf16(64, 64)})
    assert schemes(found) == {"m": "bf16/a16"}
    assert codes(found) == []


def test_a_layer_that_the_merge_tool_left_out_of_the_list(tmp_path: Path) -> None:
    """vllm-omni would build it quantized, with a scale that no file has."""
    found = resolve(tmp_path, serialized("mxfp8"), {**mxfp8("a", 64, 64), "proj_out.weight": bf16(64, 64)})
    assert schemes(found)["proj_out"] == "bf16/a16"
    assert only(found, "tensors-contradict-config").severity == "warning"


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("blocks.0.attn1.to_qkv", {"blocks.0.attn1.to_q", "blocks.0.attn1.to_k", "blocks.0.attn1.to_v"}),
        ("b.attn.add_kv_proj", {"b.attn.add_q_proj", "b.attn.add_k_proj", "b.attn.add_v_proj"}),
        ("blocks.3.attn2.to_out", {"blocks.3.attn2.to_out.0"}),
        ("blocks.3.ffn.net_0.proj", {"blocks.3.ffn.net.0.proj"}),
        ("blocks.3.ffn.net_2", {"blocks.3.ffn.net.2"}),
        ("proj_out", set()),
    ],
)
def test_engine_names_expand_to_checkpoint_names(entry: str, names: set[str]) -> None:
    assert set(checkpoint_names(entry, {})) == {entry, *names}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["to_qkv", "to_qkv_x", "net_0", "net_00", "attn", "to_out", "0"]), min_size=1, max_size=4)
)
def test_expansion_touches_whole_segments_only(parts: list[str]) -> None:
    names = checkpoint_names(".".join(parts), {})
    assert names[0] == ".".join(parts)
    for name in names:
        assert name.count("to_qkv_x") == parts.count("to_qkv_x")
        assert name.count("net_00") == parts.count("net_00")


def test_the_packing_table_of_the_model_is_used_too() -> None:
    assert "b.attn.wq" in checkpoint_names("b.attn.w_all", {"attn.w_all": ("attn.wq", "attn.wk")})


def test_engine_names_of_one_block_leave_the_next_alone(tmp_path: Path) -> None:
    tensors: Shapes = {}
    for block in (1, 10):
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            name = f"blocks.{block}.attn1.{part}"
            tensors |= {f"{name}.weight": bf16(64, 64)} if block == 1 else mxfp8(name, 64, 64)
    config = serialized("mxfp8", ignored_layers=["blocks.1.attn1.to_qkv", "blocks.1.attn1.to_out"])
    found = resolve(tmp_path, config, tensors, config={"model_type": "x", "_class_name": "WanTransformer3DModel"})
    assert codes(found) == []
    assert {name: scheme.startswith("mxfp8") for name, scheme in schemes(found).items()} == {
        name: name.startswith("blocks.10") for name in schemes(found)
    }


def test_an_entry_that_only_the_documentation_understands(tmp_path: Path) -> None:
    """The engine compares whole names: `img_mlp` skips nothing there, though it reads like a pattern."""
    tensors: Shapes = {"b.0.img_mlp.net.0.proj.weight": bf16(64, 64), **mxfp8("b.0.attn.to_q", 64, 64)}
    found = resolve(tmp_path, serialized("mxfp8", ignored_layers=["img_mlp"]), tensors)
    assert schemes(found)["b.0.img_mlp.net.0.proj"] == "bf16/a16"
    assert only(found, "rule-readings-differ").severity == "warning"


@pytest.mark.parametrize(
    ("config", "code", "key"),
    [
        (serialized("int8", activation_scheme="static"), "unsupported-option", "activation_scheme"),
        (serialized("int8", activation_scheme=3), "metadata-unreadable", "activation_scheme"),
        (serialized("mxfp8", ignored_layers={"a": 1}), "metadata-unreadable", "ignored_layers"),
        ({"quant_method": "mxfp8", "is_checkpoint_mxfp8_serialized": "yes"}, "metadata-unreadable", "serialized"),
    ],
)
def test_wrong_values_name_file_and_key(tmp_path: Path, config: Any, code: str, key: str) -> None:
    finding = only(resolve(tmp_path, config, mxfp8("m", 64, 64)), code)
    assert finding.where.file == "config.json"
    assert key in finding.where.rule


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_dual_scale"])
def test_a_missing_level_is_missing(tmp_path: Path, leaf: str) -> None:
    tensors = dual("m", 64, 1024)
    del tensors[f"m.{leaf}"]
    found = resolve(tmp_path, serialized("mxfp4_dualscale"), tensors)
    assert found.modules[0].status == "invalid"
    assert leaf in only(found, "missing-tensor").message


def test_gpt_oss_keeps_its_method(tmp_path: Path) -> None:
    tensors: Shapes = {
        "a.mlp.experts.down_proj_blocks": ("U8", (2, 64, 2, 16)),
        "a.mlp.experts.down_proj_scales": ("U8", (2, 64, 2)),
    }
    found = resolve(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, tensors)
    assert found.format == "mxfp4"


# --- one config for all components ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("component", "scheme"),
    [("transformer", "fp8-tensor/fp8-tensor-static"), ("transformer_2", "bf16/a16"), ("vae", "bf16/a16")],
)
def test_a_dict_of_components_gives_each_its_own(tmp_path: Path, component: str, scheme: str) -> None:
    import json

    from tests.support.checkpoints import fp8_tensor, write_checkpoint

    entry = {"transformer": {"method": "fp8", "activation_scheme": "static"}, "transformer_2": None, "default": None}
    index = {"_class_name": "P", component: ["diffusers", "X"]}
    tensors = fp8_tensor("m", 64, 64) if component == "transformer" else {"m.weight": bf16(64, 64)}
    write_checkpoint(tmp_path / component, {"quantization_config": entry}, tensors)
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (layer,) = plan(tmp_path, "cpu").layers
    assert f"{layer.stored}/{(layer.declared or '/a16').partition('/')[2]}" == scheme
    assert [f.code for f in plan(tmp_path, "cpu").findings if f.severity != "note"] == []


# --- values ----------------------------------------------------------------------------------------------------------


def numbers(seed: int, n: int, k: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    return random.choice(E2M1, (n, k)) * random.choice([-1.0, 1.0], (n, k))


@pytest.mark.parametrize("k", [1024, 576, 96])
@pytest.mark.parametrize("container", ["F8_E4M3", "BF16", "U8", "I8"])
def test_dual_level_values_are_the_product_of_three(tmp_path: Path, container: str, k: int) -> None:
    n = 6
    values = numbers(0, n, k)
    if container == "I8":
        values = np.trunc(values)
        values[np.abs(values) == 5] = 4
    exponents = np.random.default_rng(1).integers(120, 130, (n, k // 32)).astype(np.uint8)
    level0 = np.random.default_rng(2).uniform(0.1, 2, (n, -(-k // 512), 1)).astype(np.float32)
    smooth = np.random.default_rng(3).uniform(0.5, 2, k).astype(np.float32)
    if container == "U8":
        code = np.array([[E2M1.index(abs(v)) | (8 if np.signbit(v) else 0) for v in row] for row in values], np.uint8)
        stored: Any = code[:, 0::2] | (code[:, 1::2] << 4)
    else:
        dtype = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "I8": np.int8}[container]
        stored = values.astype(dtype)
    arrays = {
        "m.weight": stored,
        "m.weight_scale": exponents,
        "m.weight_dual_scale": level0,
        "m.mul_scale": smooth,
        "m.bias": np.linspace(-1, 1, n).astype(np.float32),
    }
    write_arrays(tmp_path, arrays, config={"quantization_config": serialized("mxfp4_dualscale")})
    wanted = np.empty((n, k))
    for row in range(n):
        for column in range(k):
            scale = 2.0 ** (int(exponents[row, column // 32]) - 127) * float(level0[row, column // 512, 0])
            wanted[row, column] = values[row, column] * scale
    weight = canonical(tmp_path, "m")
    np.testing.assert_allclose(dequantize(weight), wanted, rtol=1e-12)
    x = np.random.default_rng(4).normal(0, 1, (3, k)).astype(np.float32)
    plain = (x.astype(np.float64) * smooth) @ wanted.T + arrays["m.bias"]
    np.testing.assert_allclose(linear(x, weight, activation=False), plain, rtol=1e-9)
    assert 0.01 < relative(linear(x, weight), plain) < 0.3
    assert relative(run(tmp_path, "m", x), linear(x, weight)) < 1e-5


def test_numbers_that_are_not_fp4_are_refused(tmp_path: Path) -> None:
    arrays = {
        "m.weight": np.full((4, 32), 2.5, ml_dtypes.float8_e4m3fn),
        "m.weight_scale": np.full((4, 1), 127, np.uint8),
    }
    write_arrays(tmp_path, arrays, config={"quantization_config": serialized("mxfp4")})
    with pytest.raises(InvalidCheckpointError, match="not fp4"):
        canonical(tmp_path, "m")


def test_fp8_numbers_in_a_bf16_container(tmp_path: Path) -> None:
    values = np.random.default_rng(5).normal(0, 40, (4, 64)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[120, 130]] * 4, np.uint8)
    arrays = {"m.weight": values.astype(ml_dtypes.bfloat16), "m.weight_scale": scale}
    write_arrays(tmp_path, arrays, config={"quantization_config": serialized("mxfp8")})
    wanted = values.astype(np.float64) * np.repeat([2.0**-7, 8.0], 32)
    np.testing.assert_array_equal(dequantize(canonical(tmp_path, "m")), wanted)


def test_int8_runs_as_tokens(tmp_path: Path) -> None:
    q = np.random.default_rng(6).integers(-127, 128, (8, 64)).astype(np.int8)
    scale = np.linspace(0.001, 0.01, 8, dtype=np.float32)[:, None]
    write_arrays(tmp_path, {"m.weight": q, "m.weight_scale": scale}, config={"quantization_config": serialized("int8")})
    x = np.random.default_rng(7).normal(0, 1, (4, 64)).astype(np.float32)
    step = np.abs(x).max(1, keepdims=True) / np.float32(127)
    wanted = (np.rint(x / step).astype(np.int64) @ q.T.astype(np.int64)) * step * scale.T.astype(np.float64)
    assert relative(run(tmp_path, "m", x), wanted) < 1e-6
