"""vLLM's products in 8 bits and its quantizers for them.

From csrc/libtorch_stable/quantization/w8a8 of vllm-project/vllm: cutlass/scaled_mm_entry.cu, fp8/common.cu,
int8/scaled_quant.cu. Sums are f32, of integers exact.
"""

from __future__ import annotations

import torch

from omniplat.emulation.core import Emulation

_E4M3_MAX = 448.0
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_HALF = (torch.float16, torch.bfloat16)


def cutlass_scaled_mm(
    emulation: Emulation,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """`out` [M, N] = a [M, K] by b [K, N], row by column, times scales of rows and columns or of all, plus `bias`."""
    op = "_C::cutlass_scaled_mm"
    emulation.require(op, a.dim() == 2 and b.dim() == 2 and out.dim() == 2, "a, b and out are matrices")
    shapes = (out.shape[0] == a.shape[0], a.shape[1] == b.shape[0], b.shape[1] == out.shape[1])
    emulation.require(op, all(shapes), f"shapes {list(a.shape)}, {list(b.shape)} and {list(out.shape)}")
    emulation.require(op, a.stride(1) == 1 and out.stride(1) == 1, "a and out are row-major")
    emulation.require(op, b.stride(0) == 1, "b is column-major")
    emulation.require(op, out.stride(0) % 16 == 0 and b.stride(1) % 16 == 0, "rows are aligned to 16 bytes")
    emulation.require(op, out.dtype in _HALF, f"out is f16 or bf16, found {out.dtype}")
    same = a.dtype == b.dtype and a.dtype in (torch.int8, torch.float8_e4m3fn)
    emulation.require(op, same, f"a and b are int8 or float8_e4m3fn, found {a.dtype} and {b.dtype}")
    for name, scale, count in (("a_scales", a_scales, a.shape[0]), ("b_scales", b_scales, b.shape[1])):
        emulation.require(op, scale.dtype == torch.float32 and scale.is_contiguous(), f"{name} is contiguous float32")
        emulation.require(op, scale.numel() in (1, count), f"{name} has 1 or {count} numbers, found {scale.numel()}")
    if bias is not None:
        flat = bias.numel() == b.shape[1] and bias.is_contiguous() and bias.dim() == 1
        emulation.require(op, flat, f"bias is contiguous [{b.shape[1]}], found {list(bias.shape)}")
        emulation.require(op, bias.dtype == out.dtype, f"bias is {out.dtype} as out is, found {bias.dtype}")
    wide = torch.float64 if a.dtype == torch.int8 else torch.float32
    y = (a.to(wide) @ b.to(wide)).to(torch.float32) * a_scales.reshape(-1, 1) * b_scales.reshape(1, -1)
    out.copy_(y if bias is None else y + bias.to(torch.float32))


def dynamic_per_token_scaled_fp8_quant(
    emulation: Emulation, result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, scale_ub: torch.Tensor | None
) -> None:
    """One scale per row, written to `scale` [M, 1]: amax / 448, at least 1 / (512 * 448)."""
    op = "_C::dynamic_per_token_scaled_fp8_quant"
    _require_fp8(emulation, op, result, input, scale)
    emulation.require(op, scale.numel() == input.shape[0], f"{input.shape[0]} scales, found {scale.numel()}")
    emulation.require(op, scale_ub is None, "an upper bound of scales is not emulated")
    values = input.to(torch.float32)
    # fmaxf leaves NaN out
    amax = values.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(1, keepdim=True)
    found = (amax / _E4M3_MAX).clamp(min=1.0 / (_E4M3_MAX * 512.0))
    scale.copy_(found.view(scale.shape))
    result.copy_(_saturated(values / found))


def static_scaled_fp8_quant(
    emulation: Emulation,
    result: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor,
    group_shape: list[int] | None = None,
) -> None:
    """One scale for all: values are multiplied by its reciprocal."""
    op = "_C::static_scaled_fp8_quant"
    _require_fp8(emulation, op, result, input, scale)
    emulation.require(op, scale.numel() == 1 and group_shape is None, "only one scale of the tensor is emulated")
    result.copy_(_saturated(input.to(torch.float32) * (1.0 / scale.reshape(()))))


def dynamic_scaled_int8_quant(
    emulation: Emulation, result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, azp: torch.Tensor | None
) -> None:
    """One scale per row, written to `scale` [M, 1]: amax / 127. Values are multiplied by 127 / amax."""
    op = "_C::dynamic_scaled_int8_quant"
    _require_int8(emulation, op, result, input, scale, azp)
    emulation.require(op, scale.numel() == input.shape[0], f"{input.shape[0]} scales, found {scale.numel()}")
    values = input.to(torch.float32)
    amax = values.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(1, keepdim=True)
    scale.copy_((amax / 127.0).view(scale.shape))
    # A number by a tensor is torch's reciprocal, multiplied: two roundings.
    result.copy_(_rounded(values * torch.where(amax == 0, 0.0, torch.full_like(amax, 127.0) / amax)))


def static_scaled_int8_quant(
    emulation: Emulation, result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, azp: torch.Tensor | None
) -> None:
    """One scale for all, which values are divided by."""
    op = "_C::static_scaled_int8_quant"
    _require_int8(emulation, op, result, input, scale, azp)
    emulation.require(op, scale.numel() == 1, f"one scale, found {scale.numel()}")
    result.copy_(_rounded(input.to(torch.float32) / scale.reshape(())))


def _saturated(values: torch.Tensor) -> torch.Tensor:
    """fminf and fmaxf drop NaN, which becomes the largest number."""
    largest = torch.tensor(_E4M3_MAX)
    return torch.fmax(-largest, torch.fmin(values, largest)).to(torch.float8_e4m3fn)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """To nearest even and saturated; NaN becomes 0."""
    return torch.round(values).clamp(-128, 127).nan_to_num(nan=0.0).to(torch.int8)


def _require_fp8(emulation: Emulation, op: str, result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor) -> None:
    emulation.require(op, result.dtype == torch.float8_e4m3fn, f"result is float8_e4m3fn, found {result.dtype}")
    emulation.require(op, input.stride(-1) == 1 and result.stride(-1) == 1, "last dimensions are contiguous")
    _require_input(emulation, op, result, input, scale)


def _require_int8(
    emulation: Emulation,
    op: str,
    result: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor,
    azp: torch.Tensor | None,
) -> None:
    emulation.require(op, result.dtype == torch.int8, f"result is int8, found {result.dtype}")
    emulation.require(op, input.is_contiguous() and result.is_contiguous(), "input and result are contiguous")
    emulation.require(op, azp is None, "zero points are not emulated")
    _require_input(emulation, op, result, input, scale)


def _require_input(
    emulation: Emulation, op: str, result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor
) -> None:
    emulation.require(op, input.dim() == 2 and result.shape == input.shape, f"one matrix, found {list(input.shape)}")
    emulation.require(op, input.dtype in _FLOATS, f"input is a float, found {input.dtype}")
    emulation.require(op, scale.dtype == torch.float32 and scale.is_contiguous(), "scale is contiguous float32")
    if bool(torch.isnan(input).any()):
        emulation.record(op, "nan-dropped", "NaN in an input becomes a number")
