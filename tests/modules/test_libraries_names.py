"""Checkpoints whose names transformers changes when it loads them: filled all the same, or refused with the reason."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import omniplat
from omniplat.errors import UsageError
from omniplat.modules.layers import ModelExperts, ModelLinear
from tests.modules.test_libraries import IDS, SIZES, Checkpoint, logits, qwen3


def library() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def rename(folder: Path, change: Callable[[str], str]) -> None:
    """Give the tensors of a checkpoint other names, and the modules that its configuration ignores."""
    tensors = load_file(folder / "model.safetensors")
    save_file({change(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["ignore"] = [change(entry) for entry in quantization["ignore"]]
    (folder / "config.json").write_text(json.dumps(config))


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = library().MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)
    model: nn.Module = library().MixtralForCausalLM(config).eval()
    return model


def llava() -> nn.Module:
    transformers = library()
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
    model: nn.Module = transformers.LlavaForConditionalGeneration(config).eval()
    return model


def as_mixtral_stores(name: str) -> str:
    for new, old in ((".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(new, old)
    return name


def as_llava_stored(name: str) -> str:
    if name.startswith("lm_head"):
        return f"language_model.{name}"
    return name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)


@pytest.mark.parametrize(("build", "stored_as"), [(mixtral, as_mixtral_stores), (llava, as_llava_stored)])
def test_names_that_transformers_changes_are_followed(
    build: Callable[[], nn.Module], stored_as: Callable[[str], str], tmp_path: Path
) -> None:
    model = build()
    expected = copy.deepcopy(model)
    expected.load_state_dict(Checkpoint(model, tmp_path).values)
    rename(tmp_path, stored_as)
    omniplat.load_into(model, tmp_path, "cpu")
    kinds = {type(module) for module in model.modules()}
    assert ModelLinear in kinds
    assert (ModelExperts in kinds) == (build is mixtral)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)


def test_a_weight_that_transformers_converts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    mapping = importlib.import_module("transformers.conversion_mapping")
    loading = importlib.import_module("transformers.core_model_loading")
    name = "self_attn.q_proj.weight"
    transposed = loading.WeightConverter(name, name, operations=[loading.Transpose(0, 1)])
    model = qwen3()
    Checkpoint(model, tmp_path)
    before = {name: id(module) for name, module in model.named_modules()}
    assert mapping.get_checkpoint_conversion_mapping("Qwen3ForCausalLM") is None  # the table exists from here on
    with monkeypatch.context() as patched:
        patched.setitem(mapping._checkpoint_conversion_mapping_cache, "Qwen3ForCausalLM", [transposed])
        with pytest.raises(UsageError, match=r"q_proj: transformers converts its weight \(Transpose of self_attn"):
            omniplat.load_into(model, tmp_path, "cpu")
    assert {name: id(module) for name, module in model.named_modules()} == before
    omniplat.load_into(model, tmp_path, "cpu")
    assert model(IDS).logits.isfinite().all()
