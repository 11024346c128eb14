"""Inputs quantized by the vendor's operators: codes, and scales in the form that the products read."""

from __future__ import annotations

import torch

from omniplat.scheme import TensorQuant
from omniplat_xpu.kernels.vendor import operator

_E4M3_MAX = 448.0
#: Below this a group counts as zeros to the vendor's quantizers.
_EPSILON = 1e-10


def fp8(x: torch.Tensor, quant: TensorQuant, input_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [M, K], contiguous, M > 0, to e4m3 codes and scales: f32 [1] per tensor, [M, 1] per token, [M, G] per group;
    e8m0 [M, G] for microscaling."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if quant.granularity == "tensor":
        if not quant.dynamic and input_scale is not None:
            operator("_C", "static_scaled_fp8_quant")(codes, x, input_scale)
            return codes, input_scale
        scale = torch.empty(1, dtype=torch.float32, device=x.device)
        operator("_C", "dynamic_scaled_fp8_quant")(codes, x, scale)
        return codes, scale
    if quant.granularity == "token":
        scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
        operator("_C", "dynamic_per_token_scaled_fp8_quant")(codes, x, scale, None)
        return codes, scale
    size = quant.group_size
    scale = torch.empty((x.shape[0], x.shape[1] // size), dtype=torch.float32, device=x.device)
    is_mx = quant.is_microscaled
    quantize = operator("_C", "per_token_group_fp8_quant")
    quantize(x, codes, scale, size, _EPSILON, -_E4M3_MAX, _E4M3_MAX, is_mx, False, False)
    return codes, to_e8m0(scale) if is_mx else scale


def mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [M, K], contiguous, M > 0, to float4_e2m1fn_x2 [M, K/2] and e8m0 [M, K/32]."""
    codes = torch.empty((x.shape[0], x.shape[1] // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((x.shape[0], x.shape[1] // 32), dtype=torch.float32, device=x.device)
    operator("_C", "per_token_group_quant_mxfp4")(x, codes, scale, 32, _EPSILON)
    return codes.view(torch.float4_e2m1fn_x2), to_e8m0(scale)


def to_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """f32 powers of two, none of them subnormal, as their exponents' bytes."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
