"""A diffusion pipeline in vllm-omni, from `Omni(...)` to an image, on CPU: methods by name, by options, by component,
and from a checkpoint's metadata."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from omniplat.integrations.vllm_omni_components import component_config
from omniplat.integrations.vllm_omni_config import OmniplatDiffusionConfig
from omniplat.integrations.vllm_probe import ModelSurface
from tests.vllm.engine import engine
from tests.vllm.omni_serve import Answer, Request, run_all
from tests.vllm.pipelines import write_pipeline, write_wan
from tests.vllm.quantized_pipelines import MODELOPT, in_blocks, quantize, quantize_as_modelopt, quantize_to_nf4

ONLINE: dict[str, str | dict[str, Any]] = {
    "mxfp4": "mxfp4",
    "mxfp8": {"method": "mxfp8"},
    "fp8": "fp8",
    "fp8 by channel": {"method": "fp8", "granularity": "channel"},
    "mxfp8 but for some": {"method": "mxfp8", "ignored_layers": ["transformer_blocks.0.img_mlp", "*.to_add_out"]},
}
#: bf16 outputs of products that the oracle has in float64.
BOUND = 4e-3


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pipelines")
    plain = write_pipeline(folder / "plain")
    stored = write_pipeline(folder / "stored", plain / "transformer")
    quantize(stored / "transformer", in_blocks)
    everywhere = write_pipeline(folder / "everywhere", plain / "transformer")
    quantize(everywhere / "transformer", lambda name: True)
    four_bit = write_pipeline(folder / "four-bit", plain / "transformer")
    quantize_to_nf4(four_bit / "transformer")
    by_modelopt = {}
    for algorithm in MODELOPT:
        by_modelopt[algorithm] = write_pipeline(folder / algorithm, plain / "transformer")
        quantize_as_modelopt(by_modelopt[algorithm] / "transformer", algorithm)
    wan = write_wan(folder / "wan")
    cascade = shutil.copytree(wan, folder / "cascade")
    quantize(cascade / "transformer", lambda name: name.startswith("blocks."))
    return {
        "plain": plain,
        "stored": stored,
        "four bit": four_bit,
        "everywhere": everywhere,
        "wan": wan,
        "cascade": cascade,
        **by_modelopt,
    }


@pytest.fixture(scope="session")
def answers(pipelines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    plain, stored = str(pipelines["plain"]), str(pipelines["stored"])
    by_component = {"method": "omniplat", "components": {"transformer": "mxfp8", "transformer_2": "mxfp4"}}
    of_another = {"method": "omniplat", "components": {"transformer_2": "mxfp4", "transformer": None}}
    requests = [Request(name, plain, spec, spec) for name, spec in ONLINE.items()]
    requests += [
        Request("plain", plain),
        Request("by component", plain, by_component, "mxfp8"),
        Request("another component's", plain, of_another),
        Request("stored", stored),
        Request("stored, layer-wise", stored, options={"enable_layerwise_offload": True, "pin_cpu_memory": False}),
        Request("stored, in turns", stored, options={"enable_cpu_offload": True, "pin_cpu_memory": False}),
        Request("stored, and said", stored, "mxfp8"),
        Request("stored, and said otherwise", stored, "int8"),
        Request("four bit", str(pipelines["four bit"])),
        Request("stored everywhere", str(pipelines["everywhere"])),
        Request("unknown option", plain, {"method": "mxfp4", "rotate": True}),
        Request("names nothing", plain, {"method": "mxfp4", "ignored_layers": ["no_such_layer"]}),
    ]
    of_one = {"method": "omniplat", "components": {"transformer": "mxfp8", "transformer_2": None}}
    requests += [
        Request("wan", str(pipelines["wan"]), "mxfp8", "mxfp8"),
        Request("wan by component", str(pipelines["wan"]), of_one, "mxfp8"),
        Request("wan stored", str(pipelines["cascade"])),
    ]
    requests += [Request(algorithm, str(pipelines[algorithm])) for algorithm in MODELOPT]
    folder = tmp_path_factory.mktemp("omni")
    off = [Request("plain, off", plain), Request("mxfp4, off", plain, "mxfp4"), Request("stored, off", stored)]
    off += [Request("FP8, off", str(pipelines["FP8"]))]
    return run_all(requests, "gaps", folder) | run_all(off, "off", folder)


def quantized(answer: Answer) -> set[str]:
    return {name for name, method in answer.methods.items() if method.startswith("Omniplat")}


def blocks(names: Iterable[str]) -> set[str]:
    return {name for name in names if in_blocks(f"{name}.")}


@pytest.mark.parametrize("name", [*ONLINE, "by component"])
def test_methods_are_applied_while_loading(name: str, answers: dict[str, Answer]) -> None:
    answer = answers[name]
    assert answer.error == ""
    assert {answer.methods[module] for module in quantized(answer)} == {"OmniplatOnlineLinearMethod"}
    if name != "mxfp8 but for some":
        assert quantized(answer) == blocks(answer.methods)
        assert len(quantized(answer)) == 16
    assert answer.errors.keys() == quantized(answer)
    assert max(answer.errors.values()) <= BOUND
    assert answer.image != answers["plain"].image


def test_ignored_layers_stay(answers: dict[str, Answer]) -> None:
    kept = blocks(answers["mxfp8"].methods) - quantized(answers["mxfp8 but for some"])
    assert kept == {
        "transformer_blocks.0.img_mlp.net.0.proj", "transformer_blocks.0.img_mlp.net.2",
    } | {f"transformer_blocks.{index}.attn.to_add_out" for index in (0, 1)}  # fmt: skip


@pytest.mark.parametrize("name", ["stored", "stored, and said"])
def test_quantized_checkpoints_are_loaded_as_they_are_stored(name: str, answers: dict[str, Answer]) -> None:
    answer = answers[name]
    assert answer.error == ""
    assert quantized(answer) == blocks(answer.methods)
    assert {answer.methods[module] for module in quantized(answer)} == {"OmniplatLinearMethod"}
    assert max(answer.errors.values()) <= BOUND
    # The same rounding of the same weights: what is stored is what would have been made while loading.
    assert answer.image == answers["mxfp8"].image


@pytest.mark.parametrize("name", ["stored, layer-wise", "stored, in turns"])
def test_layers_are_offloaded(name: str, answers: dict[str, Answer]) -> None:
    """By blocks, of which one is resident afterwards, and as a whole in turns with the text encoder."""
    answer = answers[name]
    assert answer.error == ""
    assert answer.image == answers["stored"].image
    assert answer.held.keys() == quantized(answer) == quantized(answers["stored"])
    resident = {module for module, size in answer.held.items() if size}
    first = {module for module in quantized(answer) if module.startswith("transformer_blocks.0.")}
    assert resident == (first if name == "stored, layer-wise" else quantized(answer))


def test_names_with_dots_are_delivered(answers: dict[str, Answer]) -> None:
    answer = answers["four bit"]
    assert answer.error == ""
    assert quantized(answer) == blocks(answer.methods)
    assert {answer.methods[module] for module in quantized(answer)} == {"OmniplatLinearMethod"}
    assert answer.errors.keys() == quantized(answer)
    assert max(answer.errors.values()) <= BOUND


def test_the_names_that_components_ask_for(pipelines: dict[str, Path]) -> None:
    """vLLM's own mapper, which a config has that says nothing, would drop the order of groups."""
    config = component_config({"transformer": "bitsandbytes", "transformer_2": None})
    config.maybe_update_config(str(pipelines["four bit"]))
    names = ["transformer.a.weight.absmax", "transformer.a.g_idx"]
    assert config.get_checkpoint_weight_mapper().apply_list(names) == ["transformer.a.weight__absmax", names[1]]


