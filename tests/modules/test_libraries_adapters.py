"""PEFT's adapters and accelerate's hooks around quantized layers, in either order: they work, or it is said why not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import omniplat
from omniplat.errors import UsageError
from omniplat.modules.layers import ModelExperts, ModelLinear
from tests.modules.test_libraries import IDS, Checkpoint, logits, qwen3

METHODS = ["fp8", "mxfp4", "int8"]


def peft() -> Any:
    return pytest.importorskip("peft", reason="peft is not installed")


def accelerate() -> Any:
    return pytest.importorskip("accelerate", reason="accelerate is not installed")


def lora(**options: Any) -> Any:
    targets: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], **options}
    return peft().LoraConfig(r=4, init_lora_weights=False, **targets)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loaded", [False, True])
def test_adapters_come_before_or_after(method: str, loaded: bool, tmp_path: Path) -> None:
    model = qwen3()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    Checkpoint(model, checkpoint)

    def quantize(target: nn.Module) -> None:
        if loaded:
            omniplat.load_into(target, checkpoint, "cpu")
        else:
            omniplat.quantize_model(target, method, "cpu")

    before = peft().get_peft_model(copy.deepcopy(model), lora()).eval()
    before.save_pretrained(tmp_path / "adapter")
    quantize(before)
    assert isinstance(before.base_model.model.model.layers[0].self_attn.q_proj.base_layer, ModelLinear)

    quantize(model)
    plain = logits(model)
    config = peft().PeftConfig.from_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"ModelLinear.* is not supported"):
        peft().PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
    config._register_custom_module({ModelLinear: peft().tuners.lora.Linear})
    after = peft().PeftModel.from_pretrained(model, tmp_path / "adapter", config=config).eval()
    assert torch.equal(logits(after), logits(before))
    assert not torch.equal(logits(after), plain)
    with after.disable_adapter():
        assert torch.equal(logits(after), plain)
    for adapted in (before, after):
        with pytest.raises(AttributeError, match=r"no weight in floating point: .*Merging an adapter into it"):
            adapted.merge_adapter()
        with pytest.raises(UsageError, match="has no gradient"):
            adapted(IDS).logits.sum().backward()


def test_an_adapter_on_a_parameter_of_experts_is_refused() -> None:
    model = qwen3(experts=True)
    config = lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    adapted = peft().get_peft_model(model, config).eval()
    before = logits(adapted)
    with pytest.raises(UsageError, match=r"experts.base_layer: has an adapter on its gate_up_proj"):
        omniplat.quantize_model(adapted, "mxfp8", "cpu")
    assert torch.equal(logits(adapted), before)
    plan = omniplat.quantize_model(adapted, {"method": "mxfp8", "ignored_layers": ["*.experts"]}, "cpu")
    assert plan.summary.ok == 8
    assert logits(adapted).isfinite().all()


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "mapped"])
@pytest.mark.parametrize("experts", [False, True])
def test_quantized_layers_are_offloaded(how: str, experts: bool, tmp_path: Path) -> None:
    model = qwen3(experts=experts)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload = tmp_path / "layers" if how == "mapped" else None
    weights = state if how == "mapped" else None
    omniplat.quantize_model(model, "mxfp8", "cpu", weights=weights, offload=offload)
    expected = logits(model)
    if how == "disk_offload":
        accelerate().disk_offload(model, tmp_path / "disk", execution_device="cpu", offload_buffers=True)
    else:
        accelerate().cpu_offload(model, execution_device="cpu", offload_buffers=True)
    layers = [module for module in model.modules() if isinstance(module, (ModelLinear, ModelExperts))]
    assert any(isinstance(layer, ModelExperts) for layer in layers) == experts
    assert all(buffer.is_meta for layer in layers for buffer in layer.buffers())
    assert torch.equal(logits(model), expected)
    if how == "mapped":
        return
    with pytest.raises(UsageError, match="has a hook of accelerate"):
        omniplat.restore(model)
    accelerate().hooks.remove_hook_from_submodules(model)
    if how == "cpu_offload":
        assert torch.equal(logits(model), expected)
    omniplat.restore(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items() if not tensor.is_meta)


@pytest.mark.parametrize("experts", [False, True])
def test_a_model_with_hooks_is_refused(experts: bool, tmp_path: Path) -> None:
    model = qwen3(experts=experts)
    Checkpoint(model, tmp_path)
    accelerate().cpu_offload(model, execution_device="cpu")
    expected = logits(model)
    ignored = {"method": "mxfp8", "ignored_layers": ["re:.*_proj$"]} if experts else "mxfp8"
    with pytest.raises(UsageError, match="remove_hook_from_submodules"):
        omniplat.quantize_model(model, ignored, "cpu")
    with pytest.raises(UsageError, match="remove_hook_from_submodules"):
        omniplat.load_into(model, tmp_path, "cpu")
    assert torch.equal(logits(model), expected)
