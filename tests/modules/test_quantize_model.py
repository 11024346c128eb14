"""`quantize_model` and `restore`: which layers get what, what they compute, and that nothing half-done remains."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import omniplat
from omniplat import oracle
from omniplat.errors import BackendNotInstalledError, UnsupportedCombinationError, UsageError
from omniplat.integrations.online_layers import choose_online
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.online import METHODS, block_of, parse_method
from omniplat.scheme import Scheme
from tests.modules import tiny
from tests.modules.tiny import Adapter


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width)])


class WanBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn1 = Attention(width)
        self.ffn = nn.Module()
        self.ffn.net = nn.ModuleList([nn.Linear(width, 2 * width), nn.Identity(), nn.Linear(2 * width, width)])


class WanTransformer3DModel(nn.Module):
    """The names of Wan's transformer in diffusers."""

    def __init__(self, blocks: int = 3, width: int = 64, **config: Any) -> None:
        super().__init__()
        self.config = config
        self.condition_embedder = nn.Module()
        self.condition_embedder.time_proj = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(WanBlock(width) for _ in range(blocks))
        self.proj_out = nn.Linear(width, 16)


class AutoencoderKL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)


class Pipeline:
    """As diffusers' pipelines: no module, but parts."""

    def __init__(self) -> None:
        text = nn.Module()
        text.proj = nn.Linear(64, 64)
        self.components = {
            "transformer": WanTransformer3DModel(),
            "transformer_2": WanTransformer3DModel(),
            "vae": AutoencoderKL(),
            "text_encoder": text,
            "scheduler": object(),
        }


def schemes(plan: omniplat.Plan) -> dict[str, str]:
    return {layer.name: layer.executes or "" for layer in plan.layers}


def quantized(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, ModelLinear)}


def named_linears(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


WIDE = {"int4": {"group_size": 32}, "mxfp4_dualscale": {"num_bf16_fallback_layers": 0}}
STORED = {
    "fp8": "fp8-tensor/fp8-tensor",
    "int8": "int8-channel/int8-token",
    "mxfp8": "mxfp8/mxfp8",
    "mxfp4": "mxfp4/mxfp4",
    "mxfp4_dualscale": "mxfp4-dual/mxfp4-dual",
    "nvfp4": "nvfp4/nvfp4",
    "int4": "int4-g32/a16",
}


@pytest.mark.parametrize("method", sorted(STORED))
def test_every_method_computes_what_the_oracle_does(method: str) -> None:
    model = tiny.decoder()
    before = {
        name: linear.weight.detach().clone() for name, linear in model.named_modules() if name in named_linears(model)
    }
    plan = omniplat.quantize_model(model, {"method": method, **WIDE.get(method, {})}, "cpu")
    assert quantized(model) == set(before)
    assert set(schemes(plan).values()) == {STORED[method]}
    scheme = Scheme.parse(STORED[method])
    name = "model.layers.0.mlp.gate_proj"
    x = tiny.rows()
    activation = parse_method({"method": method, **WIDE.get(method, {})}).activation
    weight = oracle.dequantize(oracle.quantize_weight(before[name].numpy(), scheme.weight))
    used = x.numpy() if activation is None else oracle.quantize_activation(x.numpy(), activation)
    found = model.get_submodule(name)(x).numpy()
    np.testing.assert_allclose(found, used @ weight.T, rtol=1e-3, atol=1e-3)
    assert all(layer.stored_bytes < 8192 for layer in plan.layers)


def test_fp8_has_its_variants() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"granularity": "channel"}, "fp8-channel/fp8-token"),
        ({"weight_block_size": [128, 128]}, "fp8-block128x128/fp8-g128"),
    ]
    for options, scheme in cases:
        model = tiny.decoder()
        assert set(schemes(omniplat.quantize_model(model, {"method": "fp8", **options}, "cpu")).values()) == {scheme}
        assert torch.isfinite(model(tiny.rows())).all()
    model = tiny.decoder()
    scales = dict.fromkeys(named_linears(model), 0.02)
    static = {"method": "fp8", "activation_scheme": "static", "input_scales": scales}
    omniplat.quantize_model(model, static, "cpu")
    q_proj = model.model.layers[0].self_attn.q_proj
    high = q_proj(torch.full((1, 64), 0.02 * 448))
    assert torch.equal(q_proj(torch.full((1, 64), 0.04 * 448)), high)  # clipped where the static scale ends


