"""AutoRound: what a key of extra_config means to whom, what is in scope, and what is inherited."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import bf16, gptq, mxfp4, mxfp8
from tests.support.resolving import codes, only, resolve, schemes

MX8 = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:llm_compressor",
    "bits": 8,
    "group_size": 32,
    "sym": True,
    "data_type": "mx_fp",
    "act_bits": 8,
    "act_data_type": "mx_fp",
    "act_dynamic": True,
    "block_name_to_quantize": "model.layers",
}
INT4 = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
}
EXPERTS = [f"model.layers.{layer}.mlp.experts.{e}.down_proj" for layer in range(2) for e in range(3)]


def expert_tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = dict(mxfp8("model.layers.0.self_attn.o_proj", 64, 64))
    for name in EXPERTS:
        tensors |= mxfp4(name, 64, 64)
    return tensors


def test_a_dotted_key_is_read_as_its_producer_does_and_the_tensors_confirm_it(tmp_path: Path) -> None:
    found = resolve(tmp_path, {**MX8, "extra_config": {".mlp.experts.": {"bits": 4}}}, expert_tensors())
    assert {schemes(found)[name] for name in EXPERTS} == {"mxfp4/mxfp4"}
    assert schemes(found)["model.layers.0.self_attn.o_proj"] == "mxfp8/mxfp8"
    differ = only(found, "rule-readings-differ")
    assert differ.severity == "warning"
    assert set(differ.modules) == set(EXPERTS)
    assert r".*mlp\.experts" in differ.fix
    assert {m.decided_by.reading for m in found.modules if m.name in EXPERTS} == {"producer"}


@pytest.mark.parametrize("key", [r".*mlp\.experts", r".*\.mlp\.experts\..*", *EXPERTS[:1]])
def test_keys_that_all_readers_understand_say_nothing(tmp_path: Path, key: str) -> None:
    tensors = expert_tensors()
    if key in EXPERTS:
        tensors = {**mxfp8("model.layers.0.self_attn.o_proj", 64, 64), **mxfp4(key, 64, 64)}
    found = resolve(tmp_path, {**MX8, "extra_config": {key: {"bits": 4}}}, tensors)
    assert codes(found) == []


@pytest.mark.parametrize(
    ("key", "named", "swallowed"),
    [
        ("gate", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        ("layers.1", "model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"),
        ("b_proj", "model.layers.0.b_proj", "model.layers.0.q_b_proj"),
    ],
)
def test_a_key_that_reaches_further_than_the_tensors_is_an_overreach(
    tmp_path: Path, key: str, named: str, swallowed: str
) -> None:
    tensors = {f"{named}.weight": bf16(64, 64), **mxfp8(swallowed, 64, 64)}
    found = resolve(tmp_path, {**MX8, "extra_config": {key: {"bits": 16}}}, tensors)
    assert schemes(found) == {named: "bf16/a16", swallowed: "mxfp8/mxfp8"}
    assert only(found, "rule-overreach").modules == (swallowed,)


def test_an_explicit_layer_wins_over_a_pattern(tmp_path: Path) -> None:
    tensors = {**gptq("model.layers.0.a", 128, 128, 8, 128), **gptq("model.layers.0.b", 128, 128, 2, 128)}
    extra = {"model.layers.*": {"bits": 2}, "model.layers.0.a": {"bits": 8}}
    found = resolve(tmp_path, {**INT4, "extra_config": extra}, tensors)
    assert schemes(found) == {"model.layers.0.a": "int8-g128/a16", "model.layers.0.b": "int2-g128/a16"}
    assert codes(found) == []


def test_overrides_inherit_what_they_do_not_name(tmp_path: Path) -> None:
    extra = {"model.layers.0.a": {"group_size": 64}, "model.layers.0.b": {"sym": False}}
    tensors = {**gptq("model.layers.0.a", 128, 256, 4, 64), **gptq("model.layers.0.b", 128, 256, 4, 128)}
    found = resolve(tmp_path, {**INT4, "extra_config": extra}, tensors)
    assert schemes(found) == {"model.layers.0.a": "int4-g64/a16", "model.layers.0.b": "uint4-g128/a16"}


@pytest.mark.parametrize("blocks", ["model.layers", ["model.layers"], [["model.layers"], ["other"]], "x,model.layers"])
def test_what_is_outside_the_blocks_stays_float_without_being_listed(tmp_path: Path, blocks: object) -> None:
    tensors = {**mxfp8("model.layers.0.a", 64, 64), "time_embed.mlp.0.weight": bf16(64, 64)}
    found = resolve(tmp_path, {**MX8, "block_name_to_quantize": blocks}, tensors)
    assert codes(found) == []
    assert schemes(found)["time_embed.mlp.0"] == "bf16/a16"


def test_a_block_name_is_bounded_by_dots(tmp_path: Path) -> None:
    tensors = {**mxfp8("layers.1.a", 64, 64), "layers.10.a.weight": bf16(64, 64)}
    assert codes(resolve(tmp_path, {**MX8, "block_name_to_quantize": "layers.1"}, tensors)) == []


def test_quantized_outside_the_blocks_is_reported_and_run(tmp_path: Path) -> None:
    found = resolve(tmp_path, MX8, {**mxfp8("model.layers.0.a", 64, 64), **mxfp8("proj_out", 64, 64)})
    assert schemes(found)["proj_out"] == "mxfp8/mxfp8"
    assert only(found, "tensors-contradict-config").modules == ("proj_out",)


def test_float_inside_the_blocks_is_reported_unless_it_is_a_router(tmp_path: Path) -> None:
    tensors = {
        **mxfp8("model.layers.0.a", 64, 64),
        "model.layers.0.b.weight": bf16(64, 64),
        "model.layers.0.mlp.gate.weight": bf16(4, 64),
    }
    found = resolve(tmp_path, MX8, tensors)
    assert only(found, "tensors-contradict-config").modules == ("model.layers.0.b",)
    assert only(found, "tensors-contradict-config").severity == "warning"


@pytest.mark.parametrize(
    ("packing", "offset"), [("auto_round", 0), ("auto_round:auto_gptq", 1), ("auto_round:gptqmodel", 0)]
)
def test_the_packing_tells_the_offset_of_zero_points(tmp_path: Path, packing: str, offset: int) -> None:
    tensors = gptq("model.layers.0.a", 128, 128, 4, 128)
    found = resolve(tmp_path, {**INT4, "packing_format": packing}, tensors)
    assert [m.storage.zero_offset for m in found.modules] == [offset]


def test_mxint4_and_mxfp4_differ_in_metadata_only(tmp_path: Path) -> None:
    config = {**MX8, "bits": 4, "act_bits": 16, "data_type": "mx_int"}
    assert schemes(resolve(tmp_path, config, mxfp4("model.layers.0.a", 64, 64))) == {"model.layers.0.a": "mxint4/a16"}


@pytest.mark.parametrize(
    ("change", "code", "key"),
    [
        ({"packing_format": "auto_round:mlx"}, "unsupported-option", "packing_format"),
        ({"data_type": "strange"}, "unsupported-option", "bits"),
        ({"bits": "four"}, "metadata-unreadable", "bits"),
        ({"bits": True}, "metadata-unreadable", "bits"),
        ({"group_size": [128]}, "metadata-unreadable", "group_size"),
        ({"extra_config": []}, "metadata-unreadable", "extra_config"),
        ({"extra_config": {"a": 3}}, "metadata-unreadable", "extra_config.a"),
        ({"extra_config": {"(": {"bits": 4}}}, "metadata-unreadable", "extra_config.("),
        ({"block_name_to_quantize": 7}, "metadata-unreadable", "block_name_to_quantize"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, change: dict, code: str, key: str) -> None:
    found = resolve(tmp_path, {**MX8, **change}, mxfp8("model.layers.0.a", 64, 64))
    problem = only(found, code)
    assert problem.severity == "error"
    assert problem.where.file == "config.json"
    assert problem.where.rule == f"quantization_config.{key}"


@pytest.mark.parametrize(
    "change",
    [
        {"rotation_config": {"algorithm": "hadamard", "allow_online_rotation": True}},
        {"rotation_config": {"algorithm": "hadamard"}},
        {"spinquant_config": {"r1": True, "online_r1_rotation": True}},
        {"spinquant_config": {"r1": True, "r4": True}},
    ],
)
def test_a_rotation_at_run_time_is_refused(tmp_path: Path, change: dict) -> None:
    found = resolve(tmp_path, {**MX8, **change}, mxfp8("model.layers.0.a", 64, 64))
    assert schemes(found) == {"model.layers.0.a": "mxfp8/mxfp8 unsupported"}
    assert "rotation" in only(found, "unsupported-option").message


@pytest.mark.parametrize(
    "change", [{"rotation_config": {}}, {"rotation_config": None}, {"spinquant_config": {"r1": True, "r2": True}}]
)
def test_a_rotation_that_is_folded_into_the_weight_changes_nothing(tmp_path: Path, change: dict) -> None:
    found = resolve(tmp_path, {**MX8, **change}, mxfp8("model.layers.0.a", 64, 64))
    assert schemes(found) == {"model.layers.0.a": "mxfp8/mxfp8"}


def test_dequantized_weights_are_said_to_be_that(tmp_path: Path) -> None:
    found = resolve(tmp_path, {**INT4, "packing_format": "auto_round:fake"}, {"model.layers.0.a.weight": bf16(64, 64)})
    assert schemes(found) == {"model.layers.0.a": "bf16/a16"}
    assert "dequantized" in only(found, "known-quirk").message
