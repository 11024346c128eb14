"""The configs that vllm-omni gets from omniplat: what it reads of them, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm_omni.quantization.inc_config import OmniINCConfig

from omniplat.errors import UsageError
from omniplat.integrations.vllm_omni import _ALIASES, _ONLINE, _STORED, MethodBuilder
from omniplat.integrations.vllm_omni_components import component_config
from omniplat.integrations.vllm_omni_config import OmniplatDiffusionConfig
from tests.vllm.engine import engine

METHODS = (*_ONLINE, *_STORED, *_ALIASES)
#: Of one that is applied to weights in 16 bit, the same class as of any other.
STORED = {"is_checkpoint_mxfp8_serialized": True}


@pytest.mark.parametrize("method", METHODS)
def test_everything_that_a_config_has_can_be_read(method: str) -> None:
    """Configs of what is stored are AutoRound's by their type, without its fields."""
    config = MethodBuilder(method, None)(**(STORED if method == "mxfp8" else {}))
    assert isinstance(config, OmniINCConfig) == (method not in _ONLINE or method == "mxfp8")
    assert method in repr(config)
    assert str(config) == f"{config}" == repr(config)
    properties = {
        name for kind in type(config).__mro__ for name, value in vars(kind).items() if isinstance(value, property)
    }
    assert {"is_checkpoint_quantized", "data_type"} <= properties
    before_a_checkpoint = {"layers", "planned"}
    for name in properties - before_a_checkpoint:
        getattr(config, name)
    assert not getattr(config, "is_mxfp", False)


LINEAR = "blocks.0.attn.to_q"
#: The engine's name of the experts -> names of their tensors in the checkpoint. Those of the first are recognised.
EXPERTS = {
    "blocks.0.mlp.experts": "blocks.0.mlp.experts.{}.{}.weight",
    "blocks.0.ffn.moe": "blocks.0.mlp.experts.{}.{}.weight",
    "blocks.0.moe.experts": "blocks.0.moe.expert_{}.{}.weight",
    "blocks.0.block.experts": "blocks.0.block.stacked.{1}",
}
UNKNOWN = [name for name in EXPERTS if name != "blocks.0.mlp.experts"]
MXFP8 = {"quant_method": "mxfp8", "is_checkpoint_mxfp8_serialized": True}


def write(folder: Path, experts: str, metadata: dict[str, Any] | None) -> Path:
    """A pipeline of one linear layer and two experts, in 16 bit or as MXFP8."""
    transformer = folder / "transformer"
    transformer.mkdir(parents=True)
    classes = {"_class_name": "TinyPipeline", "_diffusers_version": "0.40.0", "transformer": ["diffusers", "Tiny"]}
    (folder / "model_index.json").write_text(json.dumps(classes))
    config = {"_class_name": "Tiny", **({} if metadata is None else {"quantization_config": metadata})}
    (transformer / "config.json").write_text(json.dumps(config))
    named = {experts.format(e, part) for e in range(2) for part in ("gate_proj", "up_proj", "down_proj")}
    tensors = {}
    for name in [f"{LINEAR}.weight", *named]:
        shape = (64, 64) if name.endswith(".weight") else (2, 64, 64)
        is_kept = metadata is None or shape[0] == 2 or any(name.startswith(e) for e in metadata["ignored_layers"])
        tensors[name] = torch.zeros(shape, dtype=torch.bfloat16 if is_kept else torch.float8_e4m3fn)
        if not is_kept:
            tensors[f"{name}_scale"] = torch.full((64, 2), 127, dtype=torch.uint8)
    save_file(tensors, transformer / "diffusion_pytorch_model.safetensors")
    return folder


def config_for(folder: Path, experts: str, mode: str, ignored: list[str], *, stored: bool) -> OmniplatDiffusionConfig:
    metadata = {**MXFP8, "ignored_layers": ignored} if stored else None
    checkpoint = write(folder / "pipeline", EXPERTS[experts], metadata)
    config = MethodBuilder("mxfp8", None)(**({"ignored_layers": ignored} | (MXFP8 if stored else {})))
    assert isinstance(config, OmniplatDiffusionConfig)
    config._mode = mode
    config.maybe_update_config(str(checkpoint))
    return config


