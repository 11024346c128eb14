"""compressed-tensors: groups and targets, precedence, ignore entries, every format's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omniplat.formats.compressed_presets import PRESETS
from tests.support.checkpoints import bf16, fp8_channel, int4_packed, mxfp4, mxfp8
from tests.support.resolving import codes, only, resolve, schemes


def args(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


FP8 = args(8, "float", "channel")
FP8_TOKEN = args(8, "float", "token", dynamic=True)
INT4 = args(4, "int", "group", group_size=64)
MXFP4 = args(4, "float", "group", group_size=32, scale_dtype="torch.uint8")
MXFP8 = args(8, "float", "group", group_size=32, scale_dtype="torch.uint8")


def group(
    targets: list[str], weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    return {"targets": targets, "weights": weights, "input_activations": inputs, **more}


def config(*groups: dict[str, Any], ignore: Any = (), **more: Any) -> dict[str, Any]:
    named = {f"group_{i}": item for i, item in enumerate(groups)}
    listed = list(ignore) if isinstance(ignore, tuple) else ignore
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": listed, **more}


LINEAR_FP8 = group(["Linear"], FP8, FP8_TOKEN, format="float-quantized")


@pytest.mark.parametrize(
    ("weights", "inputs", "tensors", "scheme"),
    [
        (FP8, FP8_TOKEN, fp8_channel("m", 64, 64), "fp8-channel/fp8-token"),
        (FP8, None, fp8_channel("m", 64, 64), "fp8-channel/a16"),
        (INT4, None, int4_packed("m", 64, 128, 64), "int4-g64/a16"),
        (MXFP4, None, mxfp4("m", 64, 64), "mxfp4/a16"),
        (MXFP4, {**MXFP4, "dynamic": True}, mxfp4("m", 64, 64), "mxfp4/mxfp4"),
        (MXFP8, {**MXFP8, "dynamic": True}, mxfp8("m", 64, 64), "mxfp8/mxfp8"),
        (
            args(8, "int", "channel"),
            args(8, "int", "tensor", symmetric=False),
            {
                "m.weight": ("I8", (64, 64)),
                "m.weight_scale": ("F32", (64, 1)),
                "m.input_scale": ("F32", (1,)),
                "m.input_zero_point": ("I8", (1,)),
            },
            "int8-channel/int8-tensor-static-asym",
        ),
        (
            args(4, "int", "group", group_size=32),
            args(8, "int", "token", dynamic=True),
            {"m.weight": ("I8", (64, 64)), "m.weight_scale": ("BF16", (64, 2))},
            "int4-g32/int8-token",
        ),
        (
            args(8, "float", "block", block_structure=[128, 128]),
            args(8, "float", "group", group_size=128, dynamic=True),
            {"m.weight": ("F8_E4M3", (200, 300)), "m.weight_scale": ("BF16", (2, 3))},
            "fp8-block128x128/fp8-g128",
        ),
        (
            args(4, "float", "tensor_group", group_size=16),
            args(4, "float", "tensor_group", group_size=16, dynamic="local"),
            {
                "m.weight_packed": ("U8", (64, 32)),
                "m.weight_scale": ("F8_E4M3", (64, 4)),
                "m.weight_global_scale": ("F32", (1,)),
                "m.input_global_scale": ("F32", (1,)),
            },
            "nvfp4/nvfp4",
        ),
        (
            args(4, "int", "group", group_size=32, symmetric=False),
            None,
            {
                "m.weight_packed": ("I32", (64, 8)),
                "m.weight_scale": ("BF16", (64, 2)),
                "m.weight_shape": ("I64", (2,)),
                "m.weight_zero_point": ("I32", (8, 2)),
            },
            "uint4-g32/a16",
        ),
    ],
)
def test_every_format_of_tensors(tmp_path: Path, weights: Any, inputs: Any, tensors: Any, scheme: str) -> None:
    found = resolve(tmp_path, config(group(["Linear"], weights, inputs)), tensors)
    assert schemes(found) == {"m": scheme}
    assert codes(found) == []


def test_a_name_wins_over_a_pattern_and_a_pattern_over_a_class(tmp_path: Path) -> None:
    groups = (
        group(["Linear"], MXFP8),
        group([r"re:.*experts.*"], MXFP4),
        group(["a.experts.0.w"], INT4),
    )
    tensors = {**int4_packed("a.experts.0.w", 64, 64, 64), **mxfp4("a.experts.1.w", 64, 64), **mxfp8("a.o", 64, 64)}
    found = resolve(tmp_path, config(*groups), tensors)
    assert schemes(found) == {"a.experts.0.w": "int4-g64/a16", "a.experts.1.w": "mxfp4/a16", "a.o": "mxfp8/a16"}
    assert codes(found) == []


@pytest.mark.parametrize("entry", ["lm_head", "re:.*head$", "re:lm_head", "lm"])
def test_ignored_modules_stay_float(tmp_path: Path, entry: str) -> None:
    name = "lm.head" if entry == "lm" else "lm_head"
    tensors = {**fp8_channel("m", 64, 64), f"{name}.weight": bf16(64, 64)}
    found = resolve(tmp_path, config(LINEAR_FP8, ignore=(entry,)), tensors)
    assert schemes(found)[name] == "bf16/a16"
    assert codes(found, severity="error") == []


def test_a_pattern_that_is_not_anchored_swallows_a_sibling(tmp_path: Path) -> None:
    tensors = {"l.mlp.gate.weight": bf16(4, 64), **fp8_channel("l.mlp.gate_proj", 64, 64)}
    found = resolve(tmp_path, config(LINEAR_FP8, ignore=("re:.*mlp.gate",)), tensors)
    assert schemes(found) == {"l.mlp.gate": "bf16/a16", "l.mlp.gate_proj": "fp8-channel/fp8-token"}
    assert only(found, "rule-overreach").modules == ("l.mlp.gate_proj",)


@pytest.mark.parametrize("ignore", [None, [], ["m.absent", "lm_head"]])
def test_null_empty_and_partly_idle_lists(tmp_path: Path, ignore: Any) -> None:
    tensors = {**fp8_channel("m", 64, 64), **({"lm_head.weight": bf16(8, 64)} if ignore else {})}
    found = resolve(tmp_path, config(LINEAR_FP8, ignore=ignore), tensors)
    assert codes(found) == (["rule-matches-nothing"] if ignore else [])
    assert codes(found, severity="error") == []


def test_a_list_of_which_nothing_matches_is_an_error(tmp_path: Path) -> None:
    found = resolve(tmp_path, config(LINEAR_FP8, ignore=("model.talker.q",)), fp8_channel("model.q", 64, 64))
    idle = only(found, "rule-matches-nothing")
    assert idle.severity == "error"
    assert "model.q" in idle.fix


def test_lm_head_may_be_ignored_where_it_is_tied(tmp_path: Path) -> None:
    tied = resolve(tmp_path / "t", config(LINEAR_FP8, ignore=("lm_head",)), fp8_channel("m", 64, 64),
                   config={"tie_word_embeddings": True})  # fmt: skip
    assert codes(tied) == []


def test_an_engines_fused_name_stands_for_its_parts(tmp_path: Path) -> None:
    tensors = {f"l.{p}.weight": bf16(64, 64) for p in ("q_proj", "k_proj", "v_proj")} | fp8_channel("l.o_proj", 64, 64)
    found = resolve(tmp_path, config(LINEAR_FP8, ignore=("l.qkv_proj",)), tensors)
    assert schemes(found) == {
        "l.q_proj": "bf16/a16",
        "l.k_proj": "bf16/a16",
        "l.v_proj": "bf16/a16",
        "l.o_proj": "fp8-channel/fp8-token",
    }
    assert codes(found) == []


def test_a_class_target_does_not_make_a_float_head_quantized(tmp_path: Path) -> None:
    tensors = {**fp8_channel("m", 64, 64), "lm_head.weight": bf16(64, 64)}
    found = resolve(tmp_path, config(LINEAR_FP8), tensors)
    assert schemes(found)["lm_head"] == "bf16/a16"
    assert only(found, "tensors-contradict-config").modules == ("lm_head",)


def test_one_target_in_two_groups_is_decided_by_the_tensors(tmp_path: Path) -> None:
    groups = group(["re:.*w$"], MXFP4), group(["re:.*w$"], MXFP8)
    found = resolve(tmp_path, config(*groups), {**mxfp4("a.w", 64, 64), **mxfp8("b.w", 64, 64)})
    assert schemes(found) == {"a.w": "mxfp4/a16", "b.w": "mxfp8/a16"}
    assert "rule-readings-differ" in codes(found)


@pytest.mark.parametrize(
    ("missing", "status"), [("weight_scale", "invalid"), ("weight_shape", "invalid"), ("weight_packed", "gone")]
)
def test_a_missing_role_is_an_error(tmp_path: Path, missing: str, status: str) -> None:
    tensors = {k: v for k, v in int4_packed("m", 64, 64, 64).items() if not k.endswith(missing)}
    found = resolve(tmp_path, config(group(["Linear"], INT4)), {**tensors, **int4_packed("n", 64, 64, 64)})
    assert only(found, "missing-tensor").modules == ("m",)
    if status != "gone":
        assert schemes(found)["m"].endswith("invalid")
    assert schemes(found)["n"] == "int4-g64/a16"


def test_scales_beside_a_float_weight_are_unexpected(tmp_path: Path) -> None:
    tensors = {"m.weight": bf16(64, 64), "m.weight_scale": ("F32", (64, 1)), **fp8_channel("n", 64, 64)}
    found = resolve(tmp_path, config(LINEAR_FP8, ignore=("m",)), tensors)
    assert only(found, "unexpected-tensor").modules == ("m",)
    assert schemes(found)["m"] == "bf16/a16"


def test_a_group_that_does_not_divide_k(tmp_path: Path) -> None:
    tensors = {"m.weight": ("F8_E4M3", (64, 48)), "m.weight_scale": ("U8", (64, 2))}
    found = resolve(tmp_path, config(group(["Linear"], MXFP8)), tensors)
    assert only(found, "group-not-divisible").severity == "error"
    assert schemes(found) == {"m": "mxfp8/a16 invalid"}


@pytest.mark.parametrize("text", ["marlin-24", "sparse-bitmask", "unheard-of"])
def test_a_format_that_is_not_read_is_named(tmp_path: Path, text: str) -> None:
    found = resolve(tmp_path, config(LINEAR_FP8, format=text), fp8_channel("m", 64, 64))
    assert text in only(found, "unsupported-option").message


@pytest.mark.parametrize("change", [{"ignore": 3}, {"config_groups": []}, {"ignore": ["re:("]}, {"format": 1}])
def test_wrong_types_are_named(tmp_path: Path, change: dict[str, Any]) -> None:
    found = resolve(tmp_path, {**config(LINEAR_FP8), **change}, fp8_channel("m", 64, 64))
    problem = only(found, "metadata-unreadable")
    assert problem.where.rule.startswith(f"quantization_config.{next(iter(change))}")


def test_the_old_spelling(tmp_path: Path) -> None:
    old = {k: v for k, v in config(LINEAR_FP8).items() if k != "quant_method"}
    found = resolve(tmp_path, None, fp8_channel("m", 64, 64), config={"compression_config": old})
    assert schemes(found) == {"m": "fp8-channel/fp8-token"}
    assert found.format == "compressed-tensors"


def words(module: str, n: int, k: int, bits: int, scale: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """pack-quantized words of any width, packed densely, with the true shape stated."""
    tensors = {
        f"{module}.weight_packed": ("I32", (n, -(-k * bits // 32))),
        f"{module}.weight_scale": ("BF16", scale),
        f"{module}.weight_shape": ("I64", (2,)),
    }
    stated = n.to_bytes(8, "little") + k.to_bytes(8, "little")
    return tensors, {f"{module}.weight_shape": stated}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("k", [256, 212, 96])
def test_k_is_what_the_module_states_whatever_the_width_and_the_padding(tmp_path: Path, bits: int, k: int) -> None:
    tensors, values = words("m", 64, k, bits, (64, 1))
    found = resolve(tmp_path, config(group(["Linear"], args(bits, "int", "channel"))), tensors, values=values)
    assert schemes(found) == {"m": f"int{bits}-channel/a16"}
    assert [module.in_features for module in found.modules] == [k]
    assert codes(found) == []


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_odd_widths_in_groups(tmp_path: Path, bits: int) -> None:
    tensors, values = words("m", 64, 256, bits, (64, 4))
    found = resolve(
        tmp_path, config(group(["Linear"], args(bits, "int", "group", group_size=64))), tensors, values=values
    )
    assert schemes(found) == {"m": f"int{bits}-g64/a16"}
    assert [module.in_features for module in found.modules] == [256]


def test_words_that_an_old_release_padded_are_understood_and_not_run(tmp_path: Path) -> None:
    tensors, values = words("m", 64, 256, 3, (64, 2))
    tensors["m.weight_packed"] = ("I32", (64, 26))  # ten codes of three bits in a word
    found = resolve(
        tmp_path, config(group(["Linear"], args(3, "int", "group", group_size=128))), tensors, values=values
    )
    assert schemes(found) == {"m": "int3-g128/a16 unsupported"}
    assert "padded" in only(found, "unsupported-option").message


def test_an_odd_number_of_4_bit_columns_is_refused_in_the_plan(tmp_path: Path) -> None:
    tensors, values = words("m", 64, 211, 4, (64, 1))
    found = resolve(tmp_path, config(group(["Linear"], args(4, "int", "channel"))), tensors, values=values)
    assert schemes(found) == {"m": "int4-channel/a16 unsupported"}


def test_one_scale_for_the_whole_tensor_of_words(tmp_path: Path) -> None:
    tensors, values = words("m", 64, 256, 4, (1,))
    found = resolve(tmp_path, config(group(["Linear"], args(4, "int", "tensor"))), tensors, values=values)
    assert schemes(found) == {"m": "int4-tensor/a16"}


def test_the_declared_granularity_names_a_scale_that_fits_several(tmp_path: Path) -> None:
    found = resolve(tmp_path, config(LINEAR_FP8), fp8_channel("m", 1, 64))
    assert schemes(found) == {"m": "fp8-channel/fp8-token"}
    assert codes(found) == []


def test_of_two_patterns_the_producer_takes_the_first_in_alphabetical_order(tmp_path: Path) -> None:
    broad = group(["re:.*proj"], MXFP4, {**MXFP4, "dynamic": True})
    narrow = group(["re:.*gate_proj"], MXFP8, {**MXFP8, "dynamic": True})
    tensors = {**mxfp8("l.gate_proj", 64, 64), **mxfp4("l.up_proj", 64, 64)}
    found = resolve(tmp_path, config(broad, narrow), tensors)
    assert schemes(found) == {"l.gate_proj": "mxfp8/mxfp8", "l.up_proj": "mxfp4/mxfp4"}


def test_the_activation_of_a_rule_for_another_weight_is_not_taken_over(tmp_path: Path) -> None:
    found = resolve(tmp_path, config(group(["Linear"], MXFP4, {**MXFP4, "dynamic": True})), mxfp8("m", 64, 64))
    assert schemes(found) == {"m": "mxfp8/a16"}
    assert only(found, "tensors-contradict-config").severity == "warning"


def test_embeddings_have_a_class_of_their_own(tmp_path: Path) -> None:
    table = {"embed_tokens.weight": ("I8", (320, 256)), "embed_tokens.weight_scale": ("BF16", (320, 1))}
    groups = group(["Linear"], INT4), group(["Embedding"], args(8, "int", "channel"))
    found = resolve(tmp_path / "a", config(*groups), {**table, **int4_packed("m", 64, 128, 64)})
    assert schemes(found) == {"embed_tokens": "int8-channel/a16", "m": "int4-g64/a16"}
    assert codes(found) == []


def rotation(location: str) -> dict[str, Any]:
    use = {"location": location, "targets": ["Linear"], "ignore": ["lm_head"], "inverse": False}
    return {"config_groups": {"v": {"type": "random-hadamard", "apply": [use]}}}


@pytest.mark.parametrize("location", ["input", "output", "q_attn", "k_cache"])
def test_a_rotation_at_run_time_is_refused_and_its_matrix_is_no_layer(tmp_path: Path, location: str) -> None:
    tensors = {**fp8_channel("m", 64, 64), "m.v_input.weight": ("F64", (64, 64)), "lm_head.weight": bf16(8, 64)}
    found = resolve(tmp_path, config(LINEAR_FP8, ignore=("lm_head",), transform_config=rotation(location)), tensors)
    assert schemes(found) == {"m": "fp8-channel/fp8-token unsupported", "lm_head": "bf16/a16"}
    assert location in only(found, "unsupported-option").message


@pytest.mark.parametrize("transforms", [{}, None, rotation("weight_input"), rotation("weight_output")])
def test_a_rotation_that_is_folded_into_the_weight_changes_nothing(tmp_path: Path, transforms: Any) -> None:
    found = resolve(tmp_path, config(LINEAR_FP8, transform_config=transforms), fp8_channel("m", 64, 64))
    assert schemes(found) == {"m": "fp8-channel/fp8-token"}


@pytest.mark.parametrize(("target", "refused"), [("Linear", {"m", "n"}), ("re:.*n$", {"n"}), ("m", {"m"})])
def test_quantized_inputs_of_unquantized_weights_are_refused(tmp_path: Path, target: str, refused: set[str]) -> None:
    only_inputs = {"targets": [target], "weights": None, "input_activations": args(8, "float", "token", dynamic=True)}
    tensors = {f"{name}.weight": bf16(64, 64) for name in ("m", "n", "lm_head")}
    found = resolve(tmp_path, config(only_inputs, ignore=("lm_head",)), tensors)
    assert {name for name, scheme in schemes(found).items() if "unsupported" in scheme} == refused
    assert "unquantized weights" in only(found, "unsupported-option").message


@pytest.mark.parametrize(
    ("preset", "tensors", "scheme"),
    [
        ("FP8_DYNAMIC", fp8_channel("m", 64, 64), "fp8-channel/fp8-token"),
        ("fp8_dynamic", fp8_channel("m", 64, 64), "fp8-channel/fp8-token"),
        ("W4A16", int4_packed("m", 64, 256, 128), "int4-g128/a16"),
        ("W8A8", {"m.weight": ("I8", (64, 64)), "m.weight_scale": ("BF16", (64, 1))}, "int8-channel/int8-token"),
        ("W8A16", {"m.weight": ("I8", (64, 64)), "m.weight_scale": ("BF16", (64, 1))}, "int8-channel/a16"),
        ("W8A16", {"m.weight": ("I8", (64, 256)), "m.weight_scale": ("BF16", (64, 2))}, "int8-g128/a16"),
        ("MXFP4", mxfp4("m", 64, 64), "mxfp4/mxfp4"),
        ("MXFP8A16", mxfp8("m", 64, 64), "mxfp8/a16"),
        ("UNQUANTIZED", {"m.weight": bf16(64, 64)}, "bf16/a16"),
    ],
)
def test_a_preset_that_lists_its_targets(tmp_path: Path, preset: str, tensors: Any, scheme: str) -> None:
    found = resolve(tmp_path, {"quant_method": "compressed-tensors", "config_groups": {preset: ["Linear"]}}, tensors)
    assert schemes(found) == {"m": scheme}
    assert codes(found) == []


def test_every_preset_is_a_scheme(tmp_path: Path) -> None:
    for name in PRESETS:
        config = {"quant_method": "compressed-tensors", "config_groups": {name: ["re:.*proj$"]}}
        found = resolve(tmp_path / name, config, {"head.weight": bf16(64, 64)})
        assert not {"unsupported-option", "metadata-unreadable"} & set(codes(found)), name


def test_a_list_under_another_name_is_no_preset(tmp_path: Path) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": ["Linear"]}}
    problem = only(resolve(tmp_path, config, fp8_channel("m", 64, 64)), "unsupported-option")
    assert problem.where.rule == "quantization_config.config_groups.group_0"
    assert "'group_0'" in problem.message


@pytest.mark.parametrize("inputs", [None, args(8, "float", "tensor")])
def test_groups_of_attention_name_no_matrix(tmp_path: Path, inputs: Any) -> None:
    attention = {"targets": ["re:.*self_attn$", "Qwen3Attention"], "weights": None, "input_activations": inputs}
    found = resolve(tmp_path, config(LINEAR_FP8, attention), fp8_channel("a.self_attn.q_proj", 64, 64))
    assert schemes(found) == {"a.self_attn.q_proj": "fp8-channel/fp8-token"}
    assert codes(found) == []


@pytest.mark.parametrize("order", ["group", "dynamic", "GROUP", True])
def test_an_order_of_groups_must_be_stored(tmp_path: Path, order: Any) -> None:
    declared = config(group(["Linear"], {**INT4, "actorder": order}))
    tensors = int4_packed("m", 64, 128, 64)
    found = resolve(tmp_path / "absent", declared, tensors)
    assert only(found, "missing-tensor").message.startswith("m.weight_g_idx is in no shard")
    assert schemes(found) == {"m": "int4-g64/a16 invalid"}
    found = resolve(tmp_path / "present", declared, {**tensors, "m.weight_g_idx": ("I32", (128,))})
    assert (schemes(found), codes(found)) == ({"m": "int4-g64/a16"}, [])


@pytest.mark.parametrize("order", [None, "static", "weight", False])
def test_other_orders_need_no_tensor(tmp_path: Path, order: Any) -> None:
    declared = config(group(["Linear"], {**INT4, "actorder": order}))
    found = resolve(tmp_path, declared, int4_packed("m", 64, 128, 64))
    assert (schemes(found), codes(found)) == ({"m": "int4-g64/a16"}, [])


@pytest.mark.parametrize(("order", "code"), [("columns", "unsupported-option"), (3, "metadata-unreadable")])
def test_an_order_that_is_not_known(tmp_path: Path, order: Any, code: str) -> None:
    declared = config(group(["Linear"], {**INT4, "actorder": order}))
    problem = only(resolve(tmp_path, declared, int4_packed("m", 64, 128, 64)), code)
    assert problem.where.rule == "quantization_config.config_groups.group_0.weights.actorder"


def test_a_format_that_implies_the_kind_of_scales_need_not_state_it(tmp_path: Path) -> None:
    """The library's compressor takes uint8 where `scale_dtype` is absent."""
    eight = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": eight, "input_activations": {**eight, "dynamic": True}}
    for place in ("group", "whole"):
        config = {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {**group, "format": "mxfp8-quantized"} if place == "group" else group},
            "format": "mixed-precision" if place == "group" else "mxfp8-quantized",
        }
        found = resolve(tmp_path / place, config, mxfp8("m", 64, 64))
        assert schemes(found) == {"m": "mxfp8/mxfp8"}
        assert codes(found) == []


