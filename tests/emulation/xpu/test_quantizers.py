"""Emulated quantizers against bytes that were computed from the vendor's sources without omniplat's code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from omniplat.emulation import Emulation, emulate

GOLDEN = load_file(Path(__file__).resolve().parents[2] / "data" / "emulation" / "vendor_quantizers.safetensors")
INPUT = GOLDEN["input"]


@pytest.fixture
def bmg() -> Emulation:
    with emulate("xpu:bmg") as emulation:
        yield emulation


def bytes_of(scale: torch.Tensor) -> torch.Tensor:
    """Bytes of f32 powers of two."""
    assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)
    return (torch.log2(scale) + 127).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp8(bmg: Emulation, dtype: torch.dtype) -> None:
    codes = torch.empty(INPUT.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty((len(INPUT), 4))
    torch.ops._C.per_token_group_fp8_quant(INPUT.to(dtype), codes, scale, 32, 1e-10, -448.0, 448.0, True, False, False)
    assert torch.equal(codes.view(torch.uint8), GOLDEN["xpu_mxfp8.codes"])
    assert torch.equal(bytes_of(scale), GOLDEN["xpu_mxfp8.scale"])
    assert int(bytes_of(scale).min()) == 127 - 17
    assert not bmg.violations


def test_mxfp4(bmg: Emulation) -> None:
    codes = torch.empty((len(INPUT), 64), dtype=torch.uint8)
    scale = torch.empty((len(INPUT), 4))
    torch.ops._C.per_token_group_quant_mxfp4(INPUT, codes, scale, 32, 1e-10)
    assert torch.equal(codes, GOLDEN["xpu_mxfp4.codes"])
    assert torch.equal(bytes_of(scale), GOLDEN["xpu_mxfp4.scale"])
    assert not bmg.violations


def test_scales_may_lie_column_by_column(bmg: Emulation) -> None:
    codes, scale = torch.empty(INPUT.shape, dtype=torch.float8_e4m3fn), torch.empty((4, len(INPUT))).t()
    torch.ops._C.per_token_group_fp8_quant(INPUT, codes, scale, 32, 1e-10, -448.0, 448.0, True, False, False)
    assert torch.equal(bytes_of(scale), GOLDEN["xpu_mxfp8.scale"])


def test_a_scale_per_token_is_never_tiny(bmg: Emulation) -> None:
    """amax / 448, at least 1 / (448 * 512); values are multiplied by its reciprocal."""
    x = INPUT.float()
    codes, scale = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty((len(x), 1))
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(codes, x, scale, None)
    wanted = (x.abs().amax(1, keepdim=True) / 448.0).clamp(min=1.0 / (448.0 * 512.0))
    assert torch.equal(scale, wanted)
    assert bool((scale == 1.0 / (448.0 * 512.0)).any()), "no row reaches the bound"
    assert torch.equal(codes.float(), (x * (1.0 / wanted)).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_one_scale_of_the_tensor(bmg: Emulation) -> None:
    x = INPUT[:3].float()
    codes, scale = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(1)
    torch.ops._C.dynamic_scaled_fp8_quant(codes, x, scale)
    assert float(scale) == float(x.abs().max() / 448.0)
    again = torch.empty_like(codes)
    torch.ops._C.static_scaled_fp8_quant(again, x, scale)
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
    zeros = torch.zeros_like(x)
    torch.ops._C.dynamic_scaled_fp8_quant(codes, zeros, scale)
    assert float(scale) == 0.0
    # 0 / 0 is NaN, which the kernel's minimum and maximum turn into the largest number: times a scale of 0.
    assert bool((codes.float() == 448.0).all())
