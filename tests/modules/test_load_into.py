"""`load_into`: the model computes what the checkpoint says, wherever its names begin, or nothing of it changes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import omniplat
from omniplat import oracle
from omniplat.conformance.dialect import write_checkpoint
from omniplat.conformance.model import Written
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError, UsageError
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.scheme import UNQUANTIZED, Scheme
from tests.modules import tiny
from tests.modules.tiny import Adapter

Q = "model.layers.0.self_attn.q_proj"


def written(folder: Path, scheme: str = "mxfp8/a16", *, experts: bool = False, keep: tuple[str, ...] = ()) -> Written:
    exceptions = dict.fromkeys(keep, UNQUANTIZED)
    sizes = tiny.EXPERT_SIZES if experts else tiny.SIZES
    return write_checkpoint(folder, Scheme.parse(scheme), sizes, exceptions=exceptions)


def filled(model: nn.Module, checkpoint: Written, prefix: str = "") -> nn.Module:
    """`model` with the values that the checkpoint's codes stand for, in its own layers."""
    values = {
        f"{prefix}{name}.weight": torch.from_numpy(oracle.dequantize(weight)).float()
        for name, weight in checkpoint.weights.items()
    }
    model.load_state_dict(values | {f"{prefix}model.norm.weight": torch.ones(checkpoint.sizes.hidden)})
    return model


