"""Quantizers of vllm-xpu-kernels: scale rules, rounding and layout of scales as its SYCL kernels have them.

From csrc/quantization/fp8/fp8_quant.cpp, quant_utils.h and fp4/mxfp4_quant.h of vllm-project/vllm-xpu-kernels at
4543b580. Scales are f32; a scale by the e8m0 rule is a power of two that callers store as a byte.
"""

from __future__ import annotations

import torch

from omniplat.emulation.core import Emulation
from omniplat.emulation.microscaling import e2m1_codes, in_groups, pack_nibbles

_FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FP4_MAX = 6.0


def fp8_group_scale(amax: torch.Tensor, largest: float, *, power_of_two: bool) -> torch.Tensor:
    """f32 scales of groups with absolute maximum `amax`: never below 1 / (512 * largest), 2^-17 for e4m3."""
    scale = torch.clamp(amax / largest, min=1.0 / (largest * 512.0))
    return torch.exp2(torch.ceil(torch.log2(scale))) if power_of_two else scale


def to_fp8(values: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` times `inverse`, saturated and rounded to nearest even.

    fmin and fmax drop a NaN, which therefore becomes the largest number.
    """
    largest = torch.tensor(_FP8_MAX[dtype])
    return torch.fmax(-largest, torch.fmin(values * inverse, largest)).to(dtype)


def mxfp4(x: torch.Tensor, eps: float = 1e-10) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 32: packed codes uint8 [..., K/2] and f32 powers of two [..., K/32], at least 2^-33.

    Values in the middle between two codes go to the smaller magnitude, and -0 becomes 0.
    """
    groups = in_groups(x.to(torch.float32), x.shape[-1] // 32)
    scale = torch.exp2(torch.ceil(torch.log2((groups.abs().amax(-1) / _FP4_MAX).clamp(min=eps))))
    values = (groups * (1.0 / scale.unsqueeze(-1))).flatten(-2).clamp(-_FP4_MAX, _FP4_MAX)
    codes = torch.where(values == 0, 0, e2m1_codes(values, "half-down"))
    return pack_nibbles(codes.to(torch.uint8)), scale


# -- the operators ----------------------------------------------------------------------------------------------


def static_scaled_fp8_quant(
    emulation: Emulation,
    result: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor,
    group_shape: tuple[int, int] | None = None,
) -> None:
    """`result` = input / scale for one scale of the whole tensor; other shapes of scales are not emulated."""
    op = "_C::static_scaled_fp8_quant"
    _require_quantizable(emulation, op, input, result)
    emulation.require(op, input.stride(-1) == 1, "last dimension of input must be contiguous")
    emulation.require(op, result.stride(-1) == 1, "last dimension of output must be contiguous")
    emulation.require(op, scale.dtype == torch.float32, f"expected scalar type Float, found {scale.dtype}")
    emulation.require(op, scale.numel() == 1 and group_shape is None, "only one scale of the tensor is emulated")
    _note_nan(emulation, op, input)
    result.copy_(to_fp8(input.to(torch.float32), 1.0 / scale.reshape(()), result.dtype))


def dynamic_scaled_fp8_quant(
    emulation: Emulation, result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor
) -> None:
    """One scale of the whole tensor, written to `scale` [1]: amax / max, with no lower bound."""
    op = "_C::dynamic_scaled_fp8_quant"
    _require_quantizable(emulation, op, input, result)
    emulation.require(op, scale.dtype == torch.float32, "scale must be a float tensor")
    emulation.require(op, scale.numel() == 1, "scale must be a single-element tensor")
    emulation.require(op, input.stride(-1) == 1, "last dimension of input must be contiguous")
    emulation.require(op, result.stride(-1) == 1, "last dimension of output must be contiguous")
    _note_nan(emulation, op, input)
    values = input.to(torch.float32)
    scale.fill_(float(values.abs().max() / _FP8_MAX[result.dtype]) if values.numel() else 0.0)
    result.copy_(to_fp8(values, 1.0 / scale.reshape(()), result.dtype))


def dynamic_per_token_scaled_fp8_quant(
    emulation: Emulation,
    result: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor,
    scale_ub: torch.Tensor | None,
) -> None:
    """A scale per row of `input` [..., K], written to `scale`: at least 1 / (512 * max)."""
    op = "_C::dynamic_per_token_scaled_fp8_quant"
    _require_quantizable(emulation, op, input, result)
    emulation.require(op, input.is_contiguous() and result.is_contiguous(), "input and out must be contiguous")
    emulation.require(op, scale.dtype == torch.float32, f"expected scalar type Float, found {scale.dtype}")
    _note_nan(emulation, op, input)
    values = input.to(torch.float32).reshape(-1, input.shape[-1])
    if scale.numel() != values.shape[0] or not scale.is_contiguous():
        emulation.record(op, "scale-shape", f"{values.shape[0]} scales are written to {list(scale.shape)}")
        return
    amax = values.abs().amax(1, keepdim=True)
    if scale_ub is not None:
        amax = torch.minimum(amax, scale_ub.reshape(()))
    found = fp8_group_scale(amax, _FP8_MAX[result.dtype], power_of_two=False)
    scale.copy_(found.reshape(scale.shape))
    result.copy_(to_fp8(values, 1.0 / found, result.dtype).reshape(result.shape))


def per_token_group_fp8_quant(
    emulation: Emulation,
    input: torch.Tensor,
    output_q: torch.Tensor,
    output_s: torch.Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
    dummy_is_scale_transposed: bool,
    dummy_is_tma_aligned: bool,
) -> None:
    """A scale per `group_size` values along the last dimension, written to `output_s` [M, G] by its strides.

    `fp8_min`, `fp8_max` and the dummies have no effect: the limits are those of the output's dtype.
    """
    op = "_C::per_token_group_fp8_quant"
    _require_quantizable(emulation, op, input, output_q)
    _require_grouped(emulation, op, input, output_q, output_s, group_size)
    largest = _FP8_MAX[output_q.dtype]
    if (fp8_min, fp8_max) != (-largest, largest):
        emulation.record(op, "limits-ignored", f"[{fp8_min}, {fp8_max}] is asked for, {largest} is used")
    _note_nan(emulation, op, input)
    groups = input.to(torch.float32).reshape(-1, input.shape[-1] // group_size, group_size)
    scale = fp8_group_scale(groups.abs().amax(-1).clamp(min=eps), largest, power_of_two=scale_ue8m0)
    output_s.copy_(scale)
    output_q.copy_(to_fp8(groups, 1.0 / scale.unsqueeze(-1), output_q.dtype).reshape(output_q.shape))


def per_token_group_quant_mxfp4(
    emulation: Emulation,
    input: torch.Tensor,
    output_q: torch.Tensor,
    output_s: torch.Tensor,
    group_size: int,
    eps: float,
) -> None:
    """MXFP4: codes uint8 [..., K/2] and powers of two, f32 [M, K/32]."""
    op = "_C::per_token_group_quant_mxfp4"
    emulation.require(op, input.dtype in _FLOATS, f"not implemented for {input.dtype}")
    emulation.require(op, group_size == 32, f"MXFP4 requires group_size == 32, got {group_size}")
    emulation.require(op, output_q.dtype == torch.uint8, "output_q must be uint8")
    _require_grouped(emulation, op, input, output_q, output_s, group_size)
    codes, scale = mxfp4(input.reshape(-1, input.shape[-1]), eps)
    output_s.copy_(scale)
    output_q.copy_(codes.reshape(output_q.shape))


def _require_quantizable(emulation: Emulation, op: str, input: torch.Tensor, output: torch.Tensor) -> None:
    emulation.require(op, input.dtype in _FLOATS, f"not implemented for {input.dtype}")
    emulation.require(op, output.dtype in _FP8_MAX, f"not implemented for {output.dtype}")
    emulation.require(op, output.shape == input.shape, f"input is {list(input.shape)}, output {list(output.shape)}")


def _require_grouped(
    emulation: Emulation, op: str, input: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, size: int
) -> None:
    emulation.require(op, input.is_contiguous(), "input must be contiguous")
    emulation.require(op, codes.is_contiguous(), "output_q must be contiguous")
    emulation.require(op, input.numel() % size == 0, "input numel must be divisible by group_size")
    emulation.require(op, scales.dim() == 2, "output_s must be 2-D")
    emulation.require(op, scales.dtype == torch.float32, f"expected scalar type Float, found {scales.dtype}")
    wanted = (input.numel() // max(input.shape[-1], 1), input.shape[-1] // size)
    emulation.require(op, tuple(scales.shape) == wanted, f"output_s is {list(scales.shape)}, needs {list(wanted)}")


def _note_nan(emulation: Emulation, op: str, input: torch.Tensor) -> None:
    if bool(input.isnan().any()):
        emulation.record(op, "nan-becomes-largest", "a NaN of the input is quantized as the largest number")
