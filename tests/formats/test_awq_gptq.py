"""AWQ and what GPTQ adds to the other dialects' tests: versions, legacy keys, whitelists, the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle.test_unpack import pack_rows
from tests.support.checkpoints import bf16, gptq
from tests.support.resolving import codes, only, resolve, schemes
from tests.support.values import values_of

AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}


def awq(module: str, n: int, k: int, group: int) -> dict[str, Any]:
    return {
        f"{module}.qweight": ("I32", (k, n // 8)),
        f"{module}.qzeros": ("I32", (k // group, n // 8)),
        f"{module}.scales": ("F16", (k // group, n)),
    }


@pytest.mark.parametrize(
    ("change", "group", "weight"),
    [
        ({}, 64, "uint4-g64"),
        ({"version": "GEMM", "group_size": 32}, 32, "uint4-g32"),
        ({"version": None, "checkpoint_format": "gemm"}, 64, "uint4-g64"),
        ({"group_size": -1}, 128, "uint4-channel"),
        ({"zero_point": False}, 64, "int4-g64"),
        ({"version": "ipex"}, 64, "uint4-g64"),
    ],
)
def test_versions_that_lie_alike(tmp_path: Path, change: Any, group: int, weight: str) -> None:
    found = resolve(tmp_path, {**AWQ, **change}, awq("m", 64, 128, group))
    assert schemes(found) == {"m": f"{weight}/a16"}
    assert [m.declared.id for m in found.modules if m.declared] == [f"{weight}/a16"]
    assert found.modules[0].storage.packing == "awq"
    assert codes(found) == []


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"version": "gemv"}, "version"),
        ({"version": "gemv_fast"}, "version"),
        ({"version": "marlin"}, "version"),
        ({"version": None, "checkpoint_format": "llm-awq"}, "checkpoint_format"),
        ({"bits": 3}, "bits"),
    ],
)
def test_layouts_of_one_kernel_are_refused(tmp_path: Path, change: Any, key: str) -> None:
    problem = only(resolve(tmp_path, {**AWQ, **change}, awq("m", 64, 128, 64)), "unsupported-option")
    assert problem.where.rule == f"quantization_config.{key}"


@pytest.mark.parametrize(("bits", "n"), [(4, 4), (4, 12), (2, 8), (8, 2), (8, 6), (3, 40), (4, 64), (8, 64)])
def test_zero_points_that_do_not_fill_their_last_word(tmp_path: Path, bits: int, n: int) -> None:
    """A router of four rows: its zero points have half a word, and the codes are no wider for it."""
    group, k = 32, 64
    zeros = -(-n * bits // 32)
    tensors = {
        "m.qweight": ("I32", (k * bits // 32, n)),
        "m.qzeros": ("I32", (k // group, zeros)),
        "m.scales": ("F16", (k // group, n)),
    }
    random = np.random.default_rng(n)
    codes_ = random.integers(0, 2**bits, (n, k))
    middle = np.full((k // group, n), 2 ** (bits - 1) - 1)
    data = {
        "m.qweight": pack_rows(codes_, bits).T.tobytes(),
        "m.qzeros": pack_rows(middle, bits).tobytes(),
        "m.scales": np.ones((k // group, n), np.float16).tobytes(),
    }
    found = resolve(tmp_path, {**GPTQ, "bits": bits, "group_size": group}, tensors, values=data)
    assert schemes(found) == {"m": f"int{bits}-g{group}/a16"}
    assert codes(found) == []
    assert (values_of(found, "m") == codes_ - 2 ** (bits - 1)).all()


def test_a_legacy_file_without_a_method(tmp_path: Path) -> None:
    files = {"quant_config.json": {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}}
    found = resolve(tmp_path, None, awq("m", 64, 128, 32), files=files)
    assert (found.format, schemes(found)) == ("awq", {"m": "uint4-g32/a16"})
    assert found.modules[0].decided_by.file == "quant_config.json"


def test_name_parts_do_not_swallow_longer_names(tmp_path: Path) -> None:
    tensors = {**awq("l.mlp.gate_proj", 64, 128, 64), "l.mlp.gate.weight": bf16(8, 8), "visual.fc.weight": bf16(8, 8)}
    found = resolve(tmp_path, {**AWQ, "modules_to_not_convert": ["gate", "visual"]}, tensors)
    assert schemes(found) == {
        "l.mlp.gate": "bf16/a16",
        "l.mlp.gate_proj": "uint4-g64/a16",
        "visual.fc": "bf16/a16",
    }
    assert only(found, "rule-overreach").modules == ("l.mlp.gate_proj",)


def test_the_whitelist_of_gptq_holds_names_inside_a_block(tmp_path: Path) -> None:
    tensors = {
        **gptq("model.layers.0.self_attn.q_proj", 64, 128, 4, 64),
        "model.layers.0.mlp.up_proj.weight": bf16(8, 8),
    }
    for number, value in enumerate(([["self_attn.q_proj"], ["self_attn.k_proj"]], ["self_attn.q_proj"])):
        found = resolve(tmp_path / str(number), {**GPTQ, "modules_in_block_to_quantize": value}, tensors)
        declared = {m.name: m.declared.id for m in found.modules if m.declared}
        assert declared == {
            "model.layers.0.self_attn.q_proj": "int4-g64/a16",
            "model.layers.0.mlp.up_proj": "bf16/a16",
        }
        assert codes(found) == []


def test_words_outside_of_the_whitelist_contradict_it(tmp_path: Path) -> None:
    tensors = {**gptq("a.q_proj", 64, 128, 4, 64), **gptq("lm_head", 64, 128, 4, 64)}
    config = {**GPTQ, "modules_in_block_to_quantize": ["q_proj"]}
    assert only(resolve(tmp_path / "a", config, tensors), "tensors-contradict-config").modules == ("lm_head",)
    assert codes(resolve(tmp_path / "b", {**config, "lm_head": True}, tensors)) == []


@pytest.mark.parametrize("value", ["q_proj", [1], [["q_proj", None]], {"q_proj": True}])
def test_a_whitelist_of_the_wrong_type(tmp_path: Path, value: Any) -> None:
    found = resolve(tmp_path, {**GPTQ, "modules_in_block_to_quantize": value}, gptq("m", 64, 128, 4, 64))
    assert only(found, "metadata-unreadable").where.rule.endswith("modules_in_block_to_quantize")


def test_legacy_gptq_and_layouts_of_one_kernel(tmp_path: Path) -> None:
    legacy = {"bits": 4, "group_size": 64, "desc_act": False, "sym": False, "model_name_or_path": "x"}
    found = resolve(tmp_path / "a", None, gptq("m", 64, 128, 4, 64), files={"quantize_config.json": legacy})
    assert (found.format, schemes(found)) == ("gptq", {"m": "uint4-g64/a16"})
    assert found.modules[0].storage.zero_offset == 1
    for key, value in (("is_marlin_format", True), ("pack_dtype", "int16"), ("checkpoint_format", "marlin")):
        refused = resolve(tmp_path / key, {**GPTQ, key: value}, gptq("m", 64, 128, 4, 64))
        assert only(refused, "unsupported-option").where.rule.endswith(key)


@pytest.mark.parametrize(
    ("change", "needed"), [({"desc_act": True}, True), ({"desc_act": False}, False), ({"desc_act": None}, False)]
)
def test_an_order_of_groups_must_be_stored(tmp_path: Path, change: Any, needed: bool) -> None:
    tensors = gptq("m", 64, 128, 4, 64)
    found = resolve(tmp_path / "absent", {**GPTQ, **change}, tensors)
    assert codes(found) == (["missing-tensor"] if needed else [])
    assert schemes(found) == {"m": "int4-g64/a16 invalid" if needed else "int4-g64/a16"}
    assert not needed or only(found, "missing-tensor").message.startswith("m.g_idx is in no shard")
    found = resolve(tmp_path / "present", {**GPTQ, **change}, {**tensors, "m.g_idx": ("I32", (128,))})
    assert (schemes(found), codes(found)) == ({"m": "int4-g64/a16"}, [])


def test_one_group_has_no_order(tmp_path: Path) -> None:
    found = resolve(tmp_path, {**GPTQ, "desc_act": True, "group_size": -1}, gptq("m", 64, 128, 4, 128))
    assert (schemes(found), codes(found)) == ({"m": "int4-channel/a16"}, [])


@pytest.mark.parametrize("skip", [{"-:.*down_proj$": {}}, {"-:.*down_proj$": None}, {".*down_proj$": False}])
@pytest.mark.parametrize("first", [False, True])
def test_what_skips_a_module_counts_before_what_quantizes_it_otherwise(tmp_path: Path, skip: Any, first: bool) -> None:
    """GPTQModel puts such entries first whatever their place in the file, engines take the first that matches."""
    wide = {"+:.*mlp.*": {"bits": 8}}
    config = {**GPTQ, "group_size": 64, "dynamic": {**skip, **wide} if first else {**wide, **skip}}
    tensors = {"mlp.down_proj.weight": bf16(64, 64), **gptq("mlp.up_proj", 64, 64, 8, 64), **gptq("m", 64, 64, 4, 64)}
    found = resolve(tmp_path, config, tensors)
    assert schemes(found) == {"m": "int4-g64/a16", "mlp.up_proj": "int8-g64/a16", "mlp.down_proj": "bf16/a16"}
    assert codes(found) == ([] if first else ["rule-readings-differ"])


def test_what_gptqmodel_does_beside_the_weights_is_said(tmp_path: Path) -> None:
    tensors = {**gptq("m", 64, 64, 4, 64), "n.weight": bf16(64, 64)}
    config = {**GPTQ, "group_size": 64}
    found = resolve(tmp_path / "inputs", {**config, "activation": {"mode": "w4afp8"}}, tensors)
    assert schemes(found) == {"m": "int4-g64/a16 unsupported", "n": "bf16/a16"}
    assert "quantization_config.activation" in only(found, "unsupported-option").message
    found = resolve(tmp_path / "adapter", {**config, "adapter": {"name": "lora", "rank": 8}}, tensors)
    assert schemes(found) == {"m": "int4-g64/a16", "n": "bf16/a16"}
    assert "quantization_config.adapter" in only(found, "known-quirk").message


@pytest.mark.parametrize(
    ("method", "key"), [("gptq", "modules_in_block_to_quantize"), ("auto-round", "block_name_to_quantize")]
)
def test_a_whitelist_of_which_nothing_matches_is_an_error(tmp_path: Path, method: str, key: str) -> None:
    config = {**GPTQ, "group_size": 64, "quant_method": method, "packing_format": "auto_round:auto_gptq"}
    tensors = gptq("model.layers.0.m", 64, 64, 4, 64)
    block = "model.layers" if method == "auto-round" else "m"
    found = resolve(tmp_path / "some", {**config, key: [block, "visual.blocks"]}, tensors)
    assert schemes(found) == {"model.layers.0.m": "int4-g64/a16"}
    assert codes(found) == []
    found = resolve(tmp_path / "none", {**config, key: ["visual.blocks"]}, tensors)
    problem = only(found, "rule-matches-nothing")
    assert (problem.severity, problem.where.rule) == ("error", f"{key}['visual.blocks']")
    if method == "auto-round":
        lists = ["model.language_model.layers", "lm_head"]
        found = resolve(tmp_path / "spelled", {**config, key: lists}, {**tensors, **gptq("lm_head", 64, 64, 4, 64)})
        assert set(schemes(found).values()) == {"int4-g64/a16"}
        assert codes(found) == ["rule-readings-differ"]