def test_a_component_without_a_method_stays(answers: dict[str, Answer]) -> None:
    answer = answers["another component's"]
    assert answer.error == ""
    assert quantized(answer) == set()
    assert answer.image == answers["plain"].image


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "stored, and said otherwise",
            "the checkpoint is vllm-omni, mxfp8, not int8: a method confirms what is stored",
        ),
        ("stored everywhere", "vllm-omni builds img_in without a quantization method"),
        ("unknown option", "mxfp4 has no option rotate"),
        ("names nothing", "ignored_layers: 'no_such_layer' names no layer"),
    ],
)
def test_what_cannot_be_meant_is_an_error_in_the_engines_output(
    name: str, message: str, answers: dict[str, Answer]
) -> None:
    assert message in answers[name].error


@pytest.mark.parametrize(
    ("name", "method", "transformers"),
    [
        ("wan", "OmniplatOnlineLinearMethod", 2),
        ("wan by component", "OmniplatOnlineLinearMethod", 1),
        ("wan stored", "OmniplatLinearMethod", 1),
    ],
)
def test_a_cascade_of_two_transformers(name: str, method: str, transformers: int, answers: dict[str, Answer]) -> None:
    """Modules of both have the same names. `transformer_2` is no part of `transformer`."""
    answer = answers[name]
    assert answer.error == ""
    assert len(quantized(answer)) == 16 * transformers
    assert {answer.methods[module] for module in quantized(answer)} == {method}
    second = {module for module in quantized(answer) if module.startswith("transformer_2.")}
    assert len(second) == 16 * (transformers - 1)
    assert answer.errors.keys() == quantized(answer)
    assert max(answer.errors.values()) <= BOUND


