"""Fuzzing JSON: mutated configs of real checkpoints, and configs that are nothing but noise."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniplat.checkpoint.folder import METADATA_FILES
from omniplat.document import Plan
from omniplat.errors import InvalidCheckpointError
from omniplat.registry import FORMATS, default_registry
from tests.fuzz.inputs import DEEP, KEYS, ROOT, TENSORS, VALUES, Raw, bases, dumps, mutated, profile
from tests.fuzz.judge import judge
from tests.support.checkpoints import bf16, fp8_tensor, mxfp4, mxfp8, write_checkpoint, write_shard

METADATA = ("quantization_config", "compression_config", "quantization", "config_groups", "extra_config", "weights")
DEVICES = st.sampled_from(["cpu", "cpu", "cuda:sm90", "cuda:sm120", "npu:a5", "rocm:gfx950", "xpu:bmg"])
METHODS = default_registry().names(FORMATS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@given(st.data())
@profile(250)
def test_mutated_configs_of_real_checkpoints(store: Path, data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(bases(store)), label="base")
    name = data.draw(st.sampled_from(sorted(base.files)), label="file")
    text = dumps(data.draw(mutated(base.files[name], METADATA)))
    with TemporaryDirectory(dir=store) as folder:
        judge(base.write(Path(folder), {name: text}), data.draw(DEVICES))


@given(st.data())
@profile(100)
def test_text_that_is_cut_or_overwritten(store: Path, data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(bases(store)), label="base")
    name = data.draw(st.sampled_from(sorted(base.files)), label="file")
    text = json.dumps(base.files[name])
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 20, len(text))))
    text = (
        text[:start]
        + data.draw(st.text(max_size=4) | st.sampled_from(['"', "{", "}", "\\ud800", "\ufeff"]))
        + text[end:]
    )
    with TemporaryDirectory(dir=store) as folder:
        judge(base.write(Path(folder), {name: text}))


@given(st.data())
@profile(200)
def test_metadata_of_each_method_that_is_noise(tmp_path: Path, data: st.DataObject) -> None:
    """Each dialect's own reader, under keys that dialects have and values that none expects."""
    method = data.draw(st.sampled_from([*METHODS, "fbgemm_fp8", "mxfp8", "mxfp4", "int8", "nope"]))
    noise = data.draw(st.dictionaries(KEYS, VALUES, max_size=6))
    config = {"model_type": data.draw(st.sampled_from(["llama", "qwen3_moe", "", None, 3, []])),
              "quantization_config": {"quant_method": method, **noise}}  # fmt: skip
    tensors = data.draw(TENSORS)
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    write_checkpoint(tmp_path / "c", {}, tensors)
    place = data.draw(st.sampled_from(["config.json", *METADATA_FILES, "quant_model_description_w8a8.json"]))
    inner: Any = config if place == "config.json" else config["quantization_config"]
    (tmp_path / "c" / place).write_text(dumps(inner), errors="surrogatepass")
    judge(tmp_path / "c", data.draw(DEVICES))


@given(VALUES | DEEP)
@profile(100)
def test_a_config_that_is_anything(tmp_path: Path, value: Any) -> None:
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    write_checkpoint(tmp_path / "c", {}, {"a.weight": bf16(4, 4)})
    (tmp_path / "c" / "config.json").write_text(dumps(value), errors="surrogatepass")
    judge(tmp_path / "c")


@given(st.data())
@profile(100)
def test_index_files(tmp_path: Path, data: st.DataObject) -> None:
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    write_checkpoint(tmp_path / "c", {}, {"a.weight": bf16(4, 4), "b.weight": bf16(4, 4)}, shards=2)
    index = tmp_path / "c" / "model.safetensors.index.json"
    index.write_text(dumps(data.draw(mutated(json.loads(index.read_text()), ("weight_map",)))), errors="surrogatepass")
    judge(tmp_path / "c")


