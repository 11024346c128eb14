"""Rules in an engine's names and in other spellings, for every dialect and way of writing an entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omniplat.formats.aliases import Aliases
from omniplat.formats.matching import Exact, ModuleIndex, glob
from omniplat.models.spellings import PREFIXES, SEGMENTS, spellings_of
from tests.support.checkpoints import bf16, fp8_channel, gptq, mxfp8
from tests.support.resolving import codes, only, resolve, schemes

Q, K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
GATE, UP, DOWN = (f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down"))
FP8_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
             "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}  # fmt: skip
MX = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 8, "group_size": 32,
      "data_type": "mx_fp"}  # fmt: skip
QUARK = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"},
         "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": True}}  # fmt: skip


def compressed(entry: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": FP8_GROUP}, "ignore": [entry]}


def modelopt(entry: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": [entry]}


def quark(entry: str) -> dict[str, Any]:
    return {"quant_method": "quark", "export": {}, "global_quant_config": QUARK, "exclude": [entry]}


def fbgemm(entry: str) -> dict[str, Any]:
    return {"quant_method": "fbgemm_fp8", "modules_to_not_convert": [entry]}


def auto_round(entry: str) -> dict[str, Any]:
    return {**MX, "extra_config": {entry: {"bits": 16}}}


def gptq_dynamic(entry: str) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
            "dynamic": {f"-:{entry}": {}}}  # fmt: skip


def fp8(module: str) -> dict[str, Any]:
    return fp8_channel(module, 64, 64)


def mx(module: str) -> dict[str, Any]:
    return mxfp8(module, 64, 64)


def int4(module: str) -> dict[str, Any]:
    return gptq(module, 64, 64, 4, 32)


#: (metadata for one entry, tensors of a quantized module, how a pattern is written, how a glob is, "" for neither)
DIALECTS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[str], dict[str, Any]], str, str]] = {
    "compressed-tensors": (compressed, fp8, "re:.*{}$", ""),
    "modelopt": (modelopt, fp8, "", "*.{}"),
    "quark": (quark, fp8, "re:.*{}$", "*.{}"),
    "fbgemm": (fbgemm, fp8, ".*{}$", "*.{}"),
    "auto-round": (auto_round, mx, ".*{}$", ""),
    "gptq": (gptq_dynamic, int4, ".*{}$", ""),
}
#: transformers searches for expressions that its readers take for names.
READ_ONE_WAY = {"fbgemm": {"rule-readings-differ"}}
WRITTEN = [
    (name, style.format(fused)) for name, (_, _, pattern, globbed) in DIALECTS.items()
    for style in filter(None, (pattern, globbed)) for fused in ("self_attn.qkv_proj", "qkv_proj")
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "entry"), WRITTEN)
def test_a_pattern_in_an_engines_name_stands_for_the_parts(tmp_path: Path, dialect: str, entry: str) -> None:
    config, quantized, _, _ = DIALECTS[dialect]
    tensors = {f"{name}.weight": bf16(64, 64) for name in (Q, K, V)} | quantized(DOWN)
    found = resolve(tmp_path, config(entry), tensors)
    assert set(codes(found)) <= READ_ONE_WAY.get(dialect, set())
    assert {name: text for name, text in schemes(found).items() if text == "bf16/a16"}.keys() == {Q, K, V}
    assert {m.name: m.decided_by.rule for m in found.modules}[Q] != ""


@pytest.mark.parametrize(("dialect", "entry"), WRITTEN)
def test_what_is_stored_decides_on_an_engines_name(tmp_path: Path, dialect: str, entry: str) -> None:
    """Parts that are quantized on disk are not what the entry can have meant."""
    config, quantized, _, _ = DIALECTS[dialect]
    tensors = {key: value for name in (Q, K, V, DOWN) for key, value in quantized(name).items()}
    found = resolve(tmp_path, config(entry), tensors)
    assert codes(found) == ["rule-matches-nothing"]
    assert "bf16/a16" not in schemes(found).values()


@pytest.mark.parametrize("part", [Q, K, V])
@pytest.mark.parametrize(("dialect", "entry"), WRITTEN)
def test_parts_that_an_engines_name_leaves_out_and_that_are_quantized_are_said(
    tmp_path: Path, dialect: str, entry: str, part: str
) -> None:
    config, quantized, _, _ = DIALECTS[dialect]
    tensors = {f"{part}.weight": bf16(64, 64)}
    for name in {Q, K, V, DOWN} - {part}:
        tensors |= quantized(name)
    found = resolve(tmp_path, config(entry), tensors)
    assert [m.name for m in found.modules if m.status == "unquantized"] == [part]
    said = [item for item in found.findings if item.code == "rule-readings-differ"]
    assert {name for item in said for name in item.modules} == {Q, K, V}
    assert {item.severity for item in found.findings} == {"warning"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engines_name_that_is_the_checkpoints_is_not_expanded(tmp_path: Path, dialect: str) -> None:
    """qkv_proj lies fused on disk in one block, and apart in another."""
    config, quantized, pattern, globbed = DIALECTS[dialect]
    whole = "vision.blocks.0.attn.qkv_proj"
    tensors = {f"{whole}.weight": bf16(192, 64)} | quantized(Q) | quantized(K) | quantized(V)
    found = resolve(tmp_path, config((pattern or globbed).format("qkv_proj")), tensors)
    assert set(codes(found)) <= READ_ONE_WAY.get(dialect, set())
    assert [m.name for m in found.modules if m.status == "unquantized"] == [whole]


WRAPPERS = [(a, b) for a in PREFIXES[-1] for b in PREFIXES[-1] if a != b]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("written", "stored"), WRAPPERS)
def test_a_list_for_another_wrapper(tmp_path: Path, dialect: str, written: str, stored: str) -> None:
    """Rooted patterns as well as names; said to be another spelling."""
    config, quantized, pattern, _ = DIALECTS[dialect]
    head = f"{stored}layers.0.mlp.down_proj"
    tensors = {f"{head}.weight": bf16(64, 64)} | quantized(f"{stored}layers.0.mlp.up_proj")
    rooted = f"{written}layers.0.mlp.down_proj"
    entries = [rooted, *([pattern.replace(".*", "^").format(rooted.replace(".", r"\."))] if pattern else [])]
    for position, entry in enumerate(entries):
        found = resolve(tmp_path / str(position), config(entry), tensors)
        assert schemes(found)[head] == "bf16/a16"
        assert "rule-matches-nothing" not in codes(found), entry
        assert "tensors-contradict-config" not in codes(found), entry


@pytest.mark.parametrize(("written", "stored"), WRAPPERS)
@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A16"])
def test_a_description_file_in_other_names(tmp_path: Path, written: str, stored: str, kind: str) -> None:
    """msModelSlim's keys are exact names; engines and exporters rename modules after they were written."""
    name = f"{stored}layers.0.self_attn.o_proj"
    tensors = {f"{name}.weight": ("I8", (64, 64)), f"{name}.weight_scale": ("F32", (64, 1)),
               f"{name}.weight_offset": ("F32", (64, 1)), f"{stored}layers.0.mlp.gate.weight": bf16(8, 64)}  # fmt: skip
    entries = {
        f"{written}layers.0.self_attn.o_proj.{leaf}": kind for leaf in ("weight", "weight_scale", "weight_offset")
    }
    entries[f"{written}layers.0.mlp.gate.weight"] = "FLOAT"
    found = resolve(
        tmp_path, None, tensors, files={"quant_model_description.json": {"model_quant_type": kind, **entries}}
    )
    assert schemes(found)[name] == ("int8-channel/int8-token" if kind == "W8A8_DYNAMIC" else "int8-channel/a16")
    assert {item.code for item in found.findings} == {"rule-readings-differ"}
    assert {m.name: m.declared.id for m in found.modules if m.declared}[name] == schemes(found)[name]


