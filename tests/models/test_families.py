"""The packing tables: their own consistency, and the layers that each family's real names become."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import omniplat
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.formats.base import expand_fused
from omniplat.formats.detect import read_metadata
from omniplat.formats.resolve import resolve_component
from omniplat.models import diffusion, omni, text
from omniplat.models.builtin import FAMILIES, UNKNOWN
from omniplat.models.family import Family, identifiers_of, scope_of, scoped_attention
from omniplat.packed import PackedLayer
from omniplat.packing import Packed, family_of, pack
from omniplat.roworder import RowOrder
from tests.models.names import EXAMPLES, Example
from tests.support.checkpoints import bf16, write_checkpoint

BY_NAME = {family.name: family for family in FAMILIES}
KINDS = {"as_is", "halves_swapped", "qkv_per_kv_head", "interleaved"}


def packed(folder: Path, example: Example) -> Packed:
    tensors = {name if len(shape) == 3 else f"{name}.weight": bf16(*shape) for name, shape in example.modules.items()}
    write_checkpoint(folder, example.config, tensors)
    (component,) = open_checkpoint(folder).components
    family = family_of(example.config, FAMILIES)
    return pack(resolve_component(component, read_metadata(component, (), {}), family.floats), family)


def layers_of(result: Packed) -> dict[str, PackedLayer]:
    return {layer.spec.name: layer for layer in result.layers}


# -- the tables themselves ------------------------------------------------------------------------------


def test_names_and_identifiers_are_unique() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    claimed = [identifier for family in FAMILIES for identifier in family.identifiers]
    assert sorted({one for one in claimed if claimed.count(one) > 1}) == []


def test_every_table_is_registered() -> None:
    defined = [value for module in (text, diffusion, omni) for value in vars(module).values()]
    assert {family.name for family in defined if isinstance(family, Family)} == set(BY_NAME)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_table_is_consistent(family: Family) -> None:
    parts = [part for fused in family.fused for part in fused.parts]
    assert len(set(parts)) == len(parts), "a module would belong to two fused ones"
    assert all(len(fused.parts) > 1 for fused in family.fused)
    engine = [item.name for item in (*family.fused, *family.aliases)] + [item.engine for item in family.renames]
    assert len(set(engine)) == len(engine), "an engine's name means two things"
    assert not set(engine) & set(parts)
    assert not set(family.column) & set(family.row)
    assert set(family.disk_orders.values()) <= KINDS
    assert set(family.disk_parts.values()) <= {"qkv", "halves"}
    for stacked in family.stacked:
        assert stacked.layout in ("nk", "kn")
        assert stacked.order in KINDS
    for fused in family.fused:
        styles = {family.style_of(f"x.{part}") for part in fused.parts}
        assert len(styles) == 1, f"{fused.name} has parts that engines split differently"


def test_every_family_has_an_example() -> None:
    assert {example.family for example in EXAMPLES} == set(BY_NAME)


# -- real names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.family)
def test_real_names_become_the_expected_layers(tmp_path: Path, example: Example) -> None:
    result = packed(tmp_path, example)
    assert result.family.name == example.family
    assert result.findings == ()
    layers = layers_of(result)
    for name, modules in example.layers.items():
        assert name in layers, f"{name} is not among {sorted(layers)}"
        assert sorted(module.name for module in layers[name].modules) == sorted(modules)
        assert layers[name].spec.op == ("moe" if name in example.moe else "linear")
    every = [module.name for layer in result.layers for module in layer.modules]
    assert sorted(every) == sorted(example.modules), "a module is in no layer or in two"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.family)
def test_engine_names_of_fused_layers_reach_their_parts(example: Example) -> None:
    parts_of = BY_NAME[example.family].parts_of
    for name, modules in example.layers.items():
        if name in example.moe or name in modules:
            continue
        assert set(modules) <= set(expand_fused(name, parts_of)), name


def test_an_unknown_model_stays_unfused_but_its_experts_are_one_layer(tmp_path: Path) -> None:
    experts = {"m.experts.0.w1": (4, 8), "m.experts.0.w2": (8, 4), "m.experts.0.w3": (4, 8)}
    example = Example("", {"model_type": "never-seen"}, {"a.q_proj": (8, 8), "a.k_proj": (8, 8), **experts}, {})
    result = packed(tmp_path, example)
    assert result.family is UNKNOWN
    assert sorted(layers_of(result)) == ["a.k_proj", "a.q_proj", "m.experts"]


@pytest.mark.parametrize(
    ("family", "written", "meant"),
    [
        ("wan", "blocks.0.attn1.to_qkv", "blocks.0.attn1.to_v"),
        ("wan", "blocks.0.attn1.to_out", "blocks.0.attn1.to_out.0"),
        ("wan", "blocks.0.ffn.net_0.proj", "blocks.0.ffn.net.0.proj"),
        ("wan", "blocks.0.ffn.net_2", "blocks.0.ffn.net.2"),
        ("wan", "blocks.0.ffn.net_2.weight", "blocks.0.ffn.net.2"),
        ("qwen-image", "transformer_blocks.3.attn.add_kv_proj", "transformer_blocks.3.attn.add_k_proj"),
        ("flux", "transformer_blocks.3.attn.to_added_qkv", "transformer_blocks.3.attn.add_q_proj"),
        ("z-image", "layers.1.feed_forward.w13", "layers.1.feed_forward.w3"),
        ("hunyuan-image-3", "layers.0.mlp.shared_mlp.gate_up_proj", "layers.0.mlp.shared_mlp.gate_and_up_proj"),
        ("mixtral", "model.layers.0.mlp.experts", "model.layers.0.block_sparse_moe.experts"),
        ("deepseek", "model.layers.0.self_attn.fused_qkv_a_proj", "model.layers.0.self_attn.kv_a_proj_with_mqa"),
        ("bagel", "model.layers.0.self_attn.qkv_proj.gen_exp", "model.layers.0.self_attn.v_proj_moe_gen"),
        ("minimax-h3", "transformer_blocks.0.mlp.fc1", "transformer_blocks.0.ff.net.0.proj"),
        ("cosmos3", "layers.0.cross_attention.to_q", "layers.0.self_attn.add_q_proj"),
    ],
)  # fmt: skip
def test_an_entry_in_an_engines_name_reaches_the_checkpoints(family: str, written: str, meant: str) -> None:
    assert meant in expand_fused(written, BY_NAME[family].parts_of)


def test_an_entry_that_merely_ends_alike_is_left_alone() -> None:
    parts_of = BY_NAME["qwen-image"].parts_of
    assert expand_fused("blocks.0.not_to_qkv", parts_of) == ("blocks.0.not_to_qkv",)
    assert expand_fused("blocks.0.attn2.to_qkv", BY_NAME["wan"].parts_of) == ("blocks.0.attn2.to_qkv",)


def test_a_platforms_own_names_are_known_there_only() -> None:
    family = BY_NAME["hunyuan-image-3"]
    assert "experts" not in family.parts_of
    assert expand_fused("model.layers.0.mlp.experts", family.parts_on("npu"))[1:] == (
        "model.layers.0.mlp.experts.0.gate_and_up_proj",
        "model.layers.0.mlp.experts.0.down_proj",
    )
    assert family.parts_on("cuda") == family.parts_of


# -- row orders and heads -------------------------------------------------------------------------------


def orders(tmp_path: Path, family: str) -> dict[str, RowOrder]:
    (example,) = [item for item in EXAMPLES if item.family == family]
    found = {}
    for layer in packed(tmp_path, example).layers:
        for part in (*layer.parts, *(part for group in (*layer.w13, *layer.w2) for part in group)):
            found[part.module.name] = part.row_order
    return found


@pytest.mark.parametrize(
    ("family", "module", "order"),
    [
        ("hunyuan-image-3", "model.layers.0.self_attn.qkv_proj", RowOrder("qkv_per_kv_head", 2, 4, 32)),
        ("hunyuan-image-3", "model.layers.0.mlp.experts.1.gate_and_up_proj", RowOrder("halves_swapped")),
        ("hunyuan-image-3", "model.layers.0.mlp.shared_mlp.gate_and_up_proj", RowOrder("halves_swapped")),
        ("hunyuan-image-3", "model.layers.0.mlp.experts.1.down_proj", RowOrder()),
        ("per-head-qkv", "gpt_neox.layers.0.attention.query_key_value", RowOrder("qkv_per_kv_head", 8, 1, 32)),
        ("falcon", "transformer.h.0.self_attention.query_key_value", RowOrder("qkv_per_kv_head", 2, 4, 32)),
        ("internlm2", "model.layers.0.attention.wqkv", RowOrder("qkv_per_kv_head", 2, 4, 32)),
        ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj", RowOrder("interleaved")),
        ("gpt-oss", "model.layers.0.mlp.experts.down_proj", RowOrder()),
        ("minimax-h3-native", "blocks.0.attn.qkv_proj", RowOrder("qkv_per_kv_head", 8, 1, 32)),
        ("minimax-h3", "transformer_blocks.0.ff.net.0.proj", RowOrder("halves_swapped")),
        ("phi3", "model.layers.0.self_attn.qkv_proj", RowOrder()),
        ("phi3", "model.layers.0.mlp.gate_up_proj", RowOrder()),
        ("glm4", "model.layers.0.mlp.gate_up_proj", RowOrder()),
    ],
)
def test_row_orders(tmp_path: Path, family: str, module: str, order: RowOrder) -> None:
    assert orders(tmp_path, family)[module] == order


def test_multi_query_falcon_has_one_kv_head(tmp_path: Path) -> None:
    config = {"model_type": "falcon", "num_attention_heads": 8, "hidden_size": 256, "multi_query": True}
    name = "transformer.h.0.self_attention.query_key_value"
    (layer,) = packed(tmp_path, Example("falcon", config, {name: (320, 256)}, {})).layers
    assert layer.parts[0].row_order == RowOrder("qkv_per_kv_head", 1, 8, 32)
    assert layer.spec.parts == (256, 32, 32)


@pytest.mark.parametrize(
    ("family", "layer", "parts"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj", (256, 64, 64)),
        ("phi3", "model.layers.0.mlp.gate_up_proj", (512, 512)),
        ("llama", "model.layers.0.self_attn.qkv_proj", (256, 64, 64)),
        ("gemma", "model.layers.0.self_attn.qkv_proj", (256, 64)),
        ("flux2", "transformer_blocks.0.ff.linear_in", (768, 768)),
        ("internlm2", "model.layers.0.attention.wqkv", (256, 64, 64)),
    ],
)
def test_parts_of_a_layer(tmp_path: Path, family: str, layer: str, parts: tuple[int, ...]) -> None:
    (example,) = [item for item in EXAMPLES if item.family == family]
    assert layers_of(packed(tmp_path, example))[layer].spec.parts == parts


def test_heads_belong_to_the_part_that_a_module_lies_in() -> None:
    config = {
        "thinker_config": {"text_config": {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}},
        "talker_config": {"text_config": {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 256}},
    }

    def heads(name: str) -> tuple[int, int, int]:
        scope = scope_of(name)
        assert scope is not None
        found = scoped_attention(config, scope)
        return found.heads, found.kv_heads, found.head_dim

    assert heads("thinker.model.layers.0.self_attn.q_proj") == (16, 4, 64)
    assert heads("talker.model.layers.0.self_attn.q_proj") == (8, 8, 32)
    assert heads("thinker.visual.blocks.0.attn.qkv") == (0, 0, 0)
    assert scope_of("model.layers.0.self_attn.q_proj") is None


def test_the_language_model_inside_tells_the_family() -> None:
    config = {"model_type": "unheard-of", "llm_config": {"model_type": "internlm2"}}
    assert identifiers_of(config) == ("unheard-of", "internlm2")
    assert family_of(config, FAMILIES).name == "internlm2"


# -- stacked experts ------------------------------------------------------------------------------------


def stacks(tmp_path: Path, kind: str, modules: dict[str, tuple[int, ...]]) -> PackedLayer:
    result = packed(tmp_path, Example("", {"model_type": kind}, modules, {}))
    (layer,) = [layer for layer in result.layers if layer.spec.op == "moe"]
    return layer


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "gpt_oss", "never-seen"])
@pytest.mark.parametrize(
    ("up", "down"), [((4, 192, 256), (4, 256, 96)), ((4, 256, 192), (4, 96, 256))], ids=["straight", "transposed"]
)
def test_either_orientation_of_a_stack_gives_the_same_layer(
    tmp_path: Path, kind: str, up: tuple[int, ...], down: tuple[int, ...]
) -> None:
    layer = stacks(tmp_path, kind, {"l.0.mlp.experts.gate_up_proj": up, "l.0.mlp.experts.down_proj": down})
    assert layer.stacked
    assert layer.spec.name == "l.0.mlp.experts"
    assert (layer.spec.out_features, layer.spec.in_features) == (256, 256)
    assert layer.spec.moe is not None
    assert (layer.spec.moe.experts, layer.spec.moe.intermediate) == (4, 96)
    assert (len(layer.w13), len(layer.w2)) == (1, 1)


def test_stacks_of_gate_and_up_apart(tmp_path: Path) -> None:
    modules = {f"l.0.mlp.experts.{name}": (4, 96, 256) for name in ("gate_proj", "up_proj")}
    layer = stacks(tmp_path, "qwen3_moe", {**modules, "l.0.mlp.experts.down_proj": (4, 256, 96)})
    assert [part.module.name.rpartition(".")[2] for part in layer.w13[0]] == ["gate_proj", "up_proj"]
    assert layer.spec.moe is not None
    assert layer.spec.moe.intermediate == 96


def codes(result: Packed) -> Iterator[tuple[str, str]]:
    return ((finding.code, finding.severity) for finding in result.findings)


def test_stacks_with_different_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    modules = {"l.0.experts.gate_up_proj": (4, 192, 256), "l.0.experts.down_proj": (3, 256, 96)}
    result = packed(tmp_path, Example("", {"model_type": "qwen3_moe"}, modules, {}))
    assert ("mixed-fused-shards", "error") in codes(result)
    assert "l.0.experts" in result.invalid


def test_a_stack_without_its_up_projection_is_refused(tmp_path: Path) -> None:
    modules = {"l.0.experts.gate_proj": (4, 96, 256), "l.0.experts.down_proj": (4, 256, 96)}
    result = packed(tmp_path, Example("", {"model_type": "qwen3_moe"}, modules, {}))
    assert ("missing-tensor", "error") in codes(result)


# -- what stays in 16 bit by construction ---------------------------------------------------------------


def test_a_projection_that_no_producer_quantizes_contradicts_nothing(tmp_path: Path) -> None:
    names = ["model.layers.61.eh_proj", "model.layers.61.self_attn.o_proj", "model.layers.61.mlp.gate"]
    config = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    write_checkpoint(tmp_path, config, {f"{name}.weight": bf16(64, 64) for name in names})
    plan = omniplat.plan(tmp_path, "cpu")
    blamed = {name for item in plan.findings if item.code == "tensors-contradict-config" for name in item.modules}
    assert blamed == {"model.layers.61.self_attn.o_proj"}