def linear(config: OmniplatDiffusionConfig, name: str) -> ReplicatedLinear:
    return ReplicatedLinear(64, 64, bias=False, quant_config=config, prefix=name, params_dtype=torch.bfloat16)


def method_of_experts(config: OmniplatDiffusionConfig, name: str) -> str:
    built = FusedMoEFactory(
        num_experts=2, top_k=1, hidden_size=64, intermediate_size=64, tp_size=1, dp_size=1, pcp_size=1,
        params_dtype=torch.bfloat16, quant_config=config, prefix=name,
    )  # fmt: skip
    return type(built.routed_experts.quant_method).__name__


@pytest.fixture
def current(one_rank: None) -> Iterator[None]:
    with engine(1):
        yield


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("mode", ["gaps", "all"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_experts_are_quantized_or_refused(experts: str, mode: str, stored: bool, tmp_path: Path, current: None) -> None:
    config = config_for(tmp_path, experts, mode, [], stored=stored)
    assert type(linear(config, LINEAR).quant_method).__name__.startswith("Omniplat")
    if experts in UNKNOWN:
        with pytest.raises(UsageError, match=f"{experts}: no experts of this name.* would stay unquantized"):
            method_of_experts(config, experts)
    else:
        assert method_of_experts(config, experts).startswith("Omniplat")


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("mode", ["gaps", "all"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_experts_stay_where_that_is_said(experts: str, mode: str, stored: bool, tmp_path: Path, current: None) -> None:
    """By the name that the checkpoint has for what they are in."""
    ignored = EXPERTS[experts].partition(".expert")[0].partition(".stacked")[0]
    config = config_for(tmp_path, experts, mode, [ignored], stored=stored)
    assert type(linear(config, LINEAR).quant_method).__name__.startswith("Omniplat")
    assert method_of_experts(config, experts) == "UnquantizedFusedMoEMethod"


@pytest.mark.parametrize("mode", ["gaps", "all"])
def test_a_method_that_finds_no_layer_is_an_error_once_all_are_built(mode: str, tmp_path: Path, current: None) -> None:
    config = config_for(tmp_path, UNKNOWN[0], mode, [], stored=False)
    layer = linear(config, "layers.0.wq")
    with pytest.raises(UsageError, match=r"nothing of transformer: .* and layers\.0\.wq is not"):
        layer.quant_method.process_weights_after_loading(layer)
    linear(config, LINEAR)
    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("method", ["mxfp8", None])
@pytest.mark.parametrize("name", ["transfomer", "Transformer", "transformer_3", "transformer.block", "blocks.1"])
def test_components_that_the_pipeline_does_not_have_are_refused(name: str, method: str | None, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "pipeline", EXPERTS[UNKNOWN[0]], None)
    with pytest.raises(UsageError, match=f"'{name}' is not in this pipeline, which has transformer"):
        component_config({name: method, "default": "mxfp8"}).maybe_update_config(str(checkpoint))


@pytest.mark.parametrize("name", ["transformer", "transformer.blocks.0", "blocks", "attn", "transformer_2", "default"])
def test_components_that_are_there_or_may_be(
    name: str, tmp_path: Path, current: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a component, in the model's own names, and one that other pipelines have, of which is said that it is not
    here."""
    said: list[str] = []
    monkeypatch.setattr(
        "omniplat.integrations.vllm_omni_components.logger.warning_once", lambda text, *of: said.append(text % of)
    )
    checkpoint = write(tmp_path / "pipeline", EXPERTS[UNKNOWN[0]], None)
    config = component_config({name: None})
    config.maybe_update_config(str(checkpoint))
    absent = "components: transformer_2 is not in this pipeline, which has transformer"
    assert said == ([absent] if name == "transformer_2" else [])
