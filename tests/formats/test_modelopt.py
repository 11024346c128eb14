"""ModelOpt: both spellings, every algorithm, exclusion by name and glob, whitelists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniplat
from omniplat.oracle import element_values
from tests.support.checkpoints import bf16, fp8_tensor, mxfp8, write_checkpoint, write_shard
from tests.support.resolving import codes, only, resolve, schemes
from tests.support.values import values_of

FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}


def nvfp4(module: str, n: int, k: int, *, inputs: bool = True) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{module}.weight": ("U8", (n, k // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (n, k // 16)),
        f"{module}.weight_scale_2": ("F32", ()),
    }
    return tensors | ({f"{module}.input_scale": ("F32", ())} if inputs else {})


INT4_AWQ = {"m.weight": ("U8", (32, 128)), "m.weight_scale": ("F32", (64, 1))}


@pytest.mark.parametrize(
    ("algorithm", "tensors", "scheme"),
    [
        ("FP8", fp8_tensor("m", 64, 64), "fp8-tensor/fp8-tensor-static"),
        (
            "FP8_PER_CHANNEL_PER_TOKEN",
            {"m.weight": ("F8_E4M3", (64, 64)), "m.weight_scale": ("F32", (64,))},
            "fp8-channel/fp8-token",
        ),
        (
            "fp8_pb_wo",
            {"m.weight": ("F8_E4M3", (256, 200)), "m.weight_scale": ("F32", (2, 1, 2, 1))},
            "fp8-block128x128/a16",
        ),
        ("NVFP4", nvfp4("m", 64, 64), "nvfp4/nvfp4"),
        ("W4A16_NVFP4", nvfp4("m", 64, 64, inputs=False), "nvfp4/a16"),
        ("MXFP8", mxfp8("m", 64, 64), "mxfp8/mxfp8"),
        ("mxfp4", {"m.weight": ("U8", (64, 32)), "m.weight_scale": ("U8", (64, 2))}, "mxfp4/mxfp4"),
        ("W4A16_AWQ", INT4_AWQ, "int4-g128/a16"),
        ("W4A8_AWQ", {**INT4_AWQ, "m.input_scale": ("F32", ()), "m.weight_scale_2": ("F32", ())},
         "int4-g128/fp8-tensor-static"),
        ("W8A8_SQ_PER_CHANNEL", {"m.weight": ("I8", (64, 64)), "m.weight_scale": ("F32", (64,)),
                                 "m.input_scale": ("F32", ())}, "int8-channel/int8-tensor-static"),
        ("W8A16", {"m.weight": ("I8", (64, 64)), "m.weight_scale": ("F32", (64,))}, "int8-channel/a16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_every_algorithm_in_both_spellings(
    tmp_path: Path, algorithm: str, tensors: Any, scheme: str, nested: bool
) -> None:
    content = {"quant_algo": algorithm, "group_size": 128}
    if nested:
        files = {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": content}}
        found = resolve(tmp_path, None, tensors, files=files)
    else:
        found = resolve(tmp_path, {"quant_method": "modelopt", **content}, tensors)
    assert schemes(found) == {"m": scheme}
    assert codes(found) == []


def test_a_smoothing_vector_belongs_to_the_scheme(tmp_path: Path) -> None:
    tensors = {**INT4_AWQ, "m.pre_quant_scale": ("BF16", (128,))}
    found = resolve(tmp_path, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, tensors)
    assert [m.scheme.pre_scale for m in found.modules] == [True]


def test_groups_without_activations_are_weight_only(tmp_path: Path) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}, "input_activations": None}}
    found = resolve(
        tmp_path,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups},
        nvfp4("m", 64, 64, inputs=False),
    )
    assert schemes(found) == {"m": "nvfp4/a16"}


@pytest.mark.parametrize(
    ("entry", "floats", "overreach"),
    [
        ("model.layers.1.a", ["model.layers.1.a"], []),
        ("model.layers.1", ["model.layers.1.a"], ["model.layers.10.a"]),
        ("model.layers.1*", ["model.layers.1.a"], ["model.layers.10.a"]),
        ("*layers.1.*", ["model.layers.1.a"], []),
    ],
)
def test_exclusions_are_bounded_by_dots(tmp_path: Path, entry: str, floats: list[str], overreach: list[str]) -> None:
    names = ["model.layers.1.a", "model.layers.10.a", "model.layers.2.a"]
    tensors: dict[str, Any] = {}
    for name in names:
        tensors |= {f"{name}.weight": bf16(64, 64)} if name in floats else fp8_tensor(name, 64, 64)
    found = resolve(tmp_path, {**FP8, "ignore": [entry]}, tensors)
    assert {name for name, scheme in schemes(found).items() if scheme == "bf16/a16"} == set(floats)
    assert [f.modules for f in found.findings if f.code == "rule-overreach"] == (
        [tuple(overreach)] if overreach else []
    )


def test_a_whitelist_speaks_of_nothing_else(tmp_path: Path) -> None:
    layers = {"l.out_proj": {"quant_algo": "FP8"}, "l.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    tensors = {
        **fp8_tensor("l.out_proj", 64, 64),
        "l.in_proj_a.weight": bf16(64, 64),
        **nvfp4("l.mlp.experts.0.w1", 64, 64),
        **nvfp4("l.mlp.experts.1.w1", 64, 64),
    }
    found = resolve(
        tmp_path, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, tensors
    )
    assert schemes(found) == {
        "l.out_proj": "fp8-tensor/fp8-tensor-static",
        "l.in_proj_a": "bf16/a16",
        "l.mlp.experts.0.w1": "nvfp4/nvfp4",
        "l.mlp.experts.1.w1": "nvfp4/nvfp4",
    }
    assert codes(found, severity="error") == []


@pytest.mark.parametrize("same", [True, False])
def test_two_files_that_disagree(tmp_path: Path, same: bool) -> None:
    nested = {"quant_algo": "FP8", "exclude_modules": ["lm_head"] if same else []}
    tensors = {**fp8_tensor("m", 64, 64), "lm_head.weight": bf16(64, 64)}
    files = {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": nested}}
    found = resolve(tmp_path, {**FP8, "ignore": ["lm_head"]}, tensors, files=files)
    assert codes(found) == ([] if same else ["metadata-conflict"])


def test_quantized_although_excluded(tmp_path: Path) -> None:
    found = resolve(
        tmp_path,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        {**nvfp4("m", 64, 64), **nvfp4("lm_head", 64, 64)},
    )
    assert schemes(found)["lm_head"] == "nvfp4/nvfp4"
    assert only(found, "tensors-contradict-config").severity == "warning"


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_2", "input_scale"])
def test_each_role_is_needed(tmp_path: Path, leaf: str) -> None:
    tensors = {k: v for k, v in nvfp4("m", 64, 64).items() if not k.endswith("." + leaf)}
    found = resolve(tmp_path, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors)
    assert schemes(found)["m"].endswith("invalid")
    assert "missing-tensor" in codes(found)


@pytest.mark.parametrize("algorithm", ["W4A4_LUT_FP3", "", "NVFP5"])
def test_an_unknown_algorithm_is_named_with_its_file(tmp_path: Path, algorithm: str) -> None:
    found = resolve(tmp_path, {"quant_method": "modelopt", "quant_algo": algorithm}, fp8_tensor("m", 64, 64))
    problem = only(found, "unsupported-option")
    assert repr(algorithm) in problem.message
    assert "config.json" in problem.message


def test_what_a_single_file_leaves_open_is_said(tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    write_shard(tmp_path / "x.safetensors", nvfp4("m", 128, 256), metadata={"quantization_config": json.dumps(config)})
    plan = omniplat.plan(tmp_path / "x.safetensors", "cpu")
    assert [(f.severity, "tiled" in f.message) for f in plan.findings if f.code == "known-quirk"] == [("warning", True)]


@pytest.mark.parametrize("stated", [True, False])
def test_nvfp4_in_groups_of_32(tmp_path: Path, stated: bool) -> None:
    tensors = {
        "m.weight": ("U8", (64, 64)),
        "m.weight_scale": ("F8_E4M3", (64, 4)),
        "m.weight_scale_2": ("F32", ()),
        "m.input_scale": ("F32", ()),
    }
    config = {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8", **({"group_size": 32} if stated else {})}
    found = resolve(tmp_path, config, tensors)
    assert schemes(found) == {"m": "nvfp4-g32/fp8-tensor-static"}
    assert codes(found) == []


def test_the_scale_of_a_single_tile_may_be_a_scalar(tmp_path: Path) -> None:
    tensors = {"m.weight": ("F8_E4M3", (128, 64)), "m.weight_scale": ("F32", ())}
    found = resolve(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, tensors)
    assert schemes(found) == {"m": "fp8-block128x128/a16"}
    assert codes(found) == []


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_real", "FP8_BLOCK_SCALES"])
@pytest.mark.parametrize("mixed", [False, True])
def test_names_of_block_scales(tmp_path: Path, algorithm: str, mixed: bool) -> None:
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": algorithm}
    if mixed:
        layers = {"m": {"quant_algo": algorithm}, "n": {"quant_algo": None}}
        config |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    tensors = {"m.weight": ("F8_E4M3", (256, 128)), "m.weight_scale": ("F32", (2, 1))}
    found = resolve(tmp_path, config, tensors | ({"n.weight": bf16(64, 64)} if mixed else {}))
    assert schemes(found)["m"] == "fp8-block128x128/a16"
    assert codes(found) == []


@pytest.mark.parametrize("entry", ["self_attn", "attn", "0.self_attn", "q_proj", "self_attn.q_proj"])
def test_part_of_a_name_excludes_where_the_tensors_say_so(tmp_path: Path, entry: str) -> None:
    q, up = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [entry]}
    found = resolve(tmp_path, config, {f"{q}.weight": bf16(64, 64), **fp8_tensor(up, 64, 64)})
    assert schemes(found) == {q: "bf16/a16", up: "fp8-tensor/fp8-tensor-static"}
    assert codes(found) == ["rule-readings-differ"]


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
@pytest.mark.parametrize(("experts", "n", "k"), [(2, 64, 32), (3, 32, 32), (1, 32, 64)])
def test_stacks_lie_in_columns(tmp_path: Path, algorithm: str, experts: int, n: int, k: int) -> None:
    """gpt-oss and Llama 4 keep an expert as [K, N]: packed along K, group scales [K / 16, N], other scales for all."""
    name = f"{EXPERTS}.down_proj"
    random = np.random.default_rng(n + k)
    tensors: dict[str, Any] = {
        f"{name}_weight_scale": ("F32", ()), f"{name}_input_scale": ("F32", ()), f"{name}_bias": ("BF16", (experts, n)),
    }  # fmt: skip
    half = np.float32(0.5).tobytes()
    data = {f"{name}_weight_scale": half, f"{name}_input_scale": half}
    if algorithm == "FP8":
        code = random.integers(0, 120, (experts, k, n), dtype=np.uint8)
        tensors[name] = ("F8_E4M3", code.shape)
        expected = element_values("fp8_e4m3")[code] * 0.5
    else:
        code = random.integers(0, 256, (experts, k // 2, n), dtype=np.uint8)
        scale = random.integers(1, 120, (experts, k // 16, n), dtype=np.uint8)
        tensors |= {name: ("U8", code.shape), f"{name}_weight_scale": ("F8_E4M3", scale.shape),
                    f"{name}_weight_scale_2": ("F32", ())}  # fmt: skip
        data |= {f"{name}_weight_scale": scale.tobytes(), f"{name}_weight_scale_2": half}
        table = element_values("fp4_e2m1")
        number = np.stack([table[code & 15], table[code >> 4]], axis=2).reshape(experts, k, n)
        expected = number * np.repeat(element_values("fp8_e4m3")[scale], 16, axis=1) * 0.5
    data[name] = code.tobytes()
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    found = resolve(tmp_path, config, tensors, values=data, config={"model_type": "gpt_oss"})
    (module,) = found.modules
    assert (module.name, module.status, module.experts) == (name, "ok", experts)
    assert (module.out_features, module.in_features) == (n, k)
    assert codes(found) == []
    for expert in range(experts):
        np.testing.assert_array_equal(values_of(found, name, expert), expected[expert].T)
    np.testing.assert_array_equal(values_of(found, name), expected.swapaxes(1, 2))


def test_a_layer_of_experts_in_columns_is_planned_and_runs(tmp_path: Path) -> None:
    experts, hidden, inner = 2, 64, 32
    shapes = {"gate_up_proj": (experts, hidden, 2 * inner), "down_proj": (experts, inner, hidden)}
    tensors: dict[str, Any] = {}
    for leaf, shape in shapes.items():
        tensors |= {f"{EXPERTS}.{leaf}": ("F8_E4M3", shape), f"{EXPERTS}.{leaf}_weight_scale": ("F32", ()),
                    f"{EXPERTS}.{leaf}_input_scale": ("F32", ())}  # fmt: skip
    ones = {name: np.float32(1).tobytes() for name in tensors if name.endswith("_scale")}
    config = {"model_type": "gpt_oss", "num_local_experts": experts, "num_experts_per_tok": 1, "hidden_size": hidden,
              "quantization_config": FP8}  # fmt: skip
    write_checkpoint(tmp_path, config, tensors, values=ones)
    (layer,) = omniplat.plan(tmp_path, "cpu").layers
    assert (layer.status, layer.name, layer.stored) == ("ok", EXPERTS, "fp8-tensor")
    assert set(omniplat.load(tmp_path)) == {EXPERTS}


def test_scales_along_the_rows_of_a_stack_are_refused(tmp_path: Path) -> None:
    """modelopt's MXFP8 of such stacks groups along N, which no product of [M, K] and [K, N] can take out of its sum."""
    name = f"{EXPERTS}.gate_up_proj"
    tensors = {name: ("F8_E4M3", (2, 64, 128)), f"{name}_weight_scale": ("U8", (2, 64, 4))}
    found = resolve(tmp_path, {"quant_method": "modelopt", "quant_algo": "MXFP8"}, tensors)
    assert [m.status for m in found.modules] == ["invalid"]
    assert "fits no granularity" in only(found, "tensors-contradict-config").message