def snapshot(model: nn.Module) -> dict[str, tuple[int, type]]:
    parameters = {name: (id(tensor), type(tensor)) for name, tensor in model.named_parameters()}
    return parameters | {f"/{name}": (id(module), type(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "input_scale", "weight_zero_point"])
def test_quantization_tensors_beside_a_plain_weight_have_no_place_and_need_none(leaf: str, tmp_path: Path) -> None:
    """Producers leave them behind where they changed their mind; the plan says so."""
    checkpoint = written(tmp_path, keep=(Q,))
    shard = tmp_path / "model.safetensors"
    save_file(load_file(shard) | {f"{Q}.{leaf}": torch.full((1,), torch.nan)}, shard)
    model = tiny.decoder()
    plan = omniplat.load_into(model, tmp_path, "cpu")
    assert [item.modules for item in plan.findings if item.code == "unexpected-tensor"] == [(Q,)]
    expected = filled(tiny.decoder(), checkpoint)(tiny.rows())
    torch.testing.assert_close(model(tiny.rows()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["mxfp8/a16", "int4-g32/a16", "nvfp4/a16", "fp8-channel/fp8-token"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_computes_what_the_checkpoint_says(scheme: str, device: str, tmp_path: Path) -> None:
    checkpoint = written(tmp_path, scheme, keep=(Q,))
    with torch.device(device):
        model = tiny.decoder()
    plan = omniplat.load_into(model, tmp_path, "cpu")
    block = model.model.layers[0]
    assert type(block.self_attn.q_proj) is nn.Linear
    assert type(block.mlp.up_proj) is ModelLinear
    assert block.mlp.up_proj.in_features == 64
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert plan.layer("model.layers.0.self_attn.k_proj").modules == ("model.layers.0.self_attn.k_proj",)
    assert plan.layer("model.layers.0.mlp.up_proj").stored == scheme.partition("/")[0]
    expected = filled(tiny.decoder(), checkpoint)(tiny.rows())
    error = (model(tiny.rows()) - expected).norm() / expected.norm()
    assert error < (1e-5 if scheme.endswith("a16") else 0.06)
    x = tiny.rows().numpy()
    name = "model.layers.0.mlp.gate_proj"
    alone = oracle.linear(x, checkpoint.weights[name])
    np.testing.assert_allclose(block.mlp.gate_proj(tiny.rows()).numpy(), alone, rtol=1e-4, atol=1e-4)


def test_names_may_begin_elsewhere(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    expected = filled(tiny.decoder(), checkpoint)(tiny.rows())
    wrapped = nn.ModuleDict({"inner": nn.ModuleDict({"net": tiny.decoder()})})
    omniplat.load_into(wrapped, tmp_path, "cpu")
    torch.testing.assert_close(wrapped["inner"]["net"](tiny.rows()), expected, rtol=1e-4, atol=1e-5)
    body = tiny.decoder().model
    omniplat.load_into(body, tmp_path, "cpu")
    torch.testing.assert_close(body(tiny.rows()), expected, rtol=1e-4, atol=1e-5)


def test_a_mapping_of_keys_leads_to_other_names(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    expected = filled(tiny.decoder(), checkpoint)(tiny.rows())
    model = nn.ModuleDict({"trunk": tiny.decoder().model.layers[0], "norm": nn.RMSNorm(64)})
    with pytest.raises(UsageError, match="the model has no such"):
        omniplat.load_into(model, tmp_path, "cpu")
    mapping = {r"^model\.layers\.0": "trunk", r"^model\.norm": "norm"}
    omniplat.load_into(model, tmp_path, "cpu", key_mapping=mapping)
    found = model["norm"](model["trunk"](tiny.rows()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for pattern, reason in (("^nothing", "fits no tensor of the checkpoint"), ("(", "is no substitution")):
        with pytest.raises(UsageError, match=reason):
            omniplat.load_into(tiny.decoder(), tmp_path, "cpu", key_mapping={**mapping, pattern: "x"})


def test_experts_one_by_one_and_in_a_stack(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, experts=True)
    sizes = tiny.EXPERT_SIZES
    expected = filled(tiny.Decoder(tiny.Body(sizes, tiny.ListedExperts(sizes))), checkpoint)(tiny.rows())
    with torch.device("meta"):
        listed = tiny.Decoder(tiny.Body(sizes, tiny.ListedExperts(sizes)))
        stacked = tiny.Decoder(tiny.Body(sizes, tiny.StackedExperts(sizes)))
    plan = omniplat.load_into(listed, tmp_path, "cpu")
    assert isinstance(listed.model.layers[0].mlp.experts[2].down_proj, ModelLinear)
    assert all(layer.op == "linear" for layer in plan.layers)
    torch.testing.assert_close(listed(tiny.rows()), expected, rtol=1e-4, atol=1e-5)
    plan = omniplat.load_into(stacked, tmp_path, "cpu")
    assert isinstance(stacked.model.layers[0].mlp.experts, ModelExperts)
    assert plan.layer("model.layers.0.mlp.experts").op == "moe"
    torch.testing.assert_close(stacked(tiny.rows()), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stacked.bfloat16()(tiny.rows().bfloat16()).float(), expected, rtol=0.05, atol=0.05)


def test_state_dicts_save_and_load(tmp_path: Path) -> None:
    written(tmp_path / "a")
    written(tmp_path / "b", "int8-channel/a16")
    one, two, other = tiny.decoder(), tiny.decoder(), tiny.decoder()
    omniplat.load_into(one, tmp_path / "a", "cpu")
    omniplat.load_into(two, tmp_path / "a", "cpu")
    omniplat.load_into(other, tmp_path / "b", "cpu")
    with torch.no_grad():
        one.model.norm.weight += 1
    torch.save(one.state_dict(), tmp_path / "state.pt")
    two.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(two(tiny.rows()), one(tiny.rows()))
    with pytest.raises((RuntimeError, UsageError)):
        other.load_state_dict(one.state_dict())


def test_adapters_stay_on_top(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    model = tiny.decoder()
    mlp = model.model.layers[0].mlp
    mlp.down_proj = adapter = Adapter(mlp.down_proj)
    omniplat.load_into(model, tmp_path, "cpu")
    assert mlp.down_proj is adapter
    assert isinstance(adapter.base_layer, ModelLinear)
    x = torch.randn(3, 96)
    values = torch.from_numpy(oracle.dequantize(checkpoint.weights["model.layers.0.mlp.down_proj"])).float()
    torch.testing.assert_close(adapter(x), x @ values.T + adapter.lora_B(adapter.lora_A(x)), rtol=1e-4, atol=1e-4)
    assert getattr(adapter.base_layer, "weight", None) is None
    with pytest.raises(AttributeError, match=r"no weight in floating point: .*down_proj is mxfp8/a16"):
        adapter.base_layer.weight  # noqa: B018


def without_layer(model: nn.Module) -> None:
    del model.model.layers[0].mlp.up_proj


def wrong_size(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 80, bias=False)


def with_bias(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 96)


def other_kind(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj = nn.Bilinear(64, 64, 96)


def own_forward(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj.__class__ = type("Scaled", (nn.Linear,), {"forward": lambda self, x: x})


def hooked(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)


def offloaded(model: nn.Module) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear._hf_hook, linear.forward = object(), linear.forward


def more_parameters(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2)


def no_norm(model: nn.Module) -> None:
    model.model.norm = nn.Identity()


def buffer_on_meta(model: nn.Module) -> None:
    model.register_buffer("inv_freq", torch.empty(2, device="meta"), persistent=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_layer, "up_proj .mxfp8/a16.: the model has no such module"),
        (wrong_size, "is 80 x 64; the checkpoint has 96 x 64"),
        (with_bias, "has a bias, the checkpoint has none"),
        (other_kind, "is Bilinear, not torch.nn.Linear"),
        (own_forward, "is Scaled with a forward of its own"),
        (hooked, "has hooks, which would be lost"),
        (offloaded, "remove_hook_from_submodules"),
        (more_parameters, "extra.weight: the checkpoint has no such tensor"),
        (no_norm, "model.norm.weight: the model has no such parameter"),
        (buffer_on_meta, "inv_freq: a buffer on meta that no checkpoint holds"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_does_not_fit_changes_nothing(change: object, reason: str, tmp_path: Path) -> None:
    written(tmp_path)
    model = tiny.decoder()
    assert callable(change)
    change(model)
    before = snapshot(model)
    with pytest.raises(UsageError, match=reason):
        omniplat.load_into(model, tmp_path, "cpu")
    assert snapshot(model) == before


def test_what_fails_while_reading_changes_nothing(tmp_path: Path) -> None:
    written(tmp_path, "int8-channel/a16")
    blob = bytearray((tmp_path / "model.safetensors").read_bytes())
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    start = 8 + length + header["model.layers.0.mlp.down_proj.weight_scale"]["data_offsets"][0]
    blob[start : start + 2] = b"\xc0\x7f"  # NaN
    (tmp_path / "model.safetensors").write_bytes(blob)
    model = tiny.decoder()
    before = snapshot(model)
    with pytest.raises(InvalidCheckpointError, match="down_proj"):
        omniplat.load_into(model, tmp_path, "cpu")
    assert snapshot(model) == before


def test_what_no_kernel_runs_changes_nothing(tmp_path: Path) -> None:
    written(tmp_path, "mxfp4/mxfp4")
    model = tiny.decoder()
    before = snapshot(model)
    with pytest.raises(UnsupportedCombinationError):
        omniplat.load_into(model, tmp_path, "npu:310p")
    assert snapshot(model) == before


def test_a_pipeline_asks_which_component(tmp_path: Path) -> None:
    for name in ("transformer", "transformer_2"):
        written(tmp_path / name, "mxfp8/a16" if name == "transformer" else "int8-channel/a16")
    index = {"_class_name": "P", "transformer": ["d", "T"], "transformer_2": ["d", "T"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"several components.*transformer, transformer_2"):
        omniplat.load_into(tiny.decoder(), tmp_path, "cpu")
    model = tiny.decoder()
    plan = omniplat.load_into(model, tmp_path, "cpu", component="transformer_2")
    assert {layer.stored for layer in plan.layers} == {"int8-channel"}
    assert model.model.layers[0].mlp.up_proj.spec.scheme.weight_id == "int8-channel"


class Pipeline:
    def __init__(self, *names: str) -> None:
        self.components = {name: tiny.decoder() for name in names} | {"scheduler": object()}


def cascade(folder: Path) -> None:
    """Two transformers, each with metadata of its own, and a part that is not quantized."""
    written(folder / "transformer", "mxfp8/a16")
    written(folder / "transformer_2", "int8-channel/a16")
    index = {"_class_name": "WanPipeline", "transformer": ["d", "T"], "transformer_2": ["d", "T"], "vae": ["d", "V"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    tiny.write_unquantized(folder / "vae", tiny.decoder())


def test_a_cascade_is_filled_by_the_metadata_of_each_transformer(tmp_path: Path) -> None:
    cascade(tmp_path)
    pipeline = Pipeline("transformer", "transformer_2", "vae")
    kept = dict(pipeline.components["vae"].named_modules())
    plan = omniplat.load_into(pipeline, tmp_path, "cpu")
    for name, weight in (("transformer", "mxfp8"), ("transformer_2", "int8-channel")):
        model = pipeline.components[name]
        single = tiny.decoder()
        omniplat.load_into(single, tmp_path, "cpu", component=name)
        assert model.get_submodule(Q).spec.scheme.weight_id == weight
        assert torch.equal(model(tiny.rows()), single(tiny.rows()))
        assert {layer.stored for layer in plan.layers if layer.component == name} == {weight}
    assert dict(pipeline.components["vae"].named_modules()) == kept
    one = Pipeline("transformer", "transformer_2")
    omniplat.load_into(one, tmp_path, "cpu", component="transformer_2")
    assert type(one.components["transformer"].get_submodule(Q)) is nn.Linear
    assert type(one.components["transformer_2"].get_submodule(Q)) is ModelLinear


def test_a_cascade_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    cascade(tmp_path)
    pipeline = Pipeline("transformer", "transformer_2", "vae")
    wrong_size(pipeline.components["transformer_2"])
    before = {name: snapshot(model) for name, model in pipeline.components.items() if isinstance(model, nn.Module)}
    with pytest.raises(UsageError, match=r"(?s)checkpoint of transformer_2, matched .*is 80 x 64"):
        omniplat.load_into(pipeline, tmp_path, "cpu")
    assert before == {name: snapshot(pipeline.components[name]) for name in before}
    with pytest.raises(UsageError, match=r"has transformer_2 quantized, and the pipeline has no such component"):
        omniplat.load_into(Pipeline("transformer", "vae"), tmp_path, "cpu")
    with pytest.raises(UsageError, match="the pipeline has no component 'transformer_3'; it has: transformer"):
        omniplat.load_into(pipeline, tmp_path, "cpu", component="transformer_3")
    with pytest.raises(UsageError, match="the pipeline has text_encoder; the checkpoint has: transformer, "):
        omniplat.load_into(Pipeline("text_encoder"), tmp_path, "cpu")
    with pytest.raises(UsageError, match="none of the pipeline's components is quantized"):
        omniplat.load_into(Pipeline("vae"), tmp_path, "cpu", component="vae")


def test_experts_may_differ_between_the_weights(tmp_path: Path) -> None:
    downs = [f"model.layers.0.mlp.experts.{index}.down_proj" for index in range(3)]
    other = Scheme.parse("int8-channel/a16")
    sizes = tiny.EXPERT_SIZES
    write_checkpoint(tmp_path, Scheme.parse("mxfp8/a16"), sizes, exceptions=dict.fromkeys(downs, other))
    model = tiny.Decoder(tiny.Body(sizes, tiny.ListedExperts(sizes)))
    plan = omniplat.load_into(model, tmp_path, "cpu")
    assert {plan.layer(name).stored for name in downs} == {"int8-channel"}
    assert plan.layer("model.layers.0.mlp.experts.0.up_proj").stored == "mxfp8"
    assert model(tiny.rows()).isfinite().all()


def test_what_a_model_says_it_ties_is_tied(tmp_path: Path) -> None:
    written(tmp_path)
    with torch.device("meta"):
        model = tiny.decoder()
        model.tied = nn.RMSNorm(64)
    with pytest.raises(UsageError, match=r"tied.weight: the checkpoint has no such tensor"):
        omniplat.load_into(model, tmp_path, "cpu")
    model.all_tied_weights_keys = {"tied.weight": "model.norm.weight"}
    omniplat.load_into(model, tmp_path, "cpu")
    assert model.tied.weight is model.model.norm.weight


def test_shared_parameters_stay_shared(tmp_path: Path) -> None:
    written(tmp_path)
    with torch.device("meta"):
        model = tiny.decoder()
    model.tied = nn.RMSNorm(64, device="meta")
    model.tied.weight = model.model.norm.weight
    omniplat.load_into(model, tmp_path, "cpu")
    assert model.tied.weight is model.model.norm.weight
    assert not model.tied.weight.is_meta


def test_a_gradient_through_a_quantized_layer_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    model = tiny.decoder()
    omniplat.load_into(model, tmp_path, "cpu")
    x = tiny.rows().requires_grad_()
    y = model(x)
    assert y.requires_grad
    with pytest.raises(UsageError, match="is quantized and has no gradient"):
        y.sum().backward()
