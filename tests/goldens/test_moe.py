"""Mixture-of-experts layers whole, against float64 from the producers' own weights and against models' own code."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.goldens import blocks
from tests.goldens.entries import Entry, bundled
from tests.goldens.moe import check_layers, check_quantized_activations, distance, has_experts, layers_of

BUNDLED = [entry for entry in bundled() if has_experts(entry)]


def test_there_are_entries() -> None:
    assert {entry.name for entry in BUNDLED} >= {"ar016-hy-mxfp8-exp4", "hf-gptoss-mxfp4", "lc-qwen3moe-mxfp4"}


@pytest.mark.parametrize("entry", BUNDLED, ids=lambda entry: entry.name)
def test_a_layer_computes_what_the_producers_weights_say(entry: Entry) -> None:
    check_layers(entry)


@pytest.mark.parametrize("entry", BUNDLED, ids=lambda entry: entry.name)
def test_quantized_activations_cost_what_their_format_costs(entry: Entry) -> None:
    check_quantized_activations(entry)


@pytest.mark.parametrize("name", ["hunyuan-image-3", "qwen3-moe"])
def test_a_layer_computes_what_the_models_own_code_does(name: str) -> None:
    golden = load_file(blocks.DATA / f"{name}.safetensors")
    entry = Entry(name, blocks.source_of(name), blocks.source_of(name), {})
    layer = dict(layers_of(entry, activations=False))["model.layers.0.mlp"]
    with torch.inference_mode():
        assert distance(layer(golden["x"]), golden["experts"].double().numpy()) < 5e-6