@pytest.mark.parametrize("method", ["mxfp8", "int8"])
def test_restore_brings_everything_back(method: str) -> None:
    model = tiny.decoder()
    modules, x = dict(model.named_modules()), tiny.rows()
    before = model(x)
    omniplat.quantize_model(model, method, "cpu")
    assert not torch.equal(model(x), before)
    with pytest.raises(UsageError, match="quantized already"):
        omniplat.quantize_model(model, method, "cpu")
    omniplat.restore(model)
    assert dict(model.named_modules()) == modules
    assert torch.equal(model(x), before)
    with pytest.raises(UsageError, match="nothing to restore"):
        omniplat.restore(model)
    omniplat.quantize_model(model, method, "cpu", restorable=False)
    with pytest.raises(UsageError, match="were not kept"):
        omniplat.restore(model)
    assert quantized(model)


def test_a_state_dict_moves_between_models() -> None:
    one, two = tiny.decoder(), tiny.decoder()
    for model in (one, two):
        omniplat.quantize_model(model, "mxfp4", "cpu")
    assert not any("original" in name for name in one.state_dict())
    assert not torch.equal(two(tiny.rows()), one(tiny.rows()))
    two.load_state_dict(one.state_dict())
    assert torch.equal(two(tiny.rows()), one(tiny.rows()))


# --- which layers ---------------------------------------------------------------------------------------------------

BLOCK_LAYERS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "ffn.net.0", "ffn.net.2")


def of_blocks(*indices: int, prefix: str = "") -> set[str]:
    return {f"{prefix}blocks.{index}.{layer}" for index in indices for layer in BLOCK_LAYERS}


def test_sensitive_layers_of_diffusion_transformers_stay() -> None:
    model = WanTransformer3DModel()
    plan = omniplat.quantize_model(model, "mxfp8", "cpu")
    assert quantized(model) == of_blocks(0, 1, 2)
    advice = {name: item for item in plan.findings if item.code == "model-advice" for name in item.modules}
    assert set(advice) == {"condition_embedder.time_proj", "proj_out"}
    assert "vllm-omni issue 2728" in advice["proj_out"].message
    assert plan.layer("proj_out").status == "unquantized"
    other = WanTransformer3DModel()
    omniplat.quantize_model(other, {"method": "mxfp8", "keep_sensitive": False}, "cpu")
    assert quantized(other) == {*of_blocks(0, 1, 2), "condition_embedder.time_proj", "proj_out"}


def test_leading_blocks_stay() -> None:
    model = WanTransformer3DModel(blocks=7)
    plan = omniplat.quantize_model(model, "mxfp4_dualscale", "cpu")
    assert quantized(model) == of_blocks(5, 6)
    assert plan.layer("blocks.4.ffn.net.0").decided_by.rule == "num_bf16_fallback_layers=5"
    with pytest.raises(UsageError, match="18 x num_bf16_fallback_layers=5"):
        omniplat.quantize_model(WanTransformer3DModel(blocks=3), "mxfp4_dualscale", "cpu")


def unrecognised(layers: int = 2) -> nn.Module:
    """A model whose blocks have a name that nobody knows."""
    model = nn.Module()
    model.stages = nn.ModuleList(Attention(64) for _ in range(layers))
    return model


