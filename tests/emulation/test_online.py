"""Models that are quantized where they stand, onto emulated devices: the device's kernels, and the method's error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import omniplat
from omniplat.emulation import emulate

CASES = [
    ("rocm:gfx950", "mxfp4", "gemm_a4w4"),
    ("rocm:gfx950", "mxfp8", "reencoded_mxfp8"),
    ("rocm:gfx950", "fp8", "gemm_a8w8_fp8_shuffled"),
    ("rocm:gfx942", "fp8", "gemm_a8w8_fp8_shuffled"),
    ("rocm:gfx942", "int4", "portable_linear"),
    ("rocm:gfx942", "int8", "gemm_a8w8_int8"),
    ("xpu:bmg", "fp8", "fp8_gemm_tensor"),
    ("xpu:bmg", "mxfp8", "fp8_gemm_mx"),
    ("xpu:bmg", "mxfp4", "fp4_gemm"),
    ("xpu:bmg", "int4", "int4_gemm_w4a16"),
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(torch.bfloat16).requires_grad_(False)


def error(quantized: nn.Module, x: torch.Tensor) -> float:
    """Relative L2 of the output against the unquantized model's."""
    plain = model()(x).float()
    return float((quantized(x).float() - plain).norm() / plain.norm())


@pytest.mark.parametrize(
    ("device", "method", "kernel", "prefer"),
    [*((*case, "memory") for case in CASES), ("rocm:gfx942", "mxfp4", "reencoded_mxfp4", "speed")],
)
def test_the_error_is_that_of_the_method(device: str, method: str, kernel: str, prefer: str) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    reference = model()
    omniplat.quantize_model(reference, method, device="cpu")
    with emulate(device) as emulation:
        quantized = model()
        plan = omniplat.quantize_model(quantized, method, device=emulation.device, prefer=prefer)
        assert {layer.kernel for layer in plan.layers} == {kernel}
        assert 0.8 <= error(quantized, x) / error(reference, x) <= 1.25
        assert not emulation.violations