@given(st.data())
@profile(100)
def test_model_index_files(tmp_path: Path, data: st.DataObject) -> None:
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    for name in ("transformer", "transformer_2"):
        write_checkpoint(tmp_path / "c" / name, {"_class_name": "T"}, {"a.weight": bf16(4, 4)})
    content = {"_class_name": "P", "transformer": ["diffusers", "T"], "transformer_2": [None, None], "vae": ["a", "b"]}
    (tmp_path / "c" / "model_index.json").write_text(dumps(data.draw(mutated(content))), errors="surrogatepass")
    judge(tmp_path / "c")


def test_configs_of_model_sizes_that_are_absurd(tmp_path: Path) -> None:
    """Head counts, expert counts and sizes come from the config: none may be divided by, or looped over, unseen."""
    tensors = {}
    for part in ("q_proj", "k_proj", "v_proj"):
        tensors |= fp8_tensor(f"model.layers.0.self_attn.{part}", 64, 64)
    tensors |= {
        "model.layers.0.mlp.experts.0.up_proj.weight": bf16(64, 64),
        "model.layers.0.self_attn.qkv_proj.weight": bf16(192, 64),
    }
    kinds = itertools.cycle(("llama", "qwen3_moe", "hunyuan_image_3_moe"))
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_hidden_layers",
                "hidden_size", "n_routed_experts", "attention_head_dim", "num_attention_head"):  # fmt: skip
        for value in (0, -1, 10**18, 2**63, 1e300, "8", [], {}, None, True, [1, 2], ["a"]):
            shutil.rmtree(tmp_path / "c", ignore_errors=True)
            heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
            config = {"model_type": next(kinds), **heads, key: value}
            quantization = {"quant_method": "modelopt", "quant_algo": "FP8"}
            write_checkpoint(tmp_path / "c", {**config, "quantization_config": quantization}, tensors)
            judge(tmp_path / "c")


def test_numbers_of_routing_that_no_float_holds(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.gate.weight": bf16(2, 64)}
    for expert in range(2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            tensors |= mxfp8(f"model.layers.0.mlp.experts.{expert}.{part}", 64, 64)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    for kind in ("gpt_oss", "deepseek_v3", "hunyuan_image_3_moe", "qwen3_moe"):
        for key in (
            "swiglu_limit",
            "swiglu_alpha",
            "routed_scaling_factor",
            "num_experts_per_tok",
            "n_group",
            "moe_topk",
        ):
            shutil.rmtree(tmp_path / "c", ignore_errors=True)
            config = {"model_type": kind, "quantization_config": quantization}
            write_checkpoint(tmp_path / "c", config, tensors)
            (tmp_path / "c" / "config.json").write_text(dumps({**config, key: Raw("9" * 400)}))
            judge(tmp_path / "c")


def test_an_expression_that_never_ends_is_one_finding(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    tensors = {**mxfp4(name, 64, 64), **mxfp8("a" * 200, 64, 64)}
    mx = {"bits": 4, "group_size": 32, "data_type": "mx_fp"}
    fp8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    quark = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    for quantization in (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": fp8}},
         "ignore": ["re:(a+)+$"]},
        {"quant_method": "auto-round", **mx, "extra_config": {"(a+)+$": {"bits": 8}}},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:(a+)+$": {}}},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["(a+)+$"]},
        {"quant_method": "quark", "global_quant_config": quark, "exclude": ["re:(a+)+$"]},
    ):  # fmt: skip
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        write_checkpoint(tmp_path / "c", {"model_type": "llama", "quantization_config": quantization}, tensors)
        outcome = judge(tmp_path / "c")
        assert isinstance(outcome, Plan)
        refused = [item for item in outcome.findings if "(a+)+$" in item.message + item.where.rule]
        assert {item.code for item in refused} == {"unsupported-option"}


def test_a_long_name_in_an_index(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", {"a.weight": bf16(4, 4)})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": "x" * 100_000}}))
    assert isinstance(judge(tmp_path), InvalidCheckpointError)


def test_there_are_real_checkpoints_to_mutate(store: Path) -> None:
    assert len(bases(store)) >= 10
    assert (ROOT / "pyproject.toml").is_file()