def test_groups_of_outputs_leave_weights_to_others(tmp_path: Path) -> None:
    """The cache of keys and values as releases before `kv_cache_scheme` wrote it."""
    outputs = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    cache = {"targets": ["re:.*[kv]_proj$"], "output_activations": outputs}
    linear = {"targets": ["Linear"], "weights": FP8, "input_activations": FP8_TOKEN}
    names = [f"a.{name}_proj" for name in "qkv"]
    tensors = {tensor: info for name in names for tensor, info in fp8_channel(name, 64, 64).items()}
    config = {"quant_method": "compressed-tensors", "config_groups": {"c": cache, "l": linear}}
    found = resolve(tmp_path / "apart", config, tensors)
    assert schemes(found) == dict.fromkeys(names, "fp8-channel/fp8-token")
    assert codes(found) == []
    config = {"quant_method": "compressed-tensors", "config_groups": {"l": {**linear, "output_activations": outputs}}}
    found = resolve(tmp_path / "one", config, tensors)
    assert only(found, "unsupported-option").where.rule.endswith("config_groups.l.output_activations")
    assert set(schemes(found).values()) == {"fp8-channel/fp8-token unsupported"}


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_without_metadata_the_stated_shape_tells_how_wide_codes_are(tmp_path: Path, bits: int) -> None:
    """Words of 8 bits in groups of 64 look like words of 4 bits in groups of 128."""
    tensors, values = words("m", 64, 256, bits, (64, 4))
    found = resolve(tmp_path, None, tensors, values=values)
    assert schemes(found) == {"m": f"int{bits}-g64/a16"}
    assert codes(found) == ["inferred-from-headers"]


@pytest.mark.parametrize("change", [{}, {"targets": None}])
def test_a_group_must_say_what_it_is_about(tmp_path: Path, change: dict[str, Any]) -> None:
    groups = {"g": {"weights": FP8, **change}}
    found = resolve(tmp_path, {"quant_method": "compressed-tensors", "config_groups": groups}, fp8_channel("m", 64, 64))
    assert only(found, "metadata-unreadable").where.rule.endswith("config_groups.g.targets")
