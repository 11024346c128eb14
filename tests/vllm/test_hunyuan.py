"""HunyuanImage-3 in vllm-omni: its loader puts fused rows in order itself, and hands them over in pieces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm_omni.quantization import build_quant_config

from omniplat import oracle
from omniplat.api import load_layers, make_planned
from omniplat.integrations.vllm_config import OmniplatConfig
from omniplat.integrations.vllm_loading import MEMBER
from omniplat.oracle.moe import experts
from omniplat.scheme import Scheme
from tests.vllm.engine import engine, tensors_of
from tests.vllm.hunyuan import MAPPER, build, build_whole, load

EXAMPLE = Path(__file__).parents[2] / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"
ORIGINAL = EXAMPLE.with_name("original")


def test_every_layer_is_what_the_file_gives(one_rank: None, default_bf16: None) -> None:
    planned = make_planned(EXAMPLE, "cpu", engine="vllm")
    config = OmniplatConfig(planned)
    config.apply_vllm_mapper(MAPPER)
    with engine(1), torch.no_grad():
        model = build(EXAMPLE, config, 2)
        load(model, EXAMPLE)
    engines = {name: getattr(m, MEMBER) for name, m in model.named_modules() if hasattr(m, MEMBER)}
    alone = {name: module for name, _, module in load_layers(planned) if name.startswith("model.layers.")}
    renamed = {
        name.removeprefix("model.").replace("gate_and_up_proj", "gate_up_proj").replace("gate.wg", "gate"): module
        for name, module in alone.items()
    }
    assert len(renamed) == 10
    assert {name.replace(".routed_experts", "") for name in engines} == set(renamed)
    for name, module in engines.items():
        expected = renamed[name.replace(".routed_experts", "")]
        found, wanted = dict(module.named_buffers()), dict(expected.named_buffers())
        assert found.keys() == wanted.keys()
        for buffer in wanted:
            assert torch.equal(found[buffer].view(torch.uint8), wanted[buffer].view(torch.uint8)), f"{name} {buffer}"


def test_metadata_is_enough(one_rank: None, default_bf16: None) -> None:
    """What vllm-omni makes of config.json: linear layers and experts have omniplat's methods."""
    config = build_quant_config(json.loads((EXAMPLE / "config.json").read_text())["quantization_config"])
    with engine(1), torch.no_grad():
        config.maybe_update_config(str(EXAMPLE))
        config.apply_vllm_mapper(MAPPER)
        model = build(EXAMPLE, config, 1)
        load(model, EXAMPLE)
    assert methods_of(model) == {
        "layers.0.self_attn.qkv_proj": "OmniplatLinearMethod",
        "layers.0.self_attn.o_proj": "OmniplatLinearMethod",
        "layers.0.mlp.shared_mlp.gate_up_proj": "OmniplatLinearMethod",
        "layers.0.mlp.shared_mlp.down_proj": "OmniplatLinearMethod",
        "layers.0.mlp.gate": "UnquantizedLinearMethod",
        "layers.0.mlp.experts.routed_experts": "OmniplatMoEMethod",
    }


def test_the_whole_model_is_built_by_its_own_constructor(one_rank: None, default_bf16: None) -> None:
    """It logs the config before it makes any layer."""
    config = build_quant_config(json.loads((EXAMPLE / "config.json").read_text())["quantization_config"])
    with engine(1):
        config.maybe_update_config(str(EXAMPLE))
        config.apply_vllm_mapper(MAPPER)
        methods = methods_of(build_whole(EXAMPLE, config))
    assert methods["layers.0.self_attn.qkv_proj"] == "OmniplatLinearMethod"
    assert methods["layers.0.mlp.experts.routed_experts"] == "OmniplatMoEMethod"


def test_experts_are_quantized_while_they_load(one_rank: None, default_bf16: None) -> None:
    """vllm-omni's own methods leave experts in 16 bit without a word."""
    config = build_quant_config("mxfp4")
    with engine(1), torch.no_grad():
        config.maybe_update_config(str(ORIGINAL))
        config.apply_vllm_mapper(MAPPER)
        model = build(ORIGINAL, config, 1)
        load(model, ORIGINAL)
    methods = methods_of(model)
    assert methods["layers.0.mlp.experts.routed_experts"] == "OmniplatOnlineMoEMethod"
    assert methods["layers.0.self_attn.qkv_proj"] == "OmniplatOnlineLinearMethod"
    assert methods["layers.0.mlp.gate"] == "UnnamedLinearMethod"

    member = getattr(model.layers[0].mlp.experts.routed_experts, MEMBER)
    moe = member.spec.moe
    scheme = Scheme.parse("mxfp4/mxfp4")
    stored = {name: tensor.float().numpy() for name, tensor in tensors_of(ORIGINAL)}
    at = "model.layers.0.mlp.experts"
    w13, w2 = [], []
    for expert in range(moe.experts):
        up_first = stored[f"{at}.{expert}.gate_and_up_proj.weight"]
        w13.append(np.concatenate(np.split(up_first, 2)[::-1]))
        w2.append(stored[f"{at}.{expert}.down_proj.weight"])
    first, second = (
        replace(oracle.quantize_weight(np.stack(weights), scheme.weight), scheme=scheme) for weights in (w13, w2)
    )
    x = torch.randn(7, member.spec.in_features, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    ids = torch.stack([torch.arange(7) % moe.experts, (torch.arange(7) + 1) % moe.experts], 1)
    weights = torch.full((7, 2), 0.5, dtype=torch.float32)
    found = member(x, ids, weights).double().numpy()
    wanted = experts(x.numpy(), ids.numpy(), weights.double().numpy(), first, second, moe)
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) <= 2e-6


def methods_of(model: torch.nn.Module) -> dict[str, str]:
    named = ((name, getattr(module, "quant_method", None)) for name, module in model.named_modules())
    return {name: type(method).__name__ for name, method in named if method is not None}


@pytest.fixture
def default_bf16() -> object:
    torch.set_default_dtype(torch.bfloat16)
    yield None
    torch.set_default_dtype(torch.float32)
