"""A device that is elsewhere is planned for, and nothing is loaded or quantized for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import omniplat
from omniplat.errors import BackendUnavailableError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"
ELSEWHERE = pytest.mark.parametrize("device", ["cuda:sm100", "rocm:gfx950", "xpu:bmg", "npu:a5"])


@ELSEWHERE
def test_loading(device: str) -> None:
    assert omniplat.plan(EXAMPLE, device).ok
    with pytest.raises(BackendUnavailableError, match=f"{device} is not here"):
        omniplat.load(EXAMPLE, device)


@ELSEWHERE
def test_quantizing_leaves_the_model_as_it_is(device: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256, dtype=torch.bfloat16))
    layer, before = model[0], model[0].weight.clone()
    with pytest.raises(BackendUnavailableError, match=f"{device} is not here"):
        omniplat.quantize_model(model, "mxfp8", device)
    assert model[0] is layer
    assert torch.equal(layer.weight, before)
