"""A cascade as Wan2.2-A14B is one: two transformers of one class, one for high and one for low noise, each with weights
and quantization of its own. diffusers' own pipeline runs it."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import omniplat
from omniplat.conformance.dialect import storable, stored_tensors
from omniplat.errors import UsageError
from omniplat.modules.layers import ModelLinear
from omniplat.online import parse_method
from omniplat.oracle import dequantize, quantize_weight
from omniplat.runtime.tensors import to_tensor
from omniplat.scheme import Scheme
from tests.modules.models import MODELS, TEXT, WIDTH, run, wan
from tests.modules.stand_in import StandIn, online, put_in_place
from tests.modules.test_real_models import OF_THE_NOISE, relative

WAN = MODELS["wan"]
MX = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


@dataclass(frozen=True)
class Part:
    """What one transformer of the cascade is stored in: the scheme, compressed-tensors' words for it, and the rule by
    which compressed-tensors scales inputs."""

    scheme: str
    form: str
    weights: dict[str, Any]
    inputs: dict[str, Any]
    scale_rule: str


PARTS = {
    "transformer": Part("mxfp8/mxfp8", "mxfp8-quantized", MX, {**MX, "dynamic": True}, "even-m1"),
    "transformer_2": Part(
        "int8-channel/int8-token", "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, "half-range",
    ),
}  # fmt: skip


def transformers() -> dict[str, nn.Module]:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    made = {}
    for seed, name in enumerate(PARTS):
        torch.manual_seed(seed)
        made[name] = wan().eval()
    return made


def chosen(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that are to be quantized."""
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return {name: layer for name, layer in linears.items() if not re.fullmatch(WAN.sensitive, name)}


def write(folder: Path, model: nn.Module, part: Part) -> nn.Module:
    """Store `model` as `part` says; returned is the model that the file means."""
    scheme = Scheme.parse(part.scheme)
    meant = copy.deepcopy(model)
    stored = model.state_dict()
    for name, linear in chosen(model).items():
        weight = storable(quantize_weight(stored.pop(f"{name}.weight").numpy(), scheme.weight))
        stored |= {f"{name}.{leaf}": to_tensor(values) for leaf, values in stored_tensors(weight).items()}
        assert scheme.activation is not None
        activation = replace(scheme.activation, scale_rule=part.scale_rule, rounding="nearest-even")
        put_in_place(meant, {name: StandIn(dequantize(weight), activation, linear.bias)})
    group = {
        "format": part.form,
        "targets": ["Linear"],
        "weights": {**part.weights, "symmetric": True, "dynamic": False},
        "input_activations": {**part.inputs, "symmetric": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": part.form,
        "config_groups": {"group_0": group},
        "ignore": [f"re:{WAN.sensitive}"],
    }
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = {**model.config, "_class_name": type(model).__name__, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def test_each_transformer_reads_its_own_metadata(tmp_path: Path) -> None:
    models = transformers()
    meant = {name: write(tmp_path / name, model, PARTS[name]) for name, model in models.items()}
    index = {name: ["diffusers", "WanTransformer3DModel"] for name in PARTS}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", **index}))
    outputs = {}
    for name, part in PARTS.items():
        torch.manual_seed(9)
        model = wan().eval()
        plan = omniplat.load_into(model, tmp_path, "cpu", component=name)
        assert {layer.component for layer in plan.layers} == {name}
        assert {layer.executes for layer in plan.layers if layer.status == "ok"} == {part.scheme}
        assert {layer.name for layer in plan.layers if layer.status == "ok"} == set(chosen(models[name]))
        outputs[name] = run(WAN, model)
        noise = relative(outputs[name], run(WAN, models[name]))
        assert 0 < noise < 0.1
        assert relative(outputs[name], run(WAN, meant[name])) <= OF_THE_NOISE * noise
    assert relative(outputs["transformer"], outputs["transformer_2"]) > 0.5
    with pytest.raises(UsageError, match=r"several components.*transformer, transformer_2"):
        omniplat.load_into(wan(), tmp_path, "cpu")


def pipeline() -> Any:
    """diffusers' WanPipeline without a text encoder: what it would give is handed in."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(2)
    vae = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4, scale_factor_temporal=1, scale_factor_spatial=2,
    )  # fmt: skip
    made = diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae.eval(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        boundary_ratio=0.5, **transformers(),
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def frames(made: Any) -> torch.Tensor:
    """The pixels of a video: [batch, channels, frames, height, width]."""
    text = torch.randn(1, TEXT, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found: torch.Tensor = made(
            prompt_embeds=text, guidance_scale=1.0, height=16, width=16, num_frames=1, num_inference_steps=4,
            output_type="pt", generator=torch.Generator().manual_seed(4),
        ).frames  # fmt: skip
    return found


def test_methods_are_routed_to_the_parts_of_a_pipeline() -> None:
    made = pipeline()
    before = frames(made)
    meant = pipeline()
    methods = {"transformer": "fp8", "transformer_2": "mxfp4"}
    for name, method in methods.items():
        part = getattr(meant, name)
        put_in_place(part, {n: online(layer, parse_method(method)) for n, layer in chosen(part).items()})
    state = {name: tensor.clone() for name, tensor in made.vae.state_dict().items()}

    plan = omniplat.quantize_model(made, {**methods, "vae": None}, "cpu")

    executes = {"transformer": "fp8-tensor/fp8-tensor", "transformer_2": "mxfp4/mxfp4"}
    for name, scheme in executes.items():
        own = [layer for layer in plan.layers if layer.name.startswith(f"{name}.") and layer.status == "ok"]
        assert {layer.executes for layer in own} == {scheme}
        assert len(own) == len(chosen(getattr(pipeline(), name)))
    assert not any(isinstance(module, ModelLinear) for module in made.vae.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in made.vae.state_dict().items())
    found = frames(made)
    assert relative(found, frames(meant)) <= OF_THE_NOISE * relative(found, before)
    omniplat.restore(made)
    assert torch.equal(frames(made), before)


def test_a_transformer_alone_is_routed_to_without_its_twin() -> None:
    made = pipeline()
    before = {name: tensor.clone() for name, tensor in made.transformer_2.state_dict().items()}
    plan = omniplat.quantize_model(made, {"transformer": "mxfp8"}, "cpu")
    assert {layer.name.partition(".")[0] for layer in plan.layers if layer.status == "ok"} == {"transformer"}
    after = made.transformer_2.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
