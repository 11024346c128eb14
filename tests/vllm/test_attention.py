"""Scales of the key-value cache in checkpoints that omniplat runs: the engine's own attention gets them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.vllm.checks import folder_of
from tests.vllm.serve import Answer, Request, serve_all

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
K, V = 0.5, 0.25


@dataclass(frozen=True)
class Dialect:
    """A checkpoint, what its producers call the two scales of layer 0, and what they say of the cache. `asked` is
    `kv_cache_dtype`; `stored` is the type that the attention has then."""

    source: str
    names: tuple[str, str]
    metadata: Mapping[str, Any]
    asked: str = "fp8"
    stored: str = "fp8"


DIALECTS = {
    "compressed-tensors": Dialect("lc-qwen3-nvfp4", ("k_scale", "v_scale"), {"kv_cache_scheme": FP8}, "auto"),
    "modelopt": Dialect(
        "mo-qwen3-mixed-fp8-nvfp4",
        ("k_proj.k_scale", "v_proj.v_scale"),
        {"kv_cache_quant_algo": "FP8", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        "auto",
        "fp8_e4m3",
    ),
    "auto-round": Dialect("ar016-qwen3-w4a16-asym", ("k_scale", "v_scale"), {}),
    "quark": Dialect("qk-qwen3-int4-wo-128", ("k_proj.output_scale", "v_proj.output_scale"), {}),
    "fp8": Dialect("hf-qwen3-fp8-finegrained", ("attn.k_scale", "attn.v_scale"), {}),
    "not asked for": Dialect("ar016-qwen3-w4a16-asym", ("k_scale", "v_scale"), {}, "auto", "auto"),
    "of another dialect": Dialect("lc-qwen3-nvfp4", ("k_proj.output_scale", "v_proj.output_scale"), {}),
}


def write(dialect: Dialect, folder: Path) -> Path:
    shutil.copytree(folder_of(dialect.source), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for layer in (0, 1):
        for name, value in zip(dialect.names, (K, V), strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(value * (layer + 1))
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(dialect.metadata)
    (folder / "config.json").write_text(json.dumps(config))
    beside = folder / "hf_quant_config.json"
    if beside.is_file():
        metadata = json.loads(beside.read_text())
        metadata["quantization"]["kv_cache_quant_algo"] = "FP8"
        beside.write_text(json.dumps(metadata))
    return folder


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("attention")
    requests = [
        Request(
            name,
            str(write(dialect, folder / str(index))),
            "all",
            {"kv_cache_dtype": dialect.asked, "dtype": "bfloat16"},
        )
        for index, (name, dialect) in enumerate(DIALECTS.items())
    ]
    return serve_all(requests, "all", folder)


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "of another dialect"])
def test_scales_reach_the_attention(name: str, answers: dict[str, Answer]) -> None:
    answer, dialect = answers[name], DIALECTS[name]
    assert answer.error == ""
    assert answer.quantization == "omniplat"
    # Without a quantized cache they are of no use, and the engine has 1.0 in their place.
    scales = [(1.0, 1.0)] * 2 if dialect.stored == "auto" else [(K, V), (2 * K, 2 * V)]
    assert answer.caches == {
        f"model.layers.{layer}.self_attn.attn": [dialect.stored, *scales[layer]] for layer in (0, 1)
    }
    assert "OmniplatLinearMethod" in answer.methods.values()


def test_scales_under_unknown_names_are_refused(answers: dict[str, Answer]) -> None:
    """vLLM would drop them without a word."""
    message = "model.layers.0.self_attn.k_proj.output_scale: vLLM does not take this scale of the KV cache by its name"
    assert message in answers["of another dialect"].error