@pytest.mark.parametrize("stored", ["model.language_model.layers", "language_model.model.layers"])
def test_blocks_in_scope_under_another_wrapper(tmp_path: Path, stored: str) -> None:
    tensors = mx(f"{stored}.0.mlp.up_proj") | {"model.visual.blocks.0.mlp.up_proj.weight": bf16(64, 64)}
    found = resolve(tmp_path, {**MX, "block_name_to_quantize": "model.layers"}, tensors)
    assert schemes(found)[f"{stored}.0.mlp.up_proj"] == "mxfp8/a16"
    assert only(found, "rule-readings-differ").where.rule == "block_name_to_quantize=model.layers"
    assert codes(found) == ["rule-readings-differ"]


@pytest.mark.parametrize(
    "entry", ["model.layers.language_model.layers.0.mlp.down_proj", "talker.model.layers.0.mlp.up_proj"]
)
def test_names_that_no_tool_gives_are_still_nothing(tmp_path: Path, entry: str) -> None:
    found = resolve(tmp_path, compressed(entry), fp8(DOWN) | fp8(UP))
    assert only(found, "rule-matches-nothing").severity == "error"


def test_spellings_go_both_ways() -> None:
    for group in PREFIXES:
        for one in group:
            for other in group:
                if one != other:
                    assert f"{other}layers.0.x" in spellings_of(f"{one}layers.0.x")
    for a, b in SEGMENTS:
        assert f"model.layers.0.{b}.x" in spellings_of(f"model.layers.0.{a}.x")
        assert f"model.layers.0.{a}.x" in spellings_of(f"model.layers.0.{b}.x")
    assert all(name != "a.b" for name in spellings_of("a.b"))


def test_aliases_cost_nothing_until_a_rule_needs_them() -> None:
    names = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(200) for part in "qkv"]
    index = ModuleIndex(names)
    aliases = Aliases(index, {"qkv_proj": ("q_proj", "k_proj", "v_proj")})
    assert "engine" not in vars(aliases)
    for i in range(200):
        assert len(aliases.engine.hits(Exact(f"model.layers.{i}.self_attn.qkv_proj"))) == 3
    assert index.pattern_evaluations == 0
    assert len(aliases.engine.hits(glob("*.qkv_proj"))) == 600
    assert index.pattern_evaluations == 200, "the names of fused modules, counted with the others"


def test_a_long_list_in_other_names_is_not_compared_with_every_name(tmp_path: Path) -> None:
    names = [f"layers.{i}.mlp.experts.{j}.up_proj" for i in range(20) for j in range(20)]
    tensors = {f"model.language_model.{name}.weight": bf16(64, 64) for name in names} | fp8("model.language_model.x")
    config = compressed("") | {"ignore": [f"model.{name}" for name in names]}
    found = resolve(tmp_path, config, tensors)
    assert codes(found) == ["rule-readings-differ"]
    assert found.index.pattern_evaluations == 0
