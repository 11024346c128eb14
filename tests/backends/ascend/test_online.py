"""Models quantized online for an emulated device, against the same model quantized for the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import omniplat
from omniplat.emulation import Emulation

#: The model has no transformer blocks that could stay.
OPTIONS = {"mxfp4_dualscale": {"num_bf16_fallback_layers": 0}}


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 128)).to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize(
    ("method", "device", "kernel"),
    [
        ("mxfp8", "npu:a5", "quant_matmul_mxfp8"),
        ("mxfp4", "npu:a5", "quant_matmul_mxfp4"),
        ("mxfp4_dualscale", "npu:a5", "dual_level_quant_matmul"),
        ("int8", "npu:a5", "quant_matmul_int8"),
        ("int8", "npu:a2", "quant_matmul_int8"),
        ("mxfp4", "npu:a2", "weight_quant_batchmatmul_mxfp4"),
    ],
)
def test_online(method: str, device: str, kernel: str, omniplat_emulate: Callable[[str], Emulation]) -> None:
    emulation = omniplat_emulate(device)
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    plain, here, there = model(), model(), model()
    asked = {"method": method, **OPTIONS.get(method, {})}
    omniplat.quantize_model(here, asked, device="cpu")
    omniplat.quantize_model(there, asked, device=emulation.device)
    assert {layer.kernel.name for layer in there if hasattr(layer, "kernel")} == {kernel}
    exact, wanted, found = (run(x).float() for run in (plain, here, there))
    own = float((wanted - exact).norm())
    if kernel.startswith("weight_quant"):
        assert float((found - exact).norm()) < own, "inputs that are not quantized make a smaller error"
    else:
        assert 0.8 < float((found - exact).norm()) / own < 1.25
