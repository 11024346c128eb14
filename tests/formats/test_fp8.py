"""`quant_method: fp8`: granularities, activations, skip lists under three readings, DeepSeek-V4's experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import bf16, fp8_channel, fp8_tensor
from tests.support.resolving import codes, only, resolve, schemes

FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCK = {**FP8, "weight_block_size": [128, 128]}


def block(module: str, n: int, k: int, scale: str = "F32", leaf: str = "weight_scale_inv") -> dict[str, Any]:
    return {f"{module}.weight": ("F8_E4M3", (n, k)), f"{module}.{leaf}": (scale, (-(-n // 128), -(-k // 128)))}


@pytest.mark.parametrize(
    ("quantization", "tensors", "scheme"),
    [
        ({**FP8, "activation_scheme": "static"}, fp8_tensor("m", 64, 96), "fp8-tensor/fp8-tensor-static"),
        (FP8, {"m.weight": ("F8_E4M3", (64, 96)), "m.weight_scale": ("F32", (1,))}, "fp8-tensor/fp8-token"),
        (FP8, fp8_channel("m", 64, 96), "fp8-channel/fp8-token"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_channel("m", 8, 96),
         "fp8-channel/fp8-token"),
        (BLOCK, block("m", 200, 300), "fp8-block128x128/fp8-g128"),
        (BLOCK, block("m", 256, 256, "BF16"), "fp8-block128x128/fp8-g128"),
        (BLOCK, block("m", 256, 256, "F32", "weight_scale"), "fp8-block128x128/fp8-g128"),
        ({**BLOCK, "scale_fmt": "ue8m0"}, block("m", 256, 512, "F8_E8M0", "scale"), "fp8-block128x128/fp8-g128"),
        ({**FP8, "weight_block_size": [64, 256]}, {"m.weight": ("F8_E4M3", (128, 512)),
          "m.weight_scale_inv": ("F32", (2, 2))}, "fp8-block64x256/fp8-g256"),
        ({**FP8, "weight_block_size": [1, 32]}, {"m.weight": ("F8_E4M3", (64, 64)),
          "m.weight_scale_inv": ("U8", (64, 2))}, "mxfp8/mxfp8"),
        ({**FP8, "fmt": "e5m2"}, {"m.weight": ("F8_E5M2", (64, 96)), "m.weight_scale": ("F32", ())},
         "fp8e5m2-tensor/fp8-token"),
    ],
)  # fmt: skip
def test_the_tensors_tell_the_granularity(tmp_path: Path, quantization: Any, tensors: Any, scheme: str) -> None:
    found = resolve(tmp_path, quantization, tensors)
    assert schemes(found) == {"m": scheme}
    assert codes(found) == []
    assert found.modules[0].declared is not None
    assert found.modules[0].declared.id == scheme


def test_ue8m0_makes_the_activations_scales_powers_of_two(tmp_path: Path) -> None:
    found = resolve(tmp_path, {**BLOCK, "scale_fmt": "ue8m0"}, block("m", 128, 128))
    activation = found.modules[0].scheme.activation
    assert activation is not None
    assert (activation.scale_format, activation.scale_rule) == ("e8m0", "ceil")


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("weight_block_size", [128], "metadata-unreadable"),
        ("weight_block_size", [128, True], "metadata-unreadable"),
        ("weight_block_size", "128x128", "metadata-unreadable"),
        ("activation_scheme", 1, "metadata-unreadable"),
        ("activation_scheme", "sometimes", "unsupported-option"),
        ("fmt", "e3m4", "unsupported-option"),
        ("modules_to_not_convert", {"lm_head": 1}, "metadata-unreadable"),
        ("ignored_layers", ["lm_head", 3], "metadata-unreadable"),
        ("modules_to_not_convert", ["layers.(1"], "metadata-unreadable"),
    ],
)
def test_wrong_values_name_their_key(tmp_path: Path, key: str, value: Any, code: str) -> None:
    problem = only(resolve(tmp_path, {**FP8, key: value}, fp8_tensor("m", 8, 8)), code)
    assert problem.where.file == "config.json"
    assert key in problem.where.rule


LAYER = {**fp8_tensor("model.layers.1.mlp.gate_proj", 8, 8), "model.layers.1.mlp.gate.weight": bf16(8, 8)}


def test_a_name_that_begins_another_is_an_overreach(tmp_path: Path) -> None:
    """transformers' re.match takes gate_proj for gate; the tensors do not."""
    config = {**FP8, "modules_to_not_convert": ["model.layers.1.mlp.gate"]}
    found = resolve(tmp_path, config, LAYER)
    assert schemes(found) == {
        "model.layers.1.mlp.gate": "bf16/a16",
        "model.layers.1.mlp.gate_proj": "fp8-tensor/fp8-token",
    }
    assert only(found, "rule-overreach").modules == ("model.layers.1.mlp.gate_proj",)


