"""What is done where every reading of the rules says something that the tensors are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import bf16, fp8_channel, fp8_tensor, gptq, int4_packed, mxfp8
from tests.support.resolving import codes, only, resolve, schemes

LAYERS = tuple(f"model.layers.{i}.mlp.{leaf}" for i in (0, 1, 10, 11) for leaf in ("gate", "gate_proj"))
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True, "group_size": None}


def compressed(ignore: str) -> dict[str, Any]:
    groups = {"g": {"targets": ["Linear"], "weights": INT4, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": [ignore],
    }


def quark(exclude: str) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": QUARK_FP8, "input_tensors": QUARK_FP8},
        "exclude": [exclude],
    }


def dialect(name: str, pattern: str) -> tuple[dict[str, Any], Any]:
    """A configuration that excludes `pattern`, and the maker of a module that it does not exclude."""
    if name == "compressed-tensors":
        return compressed(f"re:{pattern}"), lambda module: int4_packed(module, 64, 64, 64)
    if name == "gptq":
        return {**GPTQ, "dynamic": {f"-:{pattern}": {}}}, lambda module: gptq(module, 64, 64, 4, 64)
    if name == "modelopt":
        return {**MODELOPT, "ignore": [pattern]}, lambda module: fp8_tensor(module, 64, 64)
    assert name == "quark"
    return quark(pattern), lambda module: fp8_tensor(module, 64, 64)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("compressed-tensors", r".*layers.1.*"),
        ("compressed-tensors", r"^model\.layers\.1.*$"),
        ("gptq", r".*layers\.1.*"),
        ("gptq", r"model\.layers\.1"),
        ("modelopt", "*layers.1*"),
        ("quark", "*layers.1*"),
        ("quark", "model.layers.1*"),
        ("quark", r"re:^model\.layers\.1.*$"),
    ],
)
def test_a_pattern_that_swallows_other_layers_overreaches(tmp_path: Path, name: str, pattern: str) -> None:
    config, quantized = dialect(name, pattern)
    tensors: dict[str, Any] = {}
    for module in LAYERS:
        tensors |= {f"{module}.weight": bf16(64, 64)} if ".1." in module else quantized(module)
    found = resolve(tmp_path, config, tensors)
    floats = {module for module, scheme in schemes(found).items() if scheme == "bf16/a16"}
    assert floats == {module for module in LAYERS if ".1." in module}
    (scheme,) = {scheme for module, scheme in schemes(found).items() if module not in floats}
    assert {module.declared.id for module in found.modules if module.declared and module.name not in floats} == {scheme}
    assert only(found, "rule-overreach").modules == tuple(m for m in sorted(LAYERS) if ".10." in m or ".11." in m)
    assert codes(found) == ["rule-overreach"]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("compressed-tensors", r".*gate.*"), ("gptq", r".*\.gate.*"), ("modelopt", "*gate*"), ("quark", "*gate*")],
)
def test_a_pattern_for_routers_that_swallows_projections(tmp_path: Path, name: str, pattern: str) -> None:
    config, quantized = dialect(name, pattern)
    tensors: dict[str, Any] = {}
    for module in LAYERS:
        tensors |= {f"{module}.weight": bf16(64, 64)} if module.endswith("gate") else quantized(module)
    found = resolve(tmp_path, config, tensors)
    assert only(found, "rule-overreach").modules == tuple(sorted(m for m in LAYERS if m.endswith("gate_proj")))
    assert codes(found) == ["rule-overreach"]


def test_a_rule_that_no_module_confirms_is_a_contradiction_and_no_overreach(tmp_path: Path) -> None:
    config, quantized = dialect("quark", "*mlp*")
    found = resolve(tmp_path, config, quantized("a.mlp") | quantized("b"))
    assert codes(found) == ["tensors-contradict-config"]
    assert schemes(found)["a.mlp"] == "fp8-tensor/fp8-tensor-static"


def test_an_override_that_reaches_too_far_leaves_the_default(tmp_path: Path) -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": INT4, "input_activations": None},
        "b": {"targets": ["re:.*layers.1.*"], "weights": FP8_CHANNEL, "input_activations": FP8_TOKEN},
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": []}
    tensors = {**fp8_channel("layers.1.x", 64, 64), **int4_packed("layers.10.x", 64, 64, 64)}
    found = resolve(tmp_path, config, tensors)
    assert schemes(found) == {"layers.1.x": "fp8-channel/fp8-token", "layers.10.x": "int4-g64/a16"}
    assert only(found, "rule-overreach").modules == ("layers.10.x",)


@pytest.mark.parametrize("stored", [mxfp8("b", 64, 64), fp8_channel("b", 64, 64)], ids=["mxfp8", "fp8-channel"])
def test_a_complete_module_of_another_scheme_lacks_no_scale_of_the_declared_one(tmp_path: Path, stored: Any) -> None:
    """Its weight is beyond doubt; the static activation was declared for another weight."""
    found = resolve(tmp_path, MODELOPT, fp8_tensor("a", 64, 64) | stored)
    assert only(found, "tensors-contradict-config").severity == "warning"
    assert codes(found) == ["tensors-contradict-config"]
    assert {m.name: m.status for m in found.modules} == {"a": "ok", "b": "ok"}
    assert schemes(found)["b"].endswith("/a16")


def test_the_declared_scheme_without_its_static_scale_is_incomplete(tmp_path: Path) -> None:
    tensors = fp8_tensor("a", 64, 64)
    del tensors["a.input_scale"]
    found = resolve(tmp_path, MODELOPT, tensors)
    assert only(found, "missing-tensor").severity == "error"
    assert [m.status for m in found.modules] == ["invalid"]


def test_a_head_that_is_said_to_be_left_out_and_is_not(tmp_path: Path) -> None:
    tensors = gptq("a", 64, 64, 4, 64) | gptq("lm_head", 64, 64, 4, 64)
    found = resolve(tmp_path, {**GPTQ, "lm_head": False}, tensors)
    assert only(found, "tensors-contradict-config").modules == ("lm_head",)
    assert schemes(found)["lm_head"] == "int4-g64/a16"
    assert codes(resolve(tmp_path / "b", {**GPTQ, "lm_head": True}, tensors)) == []


@pytest.mark.parametrize("head", ["lm_head", "head", "model.layers.2.shared_head.head"])
def test_output_heads_are_left_out_without_being_listed(tmp_path: Path, head: str) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    tensors = {"a.weight": ("F8_E4M3", (64, 64)), "a.weight_scale": ("F32", ()), f"{head}.weight": bf16(64, 64)}
    assert codes(resolve(tmp_path, config, tensors)) == []
    tensors["b.weight"] = bf16(64, 64)
    assert only(resolve(tmp_path / "b", config, tensors), "tensors-contradict-config").modules == ("b",)


def test_a_scale_whose_weight_is_in_no_shard(tmp_path: Path) -> None:
    tensors = fp8_channel("a", 64, 64) | fp8_channel("b", 64, 64)
    del tensors["b.weight"]
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": FP8_CHANNEL, "input_activations": FP8_TOKEN}},
    }
    found = only(resolve(tmp_path, config, tensors), "missing-tensor")
    assert (found.severity, found.modules) == ("error", ("b",))
    assert "b.weight " in found.message


def test_a_scale_of_inputs_whose_scale_is_computed_is_explained_by_nothing(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    found = only(resolve(tmp_path, config, fp8_tensor("a", 64, 64)), "unexpected-tensor")
    assert "input_scale" in found.message
    assert codes(resolve(tmp_path / "b", {**config, "activation_scheme": "static"}, fp8_tensor("a", 64, 64))) == []


def test_a_shape_that_is_no_metadata_tensor_is_not_read(tmp_path: Path) -> None:
    tensors = int4_packed("a", 64, 64, 64) | {"a.weight_shape": ("I64", (1024,)), "b.weight": bf16(64, 64)}
    found = resolve(tmp_path, {**MODELOPT, "ignore": ["b"]}, tensors)
    assert only(found, "tensors-contradict-config").modules == ("a",)


@pytest.mark.parametrize(
    ("declared", "inputs", "tensors", "scheme"),
    [
        ("tensor", {"strategy": "token", "dynamic": True}, fp8_channel("m", 64, 64), "fp8-channel/fp8-token"),
        ("channel", {"strategy": "token", "dynamic": True}, fp8_tensor("m", 64, 64), "fp8-tensor/fp8-token"),
        ("channel", {"strategy": "tensor"}, fp8_tensor("m", 64, 64), "fp8-tensor/fp8-tensor-static"),
        ("tensor", {"strategy": "tensor"}, fp8_channel("m", 64, 64), "fp8-channel/a16"),
        ("tensor", {"strategy": "token", "dynamic": True}, mxfp8("m", 64, 64), "mxfp8/fp8-token"),
        ("tensor", {"strategy": "token", "dynamic": True}, int4_packed("m", 64, 128, 64), "int4-g64/a16"),
    ],
)
def test_scales_that_cover_more_or_less_than_declared_leave_the_activation(
    tmp_path: Path, declared: str, inputs: dict[str, Any], tensors: Any, scheme: str
) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": declared}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "float", **inputs}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": group}}
    found = resolve(tmp_path, config, tensors)
    assert schemes(found) == {"m": scheme}
    assert "tensors-contradict-config" in codes(found)
