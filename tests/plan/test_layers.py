"""From modules to layers: what fuses, what stays apart, what makes a layer invalid."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import omniplat
from omniplat.document import Plan, PlanLayer
from tests.support.checkpoints import bf16, fp8_tensor, gptq, int4_packed, mxfp4, mxfp8, write_checkpoint

FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
MX = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:llm_compressor",
    "bits": 4,
    "group_size": 32,
    "data_type": "mx_fp",
    "extra_config": {".*v_proj": {"bits": 8}},
}
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
}
A = "model.layers.0.self_attn"


def plan_of(
    folder: Path, quantization: Any, tensors: Any, device: str = "cpu", *, config: Any = None, **more: Any
) -> Plan:
    values = more.pop("values", None)
    write_checkpoint(folder, {**LLAMA, **(config or {}), "quantization_config": quantization}, tensors, values=values)
    return omniplat.plan(folder, device, **more)


def names(plan: Plan) -> list[str]:
    return [layer.name for layer in plan.layers]


def codes(plan: Plan) -> dict[str, str]:
    return {item.code: item.severity for item in plan.findings}


def qkv(make: Any = fp8_tensor) -> dict[str, Any]:
    return {**make(f"{A}.q_proj", 128, 128), **make(f"{A}.k_proj", 64, 128), **make(f"{A}.v_proj", 64, 128)}


def test_parts_of_one_scheme_fuse_in_row_order(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, FP8, qkv())
    (layer,) = plan.layers
    assert layer.name == f"{A}.qkv_proj"
    assert layer.modules == (f"{A}.k_proj", f"{A}.q_proj", f"{A}.v_proj")
    assert layer.shape == {"out": 256, "in": 128}
    assert layer.executes == "fp8-tensor/fp8-tensor-static"


def test_parts_of_different_schemes_are_layers_of_their_own(tmp_path: Path) -> None:
    tensors = {**mxfp4(f"{A}.q_proj", 128, 128), **mxfp4(f"{A}.k_proj", 64, 128), **mxfp8(f"{A}.v_proj", 64, 128)}
    plan = plan_of(tmp_path, MX, tensors)
    assert {layer.name: layer.stored for layer in plan.layers} == {
        f"{A}.q_proj": "mxfp4",
        f"{A}.k_proj": "mxfp4",
        f"{A}.v_proj": "mxfp8",
    }
    assert codes(plan)["mixed-fused-shards"] == "note"
    assert plan.ok


def test_one_float_part_is_a_mixture_too(tmp_path: Path) -> None:
    tensors = {**qkv(), f"{A}.v_proj.weight": bf16(64, 128)}
    tensors = {k: v for k, v in tensors.items() if not (k.startswith(f"{A}.v_proj") and "scale" in k)}
    plan = plan_of(tmp_path, {**FP8, "ignore": [f"{A}.v_proj"]}, tensors)
    assert {layer.name.rpartition(".")[2]: layer.status for layer in plan.layers} == {
        "q_proj": "ok",
        "k_proj": "ok",
        "v_proj": "unquantized",
    }
    assert codes(plan)["mixed-fused-shards"] == "note"


def test_parts_that_see_their_input_differently_are_not_fused(tmp_path: Path) -> None:
    scales = {f"{A}.{p}.input_scale": struct.pack("<f", v) for p, v in (("q_proj", 1), ("k_proj", 1), ("v_proj", 2))}
    plan = plan_of(tmp_path, FP8, qkv(), values=scales)
    assert len(plan.layers) == 3
    (note,) = [f for f in plan.findings if f.code == "mixed-fused-shards"]
    assert "input_scale" in note.message


def test_a_missing_part_shrinks_the_quorum(tmp_path: Path) -> None:
    tensors = {k: v for k, v in qkv().items() if "v_proj" not in k}
    (layer,) = plan_of(tmp_path, FP8, tensors).layers
    assert layer.name == f"{A}.qkv_proj"
    assert len(layer.modules) == 2


def test_parts_with_a_group_order_of_their_own_stay_apart(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    for part, rows in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
        tensors |= int4_packed(f"{A}.{part}", rows, 128, 64) | {f"{A}.{part}.weight_g_idx": ("I32", (128,))}
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 64,
        "symmetric": True,
        "actorder": "group",
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    plan = plan_of(tmp_path, {"quant_method": "compressed-tensors", "config_groups": groups}, tensors)
    assert len(plan.layers) == 3
    assert plan.ok


def test_an_unknown_family_is_planned_unfused_with_a_note(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, FP8, qkv(), config={"model_type": "never-heard-of-it"})
    assert len(plan.layers) == 3
    assert codes(plan)["unknown-family"] == "note"


def experts(layer: int, count: int = 4, make: Any = mxfp4) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for index in range(count):
        base = f"model.layers.{layer}.mlp.experts.{index}"
        tensors |= (
            make(f"{base}.gate_proj", 64, 128) | make(f"{base}.up_proj", 64, 128) | make(f"{base}.down_proj", 128, 64)
        )
    return tensors


MOE = {"model_type": "qwen3_moe", "num_experts": 4}


def moe_layer(plan: Plan, layer: int = 0) -> PlanLayer:
    return plan.layer(f"model.layers.{layer}.mlp.experts")


def test_experts_are_one_layer(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, MX, experts(0), config=MOE)
    layer = moe_layer(plan)
    assert layer.op == "moe"
    assert layer.shape == {"out": 128, "in": 128, "intermediate": 64, "experts": 4}
    assert len(layer.modules) == 12
    assert layer.legal_ep == (1, 2, 4)


def test_w13_and_w2_may_differ(tmp_path: Path) -> None:
    settings = {**MX, "extra_config": {".*down_proj": {"bits": 8}}}
    plan = plan_of(tmp_path, settings, w4_and_w8_experts(), config=MOE)
    assert moe_layer(plan).stored == "mxfp4+mxfp8"
    assert moe_layer(plan).status == "ok"
    assert moe_layer(plan).executes == "mxfp4/a16+mxfp8/a16"
    assert plan.summary.by_scheme == {"mxfp4/a16+mxfp8/a16": 1}


W4A4 = {**MX, "act_bits": 4, "act_data_type": "mx_fp", "act_dynamic": True}


def w4_and_w8_experts() -> dict[str, Any]:
    tensors = {k: v for k, v in experts(0).items() if ".down_proj." not in k}
    for index in range(4):
        tensors |= mxfp8(f"model.layers.0.mlp.experts.{index}.down_proj", 128, 64)
    return tensors


def test_what_w2_executes_instead_is_noted_like_that_of_w13(tmp_path: Path) -> None:
    down = {".*down_proj": {"bits": 8, "act_bits": 8}}
    plan = plan_of(tmp_path, {**W4A4, "extra_config": down}, w4_and_w8_experts(), "cuda:sm90", config=MOE)
    assert moe_layer(plan).executes == "mxfp4/a16+mxfp8/a16"
    noted = {module: item for item in plan.findings if item.code == "weight-only" for module in item.modules}
    assert noted.keys() == set(moe_layer(plan).modules)
    for module, item in noted.items():
        assert item.message.endswith("mxfp8/a16" if module.endswith("down_proj") else "mxfp4/a16")


def test_both_schemes_of_experts_that_nothing_runs_are_named(tmp_path: Path) -> None:
    down = {".*down_proj": {"bits": 8, "act_bits": 8}}
    plan = plan_of(tmp_path, {**W4A4, "extra_config": down}, w4_and_w8_experts(), "npu:a5", config=MOE)
    (refused,) = [item for item in plan.findings if item.code == "unsupported-combination"]
    assert f"{moe_layer(plan).declared}" in refused.message
    assert refused.modules_total == 12


@pytest.mark.parametrize("prefer", ["memory", "speed"])
@pytest.mark.parametrize(
    "device", ["npu:a2", "npu:a3", "npu:a5", "rocm:gfx942", "rocm:gfx950", "cuda:sm89", "cuda:sm90"]
)
def test_what_takes_more_than_it_is_stored_in_is_said(tmp_path: Path, device: str, prefer: str) -> None:
    """Whatever is preferred; that there is no other way is said where memory is."""
    plan = plan_of(tmp_path, W4A4, experts(0), device, config=MOE, prefer=prefer)
    grown = {module for layer in plan.layers if layer.resident_bytes > layer.stored_bytes for module in layer.modules}
    noted = [item for item in plan.findings if item.code == "kept-larger"]
    assert {module for item in noted for module in item.modules} == grown
    for item in noted:
        assert item.severity == "note"
        assert ("has no kernel" in item.message) == (prefer == "memory")
    if device == "npu:a2":
        assert grown, "its kernels know no MX: there is no other way"


@pytest.mark.parametrize("declared", [None, MX, {"quant_method": "fp8"}])
def test_tensors_that_fit_no_scheme_are_not_called_one(tmp_path: Path, declared: dict[str, Any] | None) -> None:
    name = "model.layers.0.mlp.down_proj"
    tensors = {f"{name}.weight": ("U8", (64, 33)), f"{name}.weight_scale": ("F32", (5, 7))}
    layer = plan_of(tmp_path, declared, tensors).layer(name)
    assert (layer.status, layer.stored, layer.container) == ("invalid", "unknown", "U8")


@pytest.mark.parametrize("odd", ["gate_proj", "down_proj"])
def test_one_expert_unlike_the_others_makes_the_layer_invalid_and_is_named(tmp_path: Path, odd: str) -> None:
    name = f"model.layers.1.mlp.experts.2.{odd}"
    tensors = {k: v for k, v in (experts(0) | experts(1)).items() if not k.startswith(name)}
    shape = (128, 64) if odd == "down_proj" else (64, 128)
    plan = plan_of(tmp_path, MX, {**tensors, f"{name}.weight": bf16(*shape)}, config=MOE)
    assert moe_layer(plan, 0).status == "ok"
    assert moe_layer(plan, 1).status == "invalid"
    (error,) = [f for f in plan.findings if f.code == "mixed-fused-shards"]
    assert error.severity == "error"
    assert error.modules == (name,)


@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (64, 64), (128, 32)])
def test_experts_whose_halves_do_not_follow_each_other_make_the_layer_invalid(
    tmp_path: Path, rows: int, columns: int
) -> None:
    """A tool that cuts stacks of [K, N] as if they were [N, K] leaves experts that are consistent, and no MLP."""
    other = {k: v for k, v in experts(0).items() if ".down_proj." in k}
    for k in range(2):
        for leaf in ("gate_proj", "up_proj"):
            other |= mxfp4(f"model.layers.0.mlp.experts.{k}.{leaf}", rows, columns)
    other = {k: v for k, v in other.items() if int(k.split(".")[5]) < 2}
    plan = plan_of(tmp_path, MX, other, config={**MOE, "num_experts": 2})
    assert moe_layer(plan).status == "invalid"
    (error,) = [f for f in plan.findings if f.code == "tensors-contradict-config" and f.severity == "error"]
    assert "no gated MLP" in error.message


@pytest.mark.parametrize("lost", ["1.gate_proj", "1.down_proj", "1"])
def test_a_missing_expert_is_named(tmp_path: Path, lost: str) -> None:
    prefix = f"model.layers.0.mlp.experts.{lost}"
    tensors = {k: v for k, v in experts(0).items() if not k.startswith(prefix + ".")}
    plan = plan_of(tmp_path, MX, tensors, config=MOE)
    assert moe_layer(plan).status == "invalid"
    (error,) = [f for f in plan.findings if f.code == "missing-tensor"]
    assert all(module.startswith(prefix) for module in error.modules)


@pytest.mark.parametrize(
    ("declared", "rows", "status"), [(5, 5, "invalid"), (5, 4, "ok"), (4, 5, "ok"), (None, 5, "ok")]
)
def test_the_last_experts_are_missing_where_router_and_configuration_know_them(
    tmp_path: Path, declared: int | None, rows: int, status: str
) -> None:
    tensors = {**experts(0), "model.layers.0.mlp.gate.weight": bf16(rows, 128)}
    plan = plan_of(tmp_path, MX, tensors, config={**MOE, "num_experts": declared})
    assert moe_layer(plan).status == status
    lost = [module for item in plan.findings if item.code == "missing-tensor" for module in item.modules]
    assert len(lost) == (3 if status == "invalid" else 0)
    assert all(module.startswith("model.layers.0.mlp.experts.4.") for module in lost)


def test_norms_embeddings_and_convolutions_are_no_layers(tmp_path: Path) -> None:
    tensors = {
        **fp8_tensor("model.layers.0.mlp.down_proj", 128, 128),
        "model.embed_tokens.weight": bf16(64, 128),
        "model.norm.weight": bf16(128),
        "patch.conv.weight": bf16(8, 3, 4, 4),
        "scale_shift_table": bf16(6, 128),
    }
    assert names(plan_of(tmp_path, FP8, tensors)) == ["model.layers.0.mlp.down_proj"]


def test_a_quantized_embedding_is_a_layer(tmp_path: Path) -> None:
    tensors = {**fp8_tensor("model.embed_tokens", 64, 128), **fp8_tensor("model.layers.0.mlp.down_proj", 128, 128)}
    assert "model.embed_tokens" in names(plan_of(tmp_path, FP8, tensors))


@pytest.mark.parametrize(
    ("name", "k", "group", "legal"),
    [("o_proj", 448, 128, (1,)), ("o_proj", 512, 128, (1, 2, 4)), ("o_proj", 256, 32, (1, 2, 4, 8))],
)
def test_row_parallel_sizes_cut_no_group(tmp_path: Path, name: str, k: int, group: int, legal: tuple[int, ...]) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True}
    tensors = gptq(f"{A}.{name}", 128, k, 4, group)
    if k % group:
        tensors[f"{A}.{name}.scales"] = ("F16", (-(-k // group), 128))
        tensors[f"{A}.{name}.qzeros"] = ("I32", (-(-k // group), 16))
    plan = plan_of(tmp_path, config, tensors)
    assert [size for size in plan.layers[0].legal_tp if size in (1, 2, 4, 8)] == list(legal)


def test_an_illegal_tp_is_an_error_for_that_layer(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    plan = plan_of(tmp_path, config, gptq(f"{A}.o_proj", 128, 384, 4, 128), tp=2)
    assert plan.layers[0].status == "unsupported"
    assert codes(plan)["tp-not-divisible"] == "error"
    assert not plan.ok


def test_a_plan_survives_json(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, MX, experts(0), config=MOE)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert list(json.loads(text))[:2] == ["schema", "omniplat"]


def test_what_no_kernel_accepts_is_unsupported_with_a_reason_per_kernel(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, MX, experts(0), "npu:310p", config=MOE)
    layer = moe_layer(plan)
    assert layer.status == "unsupported"
    assert layer.executes is None
    assert all(trace.rejected for trace in layer.trace)
    assert layer.trace
    with pytest.raises(NotImplementedError, match="needs"):
        omniplat.load(tmp_path, "npu:310p")


def test_a_quirk_of_the_chosen_kernel_is_told_with_its_source(tmp_path: Path) -> None:
    """Of the kernels that run the plan, and of no other."""
    config = {**MX, "bits": 8, "extra_config": {}, "act_bits": 8, "act_data_type": "mx_fp", "act_group_size": 32}
    plan = plan_of(tmp_path, config, mxfp8(f"{A}.o_proj", 128, 128), "xpu:bmg")
    (layer,) = plan.layers
    quirks = [item for item in plan.findings if item.code == "known-quirk"]
    assert layer.kernel == "fp8_gemm_mx"
    assert quirks
    for item in quirks:
        assert item.modules == (f"{A}.o_proj",)
        assert "https://github.com/vllm-project/vllm-xpu-kernels/" in item.message
        assert item.message.startswith("fp8_gemm_mx: ")


@pytest.mark.parametrize("number", ["100000000", "9" * 18, "9" * 25, "9" * 5000])
def test_a_number_in_a_name_costs_nothing(tmp_path: Path, number: str) -> None:
    """Neither an expert's nor a block's: names come from the file, and a loop up to what they say would not end."""
    for name in (f"model.layers.0.mlp.experts.{number}", f"model.layers.{number}.mlp.experts.0"):
        tensors = {key: shape for leaf in ("gate_proj", "up_proj", "down_proj")
                   for key, shape in mxfp4(f"{name}.{leaf}", 64, 64).items()}  # fmt: skip
        plan = plan_of(tmp_path / str(len(name)), None, {**experts(0, count=2), **tensors}, config=MOE)
        assert len(plan.findings) < 10
