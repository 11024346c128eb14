"""A checkpoint that no kernel runs, in the engine's own output: layer, device, reasons, what helps."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omniplat.api import make_planned, require_runnable
from omniplat.errors import UnsupportedCombinationError
from tests.vllm.checks import folder_of
from tests.vllm.serve import Answer, Request, serve_all

MODES = ("gaps", "all")


def write_int8_experts(folder: Path) -> Path:
    """Experts as bitsandbytes' LLM.int8() stores linear layers: read, planned, and run by no kernel of experts."""
    shutil.copytree(folder_of("lc-qwen3moe-mxfp4"), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]:
        rows, half = tensors.pop(f"{name}.weight_packed").shape
        del tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight"] = torch.ones(rows, 2 * half, dtype=torch.int8)
        tensors[f"{name}.SCB"] = torch.ones(rows)
        tensors[f"{name}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": ["lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_int8_experts(tmp_path_factory.mktemp("unsupported") / "checkpoint")


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> dict[str, Answer]:
    return serve_all([Request(mode, str(checkpoint), mode) for mode in MODES], MODES[0], checkpoint.parent)


@pytest.mark.parametrize("mode", MODES)
def test_the_engine_fails_with_all_that_a_user_needs(mode: str, checkpoint: Path, answers: dict[str, Answer]) -> None:
    with pytest.raises(UnsupportedCombinationError) as refused:
        require_runnable(make_planned(checkpoint, "cpu", engine="vllm").plan)
    error = answers[mode].error
    # All of it reaches the user, unchanged by the layers of the engine that it goes through.
    assert all(line in error for line in refused.value.message.splitlines())
    assert refused.value.reasons
    assert re.search(r"cpu:\w+ \(.*\) cannot run \w+ with int8-bnb weights", error)
    assert re.search(r"^ +layer  model\.layers\.0\.mlp\.experts", error, re.MULTILINE)
    assert re.search(r"^ +\S+ .*needs .*, found int8-bnb$", error, re.MULTILINE)
    assert re.search(r"^ +try: \S", error, re.MULTILINE)


def test_the_log_says_once_why_nobody_runs_it(answers: dict[str, Answer]) -> None:
    said = [line for mode in MODES for line in answers[mode].log if line.startswith("omniplat does not run")]
    assert len(said) == 1
    assert "which vLLM does not: " in said[0]
