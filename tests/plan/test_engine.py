"""What an engine's loader cannot deliver is refused when planning for it, and only then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from omniplat.api import make_planned
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.cli.app import app
from omniplat.engines import tensors_below, undeliverable
from omniplat.errors import UnsupportedCombinationError, UsageError
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.storage import Storage
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.models.family import Family
from omniplat.packed import PackedLayer, Part
from omniplat.roworder import AS_IS, RowOrder
from omniplat.scheme import Scheme
from tests.goldens.entries import DATA
from tests.support.checkpoints import write_checkpoint

HUNYUAN, WAN = Family("hunyuan-image-3", ()), Family("wan", ())
OTHER = Family("other", ())
SWAPPED, PER_HEAD = RowOrder("halves_swapped"), RowOrder("qkv_per_kv_head", 2, 2, 16)


def part_of(
    name: str, tensors: dict[str, tuple[int, ...]], order: RowOrder = AS_IS, scheme: str = "int4-g32/a16"
) -> Part:
    infos = {role: TensorInfo(name + role, "U8", shape, "s", 0, 0) for role, shape in tensors.items()}
    return Part(
        ResolvedModule(name, "", None, Scheme.parse(scheme), Storage("plain", "U8"), 96, 64, infos, DecidedBy("", "")),
        order,
    )


def linear(part: Part, rows: tuple[int, ...] = (96,)) -> PackedLayer:
    spec = LayerSpec("l", "linear", 96, 64, part.module.scheme, parts=rows)
    return PackedLayer(spec, (part,))


def experts(w13: tuple[Part, ...], w2: Part, *, stacked: bool = False) -> PackedLayer:
    spec = LayerSpec("e", "moe", 64, 64, w2.module.scheme, moe=MoeSpec(1, 48))
    return PackedLayer(spec, w13=(w13,), w2=((w2,),), stacked=stacked)


def reasons(layer: PackedLayer, family: Family = OTHER, extra: tuple[str, ...] = ()) -> str:
    names = [module.name for module in layer.modules]
    below = tensors_below(names, [TensorInfo(name, "U8", (1,), "s", 0, 0) for name in extra])
    return "; ".join(undeliverable("vllm", family, layer, below))


PLAIN = {".weight": (96, 32), ".weight_scale": (96, 2)}


@pytest.mark.parametrize("leaf", ["k_scale", "v_scale", "q_scale", "k_zero_point"])
def test_scales_of_the_cache_beside_a_projection_are_the_engines(leaf: str) -> None:
    """They are not tensors of the layer: the engine moves them to its attention, where they belong."""
    layer = linear(part_of("a.self_attn.k_proj", PLAIN))
    assert reasons(layer, extra=(f"a.self_attn.k_proj.{leaf}",)) == ""
    needed = linear(part_of("a.self_attn.k_proj", {**PLAIN, f".{leaf}": (1,)}))
    assert f"it takes {leaf} for a scale of the attention" in reasons(needed)


def test_ordinary_modules_are_delivered() -> None:
    assert reasons(linear(part_of("a.q_proj", {**PLAIN, ".g_idx": (64,), ".weight_shape": (2,), ".bias": (96,)}))) == ""
    up, down = part_of("e.experts.0.up_proj", PLAIN), part_of("e.experts.0.down_proj", {**PLAIN, ".input_scale": (1,)})
    assert reasons(experts((up, up), down)) == ""
    assert reasons(experts((part_of("e.experts.0.gate_up_proj", PLAIN),), down)) == ""


@pytest.mark.parametrize(
    ("layer", "family", "reason"),
    [
        (linear(part_of("a.q", {".weight": (9,), ".weight.absmax": (9,)})), WAN, "absmax has a dot"),
        (linear(part_of("a.q", {".weight": (9,), ".weight.absmax": (9,)})), HUNYUAN, "absmax has a dot"),
        (linear(part_of("a.self_attn.q", {".scale": (96, 1)})), OTHER, "scale of the attention"),
        (linear(part_of("lm_head", PLAIN)), OTHER, "vocabulary"),
        (linear(part_of("model.embed_tokens", PLAIN)), OTHER, "vocabulary"),
        (linear(part_of("a.mlp.shared_expert_gate", PLAIN)), OTHER, "build shared_expert_gate without"),
        (linear(part_of("a.q_proj", PLAIN, scheme="gguf-q4_k/a16")), OTHER, "GGUF"),
        (linear(part_of("a.wqkv", PLAIN, PER_HEAD)), OTHER, "order of their own"),
        (linear(part_of("a.qkv_proj", {**PLAIN, ".bias": (96,)}, PER_HEAD)), HUNYUAN, "rows of bias"),
        (linear(part_of("a.qkv_proj", {".weight": (48, 64)}, PER_HEAD)), HUNYUAN, "puts the rows of weight"),
        (linear(part_of("a.qkv_proj", {".weight_scale": (96,)}, PER_HEAD)), HUNYUAN, "puts the rows of weight_scale"),
        (linear(part_of("a.gate_and_up_proj", {".global": (1,)}, SWAPPED), (48, 48)), HUNYUAN, "halves every tensor"),
        (experts((part_of("e.0.gate_up_proj", {".s": ()}),), part_of("e.0.d", PLAIN)), OTHER, "halves every tensor"),
        (
            experts((part_of("e.w13", {"_blocks": (1, 96, 2, 16)}),), part_of("e.d", {"": (1, 64, 48)}), stacked=True),
            OTHER,
            "3-D tensors only",
        ),
        (
            experts((part_of("e.gate_proj", {"": (1, 48, 64)}),), part_of("e.d", {"": (1, 64, 48)}), stacked=True),
            OTHER,
            "drops stacks",
        ),
    ],
)  # fmt: skip
def test_each_limit(layer: PackedLayer, family: Family, reason: str) -> None:
    assert reason in reasons(layer, family)


@pytest.mark.parametrize("family", [OTHER, Family("llama", ()), Family("qwen-image", ())])
def test_dots_are_no_obstacle_where_the_loader_asks_for_other_names(family: Family) -> None:
    part = part_of("a.q_proj", {".weight": (9,), ".weight.absmax": (9,), ".weight.quant_state.x": (9,)})
    assert reasons(linear(part), family) == ""


def test_tensors_without_a_role_count_too() -> None:
    layer = linear(part_of("a.q", PLAIN))
    assert "has a dot" in reasons(layer, WAN, extra=("a.q.weight.quant_state.x",))
    assert reasons(layer, extra=("a.q.left_over", "a.qq.weight.absmax", "a.x")) == ""


def test_hunyuans_scalars_pass_whole() -> None:
    tensors = {**PLAIN, ".input_scale": (1,), ".weight_scale_2": ()}
    assert reasons(linear(part_of("a.gate_and_up_proj", tensors, SWAPPED), (48, 48)), HUNYUAN) == ""
    assert reasons(linear(part_of("a.qkv_proj", tensors, PER_HEAD)), HUNYUAN) == ""


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of vllm"):
        undeliverable("sglang", OTHER, linear(part_of("a", PLAIN)), {})
    with pytest.raises(UsageError, match="sglang"):
        make_planned(DATA / "lc-qwen3-nvfp4" / "checkpoint", "cpu", engine="sglang")


def bitsandbytes(folder: Path) -> Path:
    """One layer of a model whose loader in the engine keeps the names of tensors, which have dots."""
    name = "blocks.0.attn1.to_q.weight"
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        name: ("U8", (2048, 1)),
        f"{name}.absmax": ("F32", (64,)),
        f"{name}.quant_map": ("F32", (16,)),
        f"{name}.quant_state.bitsandbytes__nf4": ("U8", (118,)),
    }
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64]}
    config: dict[str, Any] = {
        "_class_name": "WanTransformer3DModel",
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    }
    values = {f"{name}.quant_state.bitsandbytes__nf4": json.dumps(state).ljust(118).encode()}
    return write_checkpoint(folder, config, tensors, values=values)


def test_the_plan_for_an_engine(tmp_path: Path) -> None:
    folder = bitsandbytes(tmp_path / "c")
    plain = make_planned(folder, "cpu").plan
    assert [layer.status for layer in plain.layers] == ["ok"]
    plan = make_planned(folder, "cpu", engine="vllm").plan
    (layer,) = plan.layers
    assert (layer.status, layer.kernel) == ("unsupported", None)
    rejected = layer.trace[0].rejected
    assert layer.trace[0].kernel == "vllm"
    assert rejected is not None
    assert "has a dot" in rejected["found"]
    found = [item for item in plan.findings if item.code == "engine-cannot-load"]
    assert found
    assert {item.severity for item in found} == {"error"}
    assert found[0].modules == ("blocks.0.attn1.to_q",)
    from omniplat.api import require_runnable

    with pytest.raises(UnsupportedCombinationError, match="has a dot"):
        require_runnable(plan)


@pytest.mark.parametrize(
    ("family", "name", "plain"),
    [
        ("qwen-image", "txt_in", True),
        ("qwen-image", "transformer_blocks.0.img_mod.1", True),
        ("qwen-image", "transformer_blocks.0.attn.to_q", False),
        ("wan", "proj_out", True),
        ("wan", "condition_embedder.time_proj", True),
        ("wan", "blocks.0.ffn.net.2", False),
        ("flux", "single_transformer_blocks.0.proj_out", False),
    ],
)
def test_modules_that_models_of_the_engine_build_plain(family: str, name: str, plain: bool) -> None:
    found = reasons(linear(part_of(name, PLAIN)), Family(family, ()))
    assert ("without a quantization method" in found) == plain


def test_the_command_line(tmp_path: Path) -> None:
    folder = str(bitsandbytes(tmp_path / "c"))
    run = CliRunner().invoke
    assert run(app, ["plan", folder, "--device", "cpu"]).exit_code == 0
    result = run(app, ["plan", folder, "--device", "cpu", "--engine", "vllm", "--json"])
    assert result.exit_code == 1
    assert "engine-cannot-load" in {item["code"] for item in json.loads(result.stdout)["findings"]}


@pytest.mark.parametrize("name", sorted(path.parent.name for path in DATA.glob("*/checkpoint")))
def test_the_bundled_checkpoints(name: str) -> None:
    """gpt-oss has stacks of four dimensions, and Qwen-Image's txt_in is built plain; all others are delivered."""
    plan = make_planned(DATA / name / "checkpoint", "cpu", engine="vllm").plan
    found = [item for item in plan.findings if item.code == "engine-cannot-load"]
    assert bool(found) == any(part in name for part in ("gptoss", "qwenimage"))
