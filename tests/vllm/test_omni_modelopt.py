"""ModelOpt's diffusion checkpoints that omniplat refuses: an error, unless vllm-omni runs them by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file
from vllm_omni.quantization import build_quant_config

from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.integrations.dispatch import VARIABLE
from omniplat.integrations.vllm_probe import ModelSurface
from tests.vllm.engine import engine
from tests.vllm.pipelines import write_pipeline
from tests.vllm.quantized_pipelines import MODELOPT, quantize_as_modelopt


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By algorithm: also what vllm-omni's models build without a method is quantized, which omniplat refuses."""
    made = {}
    for algorithm in MODELOPT:
        made[algorithm] = write_pipeline(tmp_path_factory.mktemp("everywhere") / algorithm)
        quantize_as_modelopt(made[algorithm] / "transformer", algorithm, lambda name: True)
    return made


@contextmanager
def config_of(pipeline: Path) -> Iterator[Any]:
    """What vllm-omni makes of the metadata, inside a process of an engine."""
    metadata = json.loads((pipeline / "transformer" / "config.json").read_text())["quantization_config"]
    with engine(1) as current:
        current.model_config = ModelSurface()
        yield build_quant_config(metadata)


@pytest.mark.parametrize("mode", ["gaps", "all"])
@pytest.mark.parametrize("algorithm", MODELOPT)
def test_what_neither_runs_is_an_error(
    algorithm: str, mode: str, everywhere: dict[str, Path], one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, mode)
    with (
        config_of(everywhere[algorithm]) as config,
        pytest.raises(UnsupportedCombinationError, match="vllm-omni builds img_in without a quantization method"),
    ):
        config.maybe_update_config(str(everywhere[algorithm]))


def test_what_the_engine_runs_is_left_to_it_in_gaps_alone(
    everywhere: dict[str, Path], one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device where the engine's own FP8 works: no defect of its build for CPUs is known here."""
    monkeypatch.setattr("omniplat.integrations.vllm_defects.DEFECTS", ())
    said = mock.Mock()
    monkeypatch.setattr("omniplat.integrations.vllm_omni_modelopt.logger", said)
    monkeypatch.setenv(VARIABLE, "gaps")
    with config_of(everywhere["FP8"]) as config:
        config.maybe_update_config(str(everywhere["FP8"]))
    assert config.get_name() == "modelopt"
    assert not config.is_checkpoint_quantized
    ((line, *_, why), _) = said.warning_once.call_args
    assert line.startswith("omniplat leaves %s to vllm-omni")
    assert "img_in" in why
    monkeypatch.setenv(VARIABLE, "all")
    with config_of(everywhere["FP8"]) as config, pytest.raises(UnsupportedCombinationError, match="img_in"):
        config.maybe_update_config(str(everywhere["FP8"]))


@pytest.mark.parametrize("mode", ["gaps", "all"])
@pytest.mark.parametrize("lost", ["weight_scale", "weight"])
@pytest.mark.parametrize("algorithm", MODELOPT)
def test_what_is_broken_is_an_error_whatever_the_engine_would_do(
    algorithm: str, lost: str, mode: str, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omniplat.integrations.vllm_omni_modelopt.native_gap", lambda *_: "")
    monkeypatch.setenv(VARIABLE, mode)
    pipeline = write_pipeline(tmp_path / "pipeline")
    quantize_as_modelopt(pipeline / "transformer", algorithm)
    (file,) = (pipeline / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    name = f"transformer_blocks.0.attn.to_q.{lost}"
    del tensors[name]
    save_file(tensors, file)
    with config_of(pipeline) as config, pytest.raises(InvalidCheckpointError, match=name):
        config.maybe_update_config(str(pipeline))