@pytest.mark.parametrize(
    "entry",
    [
        "model.layers.1.mlp.gate",
        "mlp.gate",
        "gate",
        "model.layers.1.mlp.gate.weight",
        "model.layers.*.mlp.gate",
        "*.gate",
        "re:.*gate$",
    ],
)
def test_spellings_of_one_module(tmp_path: Path, entry: str) -> None:
    found = resolve(tmp_path, {**FP8, "ignored_layers": [entry]}, {**LAYER, "a.o_proj.weight": bf16(8, 8)})
    resolved = {m.name: m for m in found.modules}
    assert resolved["model.layers.1.mlp.gate"].declared == resolved["model.layers.1.mlp.gate"].scheme
    assert resolved["model.layers.1.mlp.gate_proj"].scheme.weight_id == "fp8-tensor"
    # what the list does not name contradicts it
    assert only(found, "tensors-contradict-config").modules == ("a.o_proj",)


def test_an_engines_fused_name_stands_for_its_parts(tmp_path: Path) -> None:
    tensors = {f"l.self_attn.{p}_proj.weight": bf16(8, 8) for p in "qkv"}
    found = resolve(tmp_path, {**FP8, "ignored_layers": ["l.self_attn.qkv_proj"]}, tensors)
    assert set(codes(found)) <= {"rule-readings-differ"}
    assert {m.declared == m.scheme for m in found.modules} == {True}


def test_the_head_is_left_out_where_nothing_is_listed(tmp_path: Path) -> None:
    tensors = {**block("m", 128, 128), "lm_head.weight": bf16(8, 8)}
    assert codes(resolve(tmp_path / "null", {**BLOCK, "modules_to_not_convert": None}, tensors)) == []
    listed = resolve(tmp_path / "list", {**BLOCK, "modules_to_not_convert": ["m2"]}, tensors)
    assert only(listed, "tensors-contradict-config").modules == ("lm_head",)


def test_a_float_weight_beside_a_leftover_scale_is_unquantized(tmp_path: Path) -> None:
    tensors = {**block("a.m", 128, 128), "a.k.weight": bf16(64, 128), "a.k.weight_scale_inv": ("F32", (1, 1))}
    found = resolve(tmp_path, BLOCK, tensors)
    assert schemes(found)["a.k"] == "bf16/a16"
    assert codes(found) == ["tensors-contradict-config", "unexpected-tensor"]
    assert codes(found, severity="error") == []


def experts(dtype: str, scale: str = "F8_E8M0", leaf: str = "scale") -> dict[str, Any]:
    """DeepSeek-V4: routed experts in MXFP4, two codes a byte; everything else in blocks."""
    tensors = block("layers.0.attn.wq_b", 128, 256, leaf="scale")
    for expert in range(2):
        name = f"layers.0.ffn.experts.{expert}.w1"
        tensors |= {f"{name}.weight": (dtype, (64, 64)), f"{name}.{leaf}": (scale, (64, 4))}
    return tensors


@pytest.mark.parametrize("dtype", ["I8", "U8"])
@pytest.mark.parametrize("scale", ["F8_E8M0", "U8"])
def test_deepseek_v4_experts_are_mxfp4_where_it_says_so(tmp_path: Path, dtype: str, scale: str) -> None:
    found = resolve(tmp_path, BLOCK, experts(dtype, scale), config={"model_type": "deepseek_v4", "expert_dtype": "fp4"})
    assert schemes(found)["layers.0.ffn.experts.1.w1"] == "mxfp4/fp8-g128"
    assert schemes(found)["layers.0.attn.wq_b"] == "fp8-block128x128/fp8-g128"
    assert codes(found) == []


def test_deepseek_v4_without_a_word_follows_the_headers(tmp_path: Path) -> None:
    """An absent key is FP8 to the producer and FP4 to the engine: either can be on disk."""
    config = {"model_type": "deepseek_v4"}
    packed = resolve(tmp_path / "packed", BLOCK, experts("I8"), config=config)
    assert schemes(packed)["layers.0.ffn.experts.0.w1"] == "mxfp4/fp8-g128"
    assert codes(packed, severity="error") == []
    plain = {**block("layers.0.ffn.experts.0.w1", 128, 256), **block("layers.0.ffn.shared_experts.w1", 128, 128)}
    found = resolve(tmp_path / "plain", BLOCK, plain, config=config)
    assert set(schemes(found).values()) == {"fp8-block128x128/fp8-g128"}
    assert codes(found, severity="error") == []


def test_an_unknown_expert_dtype_is_refused(tmp_path: Path) -> None:
    found = resolve(tmp_path, BLOCK, experts("I8"), config={"model_type": "deepseek_v4", "expert_dtype": "fp2"})
    assert only(found, "unsupported-option").where.rule == "expert_dtype"


def test_stacked_experts_of_transformers(tmp_path: Path) -> None:
    tensors = {
        "l.mlp.experts.gate_up_proj": ("F8_E4M3", (4, 256, 128)),
        "l.mlp.experts.gate_up_proj_scale_inv": ("F32", (4, 2, 1)),
    }
    found = resolve(tmp_path, BLOCK, tensors)
    (module,) = found.modules
    assert (module.name, module.experts, module.scheme.weight_id) == (
        "l.mlp.experts.gate_up_proj",
        4,
        "fp8-block128x128",
    )
