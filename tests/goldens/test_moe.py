"""Mixture-of-experts layers whole, against float64 from the producers' own weights and against models' own code."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.goldens import blocks
from tests.goldens.check import rounds_to_bf16
from tests.goldens.entries import Entry, bundled, corpus
from tests.goldens.moe import Reference, distance, layers_of, rows

WORDS = ("-hy-", "moe", "gptoss")
BUNDLED = [entry for entry in bundled() if any(word in entry.name for word in WORDS)]
CORPUS = [entry for entry in corpus() if any(word in entry.name for word in WORDS)]


def check(entry: Entry) -> None:
    reference = Reference(entry)
    # Where the producer rounded its weights to bf16, so are those of the reference.
    bound = 4e-3 if rounds_to_bf16(entry.name) else 2e-6
    count = 0
    for name, layer in layers_of(entry, activations=False):
        x = rows(layer.experts.spec.in_features)
        assert layer.routes
        with torch.inference_mode():
            assert distance(layer(x), reference(name, x.numpy())) <= bound, name
        count += 1
    assert count == reference.config["num_hidden_layers"]


def test_there_are_entries() -> None:
    assert {entry.name for entry in BUNDLED} >= {"ar016-hy-mxfp8-exp4", "hf-gptoss-mxfp4", "lc-qwen3moe-mxfp4"}


@pytest.mark.parametrize("entry", BUNDLED, ids=lambda entry: entry.name)
def test_a_layer_computes_what_the_producers_weights_say(entry: Entry) -> None:
    check(entry)


@pytest.mark.corpus
@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.name)
def test_a_layer_of_the_corpus_computes_what_the_producers_weights_say(entry: Entry) -> None:
    check(entry)


@pytest.mark.parametrize("entry", BUNDLED + CORPUS, ids=lambda entry: entry.name)
def test_quantized_activations_cost_what_their_format_costs(entry: Entry) -> None:
    exact = dict(layers_of(entry, activations=False))
    for name, layer in layers_of(entry, activations=True):
        x = rows(layer.experts.spec.in_features)
        with torch.inference_mode():
            error = distance(layer(x), exact[name](x).double().numpy())
        declared = layer.experts.spec.scheme.activation_id
        low, high = {"a16": (0.0, 1e-6), "mxfp4": (0.05, 0.4), "nvfp4": (0.05, 0.3)}.get(declared, (1e-3, 0.08))
        assert low <= error <= high, f"{name}: {error:.2e} with {declared}"


@pytest.mark.parametrize("name", ["hunyuan-image-3", "qwen3-moe"])
def test_a_layer_computes_what_the_models_own_code_does(name: str) -> None:
    golden = load_file(blocks.DATA / f"{name}.safetensors")
    entry = Entry(name, blocks.source_of(name), blocks.source_of(name), {})
    layer = dict(layers_of(entry, activations=False))["model.layers.0.mlp"]
    with torch.inference_mode():
        assert distance(layer(golden["x"]), golden["experts"].double().numpy()) < 5e-6