def test_what_is_stored_is_what_would_be_made(answers: dict[str, Answer]) -> None:
    assert answers["wan stored"].image == answers["wan by component"].image
    assert answers["wan stored"].image != answers["wan"].image


def test_what_vllm_omni_lacks_is_said_once(answers: dict[str, Answer]) -> None:
    lines = [
        line for line in answers["mxfp4"].log if line.startswith("omniplat runs the linear layers, which vllm-omni")
    ]
    assert len(lines) == 1
    assert "is currently only supported on NPU" in lines[0]


def test_off_is_the_engine_alone(answers: dict[str, Answer]) -> None:
    assert answers["plain, off"].image == answers["plain"].image
    assert np.ptp(answers["plain"].image) > 0
    assert "NotImplementedError: DiffusionMXFP4Config" in answers["mxfp4, off"].error
    assert "NotImplementedError: DiffusionMXFP8Config" in answers["stored, off"].error
    for name in ("plain, off", "mxfp4, off", "stored, off"):
        assert answers[name].log == []
        assert "omniplat/integrations" not in answers[name].error


def test_what_the_engine_runs_is_left_to_it(
    pipelines: dict[str, Path], one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device where the engine's own FP8 works: no defect of its build for CPUs is known here."""
    monkeypatch.setattr("omniplat.integrations.vllm_defects.DEFECTS", ())
    native = Fp8Config()
    native.is_checkpoint_quantized, native.data_type = True, "mx_fp"
    config = OmniplatDiffusionConfig("fp8", {}, "gaps", native)
    with engine(1) as current:
        current.model_config = ModelSurface()
        assert not config.is_checkpoint_quantized
        config.maybe_update_config(str(pipelines["plain"]))
        layer = ReplicatedLinear(
            128,
            128,
            bias=False,
            params_dtype=torch.bfloat16,
            quant_config=config,
            prefix="transformer_blocks.0.attn.to_k",
        )
    assert type(layer.quant_method).__module__.startswith("vllm.")
    assert config.get_name() == native.get_name()
    # What models and loaders read from the engine's config is there, and nothing else is.
    assert config.is_checkpoint_quantized
    assert config.data_type == "mx_fp"
    assert config.activation_scheme == native.activation_scheme
    assert not hasattr(config, "no_such_option")
    assert type(pickle.loads(pickle.dumps(config))) is OmniplatDiffusionConfig


@pytest.mark.parametrize("algorithm", MODELOPT)
def test_checkpoints_of_modelopt_need_nothing_said(algorithm: str, answers: dict[str, Answer]) -> None:
    """vllm-omni gives them to vLLM's own config, which leaves to omniplat what it does not run on this device."""
    answer = answers[algorithm]
    assert answer.error == ""
    assert quantized(answer) == blocks(answer.methods)
    assert {answer.methods[name] for name in quantized(answer)} == {"OmniplatLinearMethod"}
    assert answer.errors.keys() == quantized(answer)
    assert max(answer.errors.values()) < BOUND
    assert answers["FP8, off"].error, "vllm-omni runs it by itself: then it keeps it"
