"""What else an engine does with the layers of a checkpoint that omniplat runs: scales of the key-value cache, LoRA,
loading anew, offloading, dummy weights."""

from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from omniplat import oracle
from omniplat.api import make_planned
from tests.goldens.entries import Entry, bundled
from tests.vllm.checks import folder_of
from tests.vllm.reference import Reference
from tests.vllm.serve import PROMPT, Answer, Request, serve_all

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
K, V, Q = 0.5, 0.25, 0.125
#: Weight-only, so that an adapter's product can be added to the reference's weights.
PLAIN = "ar016-qwen3-w4a16-asym"
FOUR_BIT = "hf-qwen3-bnb-nf4"
EXPERTS = "lc-qwen3moe-mxfp4"
#: vLLM runs it on CPUs itself.
NATIVE = "lc-qwen3-w8a8-int8"
ADAPTED = {
    "self_attn.q_proj": (256, 256),
    "self_attn.v_proj": (64, 256),
    "mlp.gate_proj": (384, 256),
    "mlp.down_proj": (256, 384),
}


@dataclass(frozen=True)
class Dialect:
    """A checkpoint, what its producers call the scales of K, V and, where it has one, Q, and what they say
    of the cache. `asked` is `kv_cache_dtype`; `stored` is the type that the attention has then."""

    source: str
    names: tuple[str, ...]
    metadata: Mapping[str, Any]
    asked: str = "fp8"
    stored: str = "fp8"