@pytest.mark.parametrize("method", ["mxfp4_dualscale", {"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 1}])
@pytest.mark.parametrize("route", ["", "default", "transformer", "transformer.stages.1"])
def test_leading_blocks_that_are_not_recognised_are_an_error(method: str | dict[str, Any], route: str) -> None:
    model: Any = unrecognised()
    if route:
        model = Pipeline()
        model.components["transformer"] = unrecognised()  # beside others, which have blocks
        model.components["text_encoder"] = WanTransformer3DModel()
    routing = {route: method} if route else method
    with pytest.raises(UsageError, match=r"blocks in 16 bit, and none are recognised around .*to_q: num_bf16_fallback"):
        omniplat.quantize_model(model, routing, "cpu")
    parts = model.components.values() if route else (model,)
    assert not any(quantized(part) for part in parts if isinstance(part, nn.Module))


def test_an_engine_does_not_pass_over_leading_blocks_either() -> None:
    def layers(*names: str) -> Any:
        packed = [SimpleNamespace(modules=[SimpleNamespace(name=name)]) for name in names]
        return SimpleNamespace(
            component=SimpleNamespace(name="transformer", config={}),
            planned_layers=[SimpleNamespace(packed=item) for item in packed],
            family=SimpleNamespace(parts_of={}),
        )

    method = parse_method("mxfp4_dualscale")
    with pytest.raises(UsageError, match="none are recognised in transformer"):
        choose_online(method, layers("stages.0.to_q", "stages.1.to_q"))
    assert set(choose_online(method, layers("blocks.0.to_q", "blocks.5.to_q")).kept) == {"blocks.0.to_q"}
    assert not choose_online(replace(method, leading_blocks=0), layers("stages.0.to_q")).kept


def test_no_leading_blocks_need_no_recognition() -> None:
    model = unrecognised()
    omniplat.quantize_model(model, {"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 0}, "cpu")
    assert quantized(model) == {f"stages.{i}.{name}" for i in (0, 1) for name in ("to_q", "to_k", "to_v", "to_out.0")}


def test_every_part_of_a_pipeline_has_leading_blocks_of_its_own() -> None:
    pipeline = Pipeline()
    pipeline.components = {"text_encoder": WanTransformer3DModel(), **pipeline.components}
    omniplat.quantize_model(pipeline, {"default": {"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 2}}, "cpu")
    for name in ("transformer", "transformer_2"):
        part = pipeline.components[name]
        assert isinstance(part, nn.Module)
        assert quantized(part) == of_blocks(2)


@pytest.mark.parametrize(
    ("entry", "left"),
    [
        ("blocks.1.attn1.to_q", {"blocks.1.attn1.to_q"}),
        ("blocks.1", of_blocks(1)),
        ("blocks.*.ffn", {f"blocks.{i}.ffn.net.{j}" for i in range(12) for j in (0, 2)}),
        ("*to_q", {f"blocks.{i}.attn1.to_q" for i in range(12)}),
        (r"re:blocks\.1\d", of_blocks(10, 11)),
        ("blocks.2.attn1.to_qkv", {f"blocks.2.attn1.to_{part}" for part in "qkv"}),
    ],
)
def test_ignored_layers(entry: str, left: set[str]) -> None:
    model = WanTransformer3DModel(blocks=12)
    plan = omniplat.quantize_model(model, {"method": "mxfp8", "ignored_layers": [entry]}, "cpu")
    assert quantized(model) == of_blocks(*range(12)) - left
    assert {plan.layer(name).decided_by.rule for name in left} == {f"ignored_layers[{entry!r}]"}


@pytest.mark.parametrize("entry", ["blocks.1.attn", "locks.1", "to_q", "blocks.?", "re:attn1", "*.nothing"])
def test_an_entry_that_names_nothing_is_an_error(entry: str) -> None:
    model = WanTransformer3DModel()
    with pytest.raises(UsageError, match="names no layer of the model"):
        omniplat.quantize_model(model, {"method": "mxfp8", "ignored_layers": ["blocks.1", entry]}, "cpu")
    assert not quantized(model)


def test_components_are_routed_on_dots() -> None:
    pipeline = Pipeline()
    first, second = pipeline.components["transformer"], pipeline.components["transformer_2"]
    routing = {"transformer": {"method": "fp8", "ignored_layers": ["blocks.0"]}, "vae": None}
    plan = omniplat.quantize_model(pipeline, routing, "cpu")
    assert isinstance(first, nn.Module)
    assert isinstance(second, nn.Module)
    assert quantized(first) == of_blocks(1, 2)
    assert not quantized(second)
    assert plan.layer("transformer.blocks.1.attn1.to_q").stored == "fp8-tensor"
    omniplat.restore(pipeline)
    assert not quantized(first)
    plan = omniplat.quantize_model(pipeline, {"transformer_2": {"method": "int8"}, "default": "mxfp8"}, "cpu")
    found = schemes(plan)
    assert found["transformer.blocks.0.attn1.to_q"] == "mxfp8/mxfp8"
    assert found["transformer_2.blocks.0.attn1.to_q"] == "int8-channel/int8-token"
    assert found["text_encoder.proj"] == "bf16/a16"
    assert "text encoders" in plan.layer("text_encoder.proj").decided_by.rule
    omniplat.restore(pipeline)
    omniplat.quantize_model(pipeline, {"text_encoder": "mxfp8"}, "cpu")
    text = pipeline.components["text_encoder"]
    assert isinstance(text, nn.Module)
    assert quantized(text) == {"proj"}


def test_the_longest_prefix_counts() -> None:
    model = tiny.decoder()
    routing = {"model.layers": "mxfp8", "model.layers.0.mlp": "int8", "model.layers.0.self_attn.o_proj": None}
    found = schemes(omniplat.quantize_model(model, routing, "cpu"))
    layer = "model.layers.0"
    assert found[f"{layer}.self_attn.q_proj"] == "mxfp8/mxfp8"
    assert found[f"{layer}.self_attn.o_proj"] == "bf16/a16"
    assert found[f"{layer}.mlp.up_proj"] == "int8-channel/int8-token"


def test_a_component_with_nothing_to_quantize_says_so() -> None:
    for routing, reason in (
        ({"vae": "mxfp8"}, "component 'vae' has neither linear layers nor experts"),
        ({"transformer_3": "mxfp8"}, "no component 'transformer_3'; the model has: .*transformer, transformer_2, vae"),
    ):
        with pytest.raises(UsageError, match=reason):
            omniplat.quantize_model(Pipeline(), routing, "cpu")
    with pytest.raises(UsageError, match=r"neither a torch[.]nn[.]Module nor"):
        omniplat.quantize_model(object(), "mxfp8", "cpu")


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_model_that_is_known_to_fail_is_refused() -> None:
    config = {"in_channels": 48, "num_layers": 30}
    model = WanTransformer3DModel(**config)
    for method in ("mxfp4", "nvfp4"):
        with pytest.raises(UsageError, match=r"Wan2.2-TI2V-5B: .*pull request 3578.*--allow model-advice"):
            omniplat.quantize_model(model, method, "cpu")
        assert not quantized(model)
    omniplat.quantize_model(WanTransformer3DModel(**config), "mxfp8", "cpu")
    omniplat.quantize_model(WanTransformer3DModel(in_channels=16, num_layers=40), "mxfp4", "cpu")
    plan = omniplat.quantize_model(model, "mxfp4", "cpu", allow=["model-advice"])
    assert any("TI2V-5B" in item.message and item.severity == "warning" for item in plan.findings)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fp7", "no method 'fp7'; known: fp8, int8"),
        ({"method": "mxfp8", "group_size": 64}, "mxfp8 has no option group_size"),
        ({"method": "int4", "group_size": "64"}, "group_size must be of type int"),
        ({"method": "fp8", "granularity": "row"}, "granularity is one of tensor, channel"),
        ({"method": "fp8", "activation_scheme": "static"}, "needs input_scales"),
        ({"method": "fp8", "weight_block_size": [128]}, "two positive numbers"),
        ({"method": "int8", "activation_scheme": "static"}, "activation_scheme is one of dynamic"),
        ({"method": "int4", "group_size": 48}, "64 columns are not a multiple of int4's group of 48"),
        ({"method": "mxfp8", "ignored_layers": ["re:("]}, "no regular expression"),
    ],
)
def test_what_means_nothing_is_refused(method: Any, reason: str) -> None:
    model = tiny.decoder()
    with pytest.raises(UsageError, match=reason):
        omniplat.quantize_model(model, method, "cpu")
    assert not quantized(model)


def test_what_no_kernel_runs_changes_nothing() -> None:
    model = tiny.decoder()
    with pytest.raises(UnsupportedCombinationError):
        omniplat.quantize_model(model, "mxfp4", "npu:310p")
    assert not quantized(model)


def test_layers_that_are_not_called_or_shared_stay() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 64)
            self.attention = nn.MultiheadAttention(64, 2)
            self.proj = nn.Linear(64, 64)
            self.out = nn.Linear(64, 10, bias=False)
            self.out.weight = self.embed.weight

    model = Model()
    plan = omniplat.quantize_model(model, "mxfp8", "cpu")
    assert quantized(model) == {"proj"}
    assert plan.layer("out").decided_by.rule == "its weight is another module's too"
    assert "MultiheadAttention" in plan.layer("attention.out_proj").decided_by.rule


def test_adapters_stay_as_they_are() -> None:
    model = tiny.decoder()
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Adapter(mlp.down_proj)
    plan = omniplat.quantize_model(model, "mxfp8", "cpu")
    assert len(quantized(model)) == 7
    assert isinstance(mlp.down_proj.base_layer, ModelLinear)
    assert plan.layer("model.layers.0.mlp.down_proj.lora_A").decided_by.rule == "part of an adapter"
    assert model(tiny.rows()).isfinite().all()
    omniplat.restore(model)
    assert type(mlp.down_proj.base_layer) is nn.Linear


def test_stacked_experts_are_never_left_silently() -> None:
    name = "model.layers.0.mlp.experts"

    def without_gate(model: nn.Module) -> None:
        del model.get_submodule(name).act_fn

    def of_another_form(model: nn.Module) -> None:
        model.get_submodule(name).has_post_expert_norm = True

    def hooked(model: nn.Module) -> None:
        model.get_submodule(name).forward = lambda *_: None

    def of_unknown_gate(model: nn.Module) -> None:
        model.get_submodule(name).act_fn = nn.Hardswish()

    for change, reason in (
        (without_gate, "shows neither an act_fn nor a gate"),
        (of_another_form, "which normalizes what each expert returns"),
        (hooked, "with a forward of its own"),
        (of_unknown_gate, "whose gate is none of silu, "),
    ):
        model = tiny.stacked()
        change(model)
        with pytest.raises(UsageError, match=rf"{name}.*{reason}.*|(?s:.*{name}: {reason})"):
            omniplat.quantize_model(model, "mxfp8", "cpu")
        assert not quantized(model)
        plan = omniplat.quantize_model(model, {"method": "mxfp8", "ignored_layers": ["*.experts"]}, "cpu")
        assert len(quantized(model)) == 4
        assert plan.layer(name).status == "unquantized"
        assert plan.layer(name).decided_by.rule == "ignored_layers['*.experts']"


@pytest.mark.parametrize("method", ["fp8", "int8", "mxfp4", "nvfp4", "int4"])
def test_stacked_experts_compute_what_the_oracle_does(method: str) -> None:
    model, name = tiny.stacked(), "model.layers.0.mlp.experts"
    stack = model.get_submodule(name)
    assert isinstance(stack, tiny.Stack)
    parsed = parse_method({"method": method, **WIDE.get(method, {})})
    plan = omniplat.quantize_model(model, {"method": method, **WIDE.get(method, {})}, "cpu")
    assert plan.layer(name).op == "moe"
    assert plan.layer(name).stored == STORED[method].partition("/")[0]
    experts = model.get_submodule(name)
    assert isinstance(experts, ModelExperts)
    x = tiny.rows()
    ids, weights = tiny.route(x, 3)
    w13, w2 = (
        oracle.dequantize(oracle.quantize_weight(tensor.detach().numpy(), parsed.weight))
        for tensor in (stack.gate_up_proj, stack.down_proj)
    )
    with torch.no_grad():
        stack.gate_up_proj.copy_(torch.from_numpy(w13))
        stack.down_proj.copy_(torch.from_numpy(w2))
        expected = stack(x, ids, weights)
        found = experts(x, ids, weights)
    error = float((found - expected).norm() / expected.norm())
    assert error < (1e-5 if parsed.activation is None else 0.3)
    assert (error > 1e-4) == (parsed.activation is not None)
    omniplat.restore(model)
    assert model.get_submodule(name) is stack


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_bitsandbytes_quantizes_itself_or_says_what_is_missing() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(BackendNotInstalledError, match="pip install bitsandbytes"):
        omniplat.quantize_model(model, "bitsandbytes", "cpu")
    assert not quantized(model)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_gives_its_own_values(kind: str, nested: bool) -> None:
    from bitsandbytes import functional

    layer = nn.Linear(128, 64, bias=False)
    model = nn.Sequential(layer)
    packed, state = functional.quantize_4bit(
        layer.weight.detach(), blocksize=64, compress_statistics=nested, quant_type=kind
    )
    values = functional.dequantize_4bit(packed, state)
    x = torch.randn(5, 128)
    method = {"method": "bitsandbytes", "quant_type": kind, "compress_statistics": nested}
    omniplat.quantize_model(model, method, "cpu")
    torch.testing.assert_close(model(x), x @ values.T, rtol=1e-4, atol=1e-4)


def test_the_table_of_methods_is_whole() -> None:
    assert set(METHODS) == {*STORED, "bitsandbytes"}
    for name in METHODS:
        parse_method(name)


# --- undoing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [tiny.decoder, tiny.stacked, WanTransformer3DModel])
def test_restoring_leaves_nothing_changed(build: type[nn.Module]) -> None:
    model = build()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)

    def everything() -> list[tuple[str, int, bool, bytes]]:
        modules = [(name, id(module), module.training, b"") for name, module in model.named_modules()]
        parameters = [(n, id(p), p.requires_grad, p.detach().numpy().tobytes()) for n, p in model.named_parameters()]
        return modules + parameters

    before, state = everything(), list(model.state_dict())
    omniplat.quantize_model(model, {"default": {"method": "mxfp8"}}, "cpu")
    assert everything() != before
    omniplat.restore(model)
    assert everything() == before
    assert list(model.state_dict()) == state


def test_restored_layers_take_the_mode_of_the_model() -> None:
    model = tiny.decoder()
    omniplat.quantize_model(model, "int8", "cpu")
    model.eval()
    omniplat.restore(model)
    assert not any(module.training for module in model.modules())


def test_a_model_of_which_a_part_is_offloaded_is_not_moved() -> None:
    model = tiny.decoder()
    model.register_buffer("elsewhere", torch.empty(2, device="meta"))
    omniplat.quantize_model(model, "mxfp8", "cpu")
    assert quantized(model)
    assert model.elsewhere.is_meta


# --- routing --------------------------------------------------------------------------------------------------------


def test_a_prefix_never_catches_a_longer_name() -> None:
    for named, other in (("transformer", "transformer_2"), ("transformer_2", "transformer")):
        pipeline = Pipeline()
        plan = omniplat.quantize_model(pipeline, {named: {"method": "fp8"}}, "cpu")
        first, second = pipeline.components[named], pipeline.components[other]
        assert isinstance(first, nn.Module)
        assert isinstance(second, nn.Module)
        assert quantized(first) == of_blocks(0, 1, 2)
        assert not quantized(second)
        assert plan.layer(f"{other}.blocks.0.attn1.to_q").decided_by.rule == "no method for this component"


def test_a_cascade_has_a_method_for_each_transformer() -> None:
    pipeline = Pipeline()
    methods = {
        "transformer": {"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 1},
        "transformer_2": {"method": "mxfp8", "ignored_layers": ["blocks.2"]},
        "vae": None,
    }
    plan = omniplat.quantize_model(pipeline, methods, "cpu")
    first, second = pipeline.components["transformer"], pipeline.components["transformer_2"]
    assert isinstance(first, nn.Module)
    assert isinstance(second, nn.Module)
    assert quantized(first) == of_blocks(1, 2)
    assert quantized(second) == of_blocks(0, 1)
    assert plan.layer("transformer.blocks.0.ffn.net.0").decided_by.rule == "num_bf16_fallback_layers=1"
    assert plan.layer("transformer_2.blocks.2.ffn.net.0").decided_by.rule == "ignored_layers['blocks.2']"
    assert plan.summary.by_scheme.keys() == {"mxfp4-dual/mxfp4-dual", "mxfp8/mxfp8", "bf16/a16"}


@pytest.mark.parametrize(
    ("routing", "reason"),
    [
        ({"vae": {"method": "fp8"}}, "component 'vae' has neither linear layers nor experts: there is nothing for fp8"),
        (
            {"transformer": {"method": "fp8", "ignored_layers": ["*"]}},
            r"component 'transformer' has nothing for fp8 to quantize: 20 x ignored_layers\['\*'\]",
        ),
        ({"scheduler": "fp8"}, "no component 'scheduler'"),
        (
            {"transform": "fp8"},
            "no component 'transform'; the model has: text_encoder, transformer, transformer_2, vae",
        ),
        ({"default": "fp8", "transformer": None, "transformer_2": None}, r"the model has nothing .*text encoders"),
    ],
)
def test_a_component_that_has_nothing_to_quantize_is_named(routing: dict[str, Any], reason: str) -> None:
    pipeline = Pipeline()
    with pytest.raises(UsageError, match=reason):
        omniplat.quantize_model(pipeline, routing, "cpu")
    assert not any(quantized(part) for part in pipeline.components.values() if isinstance(part, nn.Module))


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("blocks.7.layers.0.to_q", ("blocks", 7)),
        ("transformer_blocks.12.attn.to_q", ("transformer_blocks", 12)),
        ("model.layers.3.mlp.experts", ("model.layers", 3)),
        ("encoder.layer.0.attention", ("encoder.layer", 0)),
        ("x_embedder", None),
        ("blocks.norm", None),
    ],
)
def test_a_block_is_the_outermost(name: str, block: tuple[str, int] | None) -> None:
    assert block_of(name) == block


def test_the_plan_counts_stacks_that_stay_once() -> None:
    model = tiny.stacked()
    plan = omniplat.quantize_model(model, {"method": "int8", "ignored_layers": ["*.experts"]}, "cpu")
    (layer,) = [layer for layer in plan.layers if layer.op == "moe"]
    held = model.get_submodule(layer.name)
    assert layer.stored_bytes == sum(parameter.nbytes for parameter in held.parameters())