DIALECTS = {
    "compressed-tensors": Dialect(
        "lc-qwen3-nvfp4", ("k_scale", "v_scale", "q_scale"), {"kv_cache_scheme": FP8}, "auto"
    ),
    "modelopt": Dialect(
        "mo-qwen3-mixed-fp8-nvfp4",
        ("k_proj.k_scale", "v_proj.v_scale", "q_scale"),
        {"kv_cache_quant_algo": "FP8", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        "auto",
        "fp8_e4m3",
    ),
    "auto-round": Dialect("ar016-qwen3-w4a16-asym", ("k_scale", "v_scale", "q_scale"), {}),
    "quark": Dialect("qk-qwen3-int4-wo-128", ("k_proj.output_scale", "v_proj.output_scale", "q_proj.output_scale"), {}),
    "fp8": Dialect("hf-qwen3-fp8-finegrained", ("attn.k_scale", "attn.v_scale", "attn.q_scale"), {}),
    "not asked for": Dialect("ar016-qwen3-w4a16-asym", ("k_scale", "v_scale"), {}, "auto", "auto"),
    "of another dialect": Dialect("lc-qwen3-nvfp4", ("k_proj.output_scale", "v_proj.output_scale"), {}),
    "of another dialect, of Q": Dialect("lc-qwen3-nvfp4", ("k_scale", "v_scale", "q_proj.output_scale"), {}),
}


def write(dialect: Dialect, folder: Path) -> Path:
    shutil.copytree(folder_of(dialect.source), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for layer in (0, 1):
        for name, value in zip(dialect.names, (K, V, Q), strict=False):
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
    lora = {"enable_lora": True, "max_lora_rank": 8}
    requests += [
        Request("plain", str(folder_of(PLAIN)), "all"),
        Request("nested", str(write_nested(folder / "nested").checkpoint), "gaps"),
        Request("lora", str(folder_of(PLAIN)), "all", lora, adapter=str(write_adapter(folder / "adapter"))),
        Request("lora, unused", str(folder_of(PLAIN)), "all", lora),
        Request("lora on experts", str(folder_of(EXPERTS)), "all", lora),
        Request("loaded anew", str(folder_of(PLAIN)), "all", reload=True),
        Request("offloaded", str(folder_of(PLAIN)), "all", {"cpu_offload_gb": 1}),
        Request("dummy", str(folder_of(PLAIN)), "all", {"load_format": "dummy"}),
        Request("two ranks", str(folder_of(EXPERTS)), "gaps", {"tensor_parallel_size": 2}),
        Request("by name", str(folder_of(NATIVE)), "gaps", {"quantization": "omniplat"}),
        Request("another's name", str(folder_of("lc-qwen3-nvfp4")), "all", {"quantization": "fp8"}),
        Request("nothing", str(write_unquantized(folder / "nothing")), "all", {"quantization": "omniplat"}),
    ]
    return serve_all(requests, "all", folder)


def write_unquantized(folder: Path) -> Path:
    """Weights in 16 bit, and no metadata."""
    shutil.copytree(folder_of(NATIVE), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("_scale")}
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_nested(folder: Path) -> Entry:
    """bitsandbytes' double quantization of a checkpoint's scales, and the weights that they give then."""
    shutil.copytree(folder_of(FOUR_BIT), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    table, values = oracle.element_values("nf4").astype(np.float32), np.linspace(-1, 1, 256, dtype=np.float32)
    goldens = {}
    for name in [name.removesuffix(".absmax") for name in tensors if name.endswith(".absmax")]:
        scale = tensors[f"{name}.absmax"].numpy()
        offset, block = float(np.float32(scale.mean())), np.arange(scale.size) // 256
        largest = np.array([np.abs(scale[block == b] - offset).max() for b in range(block[-1] + 1)], np.float32)
        code = np.abs(((scale - offset) / largest[block])[:, None] - values).argmin(1).astype(np.uint8)
        tensors[f"{name}.absmax"] = torch.from_numpy(code)
        tensors[f"{name}.nested_absmax"] = torch.from_numpy(largest)
        tensors[f"{name}.nested_quant_map"] = torch.from_numpy(values.copy())
        leaf = f"{name}.quant_state.bitsandbytes__nf4"
        state = json.loads(tensors[leaf].numpy().tobytes())
        state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        tensors[leaf] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        packed = tensors[name].numpy().reshape(-1)
        made = np.repeat(values[code] * largest[block] + np.float32(offset), 64)
        weight = table[np.stack([packed >> 4, packed & 15], 1).reshape(-1)] * made
        goldens[name] = torch.from_numpy(weight.reshape(state["shape"]))
    save_file(tensors, file)
    golden = folder / "golden.xz"
    golden.write_bytes(lzma.compress(save(goldens)))
    return Entry("nested", folder, golden, {})


def write_adapter(folder: Path) -> Path:
    """A LoRA adapter for fused projections, in part, and for one that is not fused."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in (0, 1):
        for name, (rows, columns) in ADAPTED.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(8, columns, generator=generator) * 0.05
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, 8, generator=generator) * 0.05
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in ADAPTED})
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return folder


@pytest.mark.parametrize("name", [name for name in DIALECTS if not name.startswith("of another dialect")])
def test_scales_reach_the_attention(name: str, answers: dict[str, Answer]) -> None:
    answer, dialect = answers[name], DIALECTS[name]
    assert answer.error == ""
    assert answer.quantization == "omniplat"
    # Without a quantized cache they are of no use, and the engine has 1.0 in their place.
    scales = [(1.0, 1.0, 1.0)] * 2 if dialect.stored == "auto" else [(K, V, Q), (2 * K, 2 * V, 2 * Q)]
    assert answer.caches == {
        f"model.layers.{layer}.self_attn.attn": [dialect.stored, *scales[layer]] for layer in (0, 1)
    }
    assert "OmniplatLinearMethod" in answer.methods.values()


@pytest.mark.parametrize(("name", "of"), [("of another dialect", "k"), ("of another dialect, of Q", "q")])
def test_scales_under_unknown_names_are_refused(name: str, of: str, answers: dict[str, Answer]) -> None:
    """vLLM would drop them without a word."""
    at = f"model.layers.0.self_attn.{of}_proj.output_scale"
    assert f"{at}: vLLM does not take this scale of the KV cache by its name" in answers[name].error


def reference_of(name: str) -> Reference:
    entry = next(entry for entry in bundled() if entry.name == name)
    return Reference(entry, make_planned(entry.checkpoint, "cpu"))


def assert_says(reference: Reference, answer: Answer) -> None:
    wanted = reference.logprobs([*PROMPT, *answer.tokens])[len(PROMPT) - 1 : -1]
    assert list(wanted.argmax(1)) == list(answer.tokens)
    assert np.abs(wanted - np.array(answer.logprobs)).max() <= 1e-4


def test_scales_that_are_quantized_themselves(answers: dict[str, Answer], tmp_path: Path) -> None:
    answer = answers["nested"]
    assert answer.error == ""
    assert answer.quantization == "omniplat"
    entry = write_nested(tmp_path / "nested")
    assert_says(Reference(entry, make_planned(entry.checkpoint, "cpu")), answer)


def test_two_ranks_say_the_same(answers: dict[str, Answer]) -> None:
    """Two processes that get the config from a third one."""
    answer = answers["two ranks"]
    assert answer.error == ""
    assert {"OmniplatLinearMethod", "OmniplatMoEMethod"} <= set(answer.methods.values())
    assert_says(reference_of(EXPERTS), answer)


def test_lora_is_added_to_what_the_quantized_layers_compute(answers: dict[str, Answer], tmp_path: Path) -> None:
    answer = answers["lora"]
    assert answer.error == ""
    adapter = load_file(write_adapter(tmp_path / "adapter") / "adapter_model.safetensors")
    reference = reference_of(PLAIN)
    modules = dict(reference.model.named_modules())
    for name in {key.partition(".lora_")[0] for key in adapter}:
        module = modules[name.removeprefix("base_model.model.")]
        product = adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"]
        module.weight.data += 2.0 * product  # lora_alpha / r
    assert_says(reference, answer)
    assert answer.tokens != answers["plain"].tokens
    assert answers["lora, unused"].tokens == answers["plain"].tokens


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lora on experts", "vLLM applies LoRA inside its own kernels of experts"),
        ("loaded anew", "weights cannot be loaded anew into layers that omniplat runs"),
        ("offloaded", "qkv_proj: cpu_offload_gb takes parameters that a layer has before weights are loaded"),
        ("dummy", "vLLM did not deliver it"),
        ("another's name", "does not match the quantization method specified in the `quantization` argument (fp8)"),
        ("nothing", "there is nothing for omniplat to run"),
    ],
)
def test_what_does_not_work_is_refused(name: str, message: str, answers: dict[str, Answer]) -> None:
    assert message in answers[name].error


def test_its_name_is_enough_where_the_engine_would_run_a_checkpoint(answers: dict[str, Answer]) -> None:
    answer = answers["by name"]
    assert answer.error == ""
    assert answer.quantization == "omniplat"
    assert "OmniplatLinearMethod" in answer.methods.values()
