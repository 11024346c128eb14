"""Operators over AITER's functions, registered in torch's library `omniplat` on import.

Weights are bytes: few of torch's tools know more of fp8 and fp4 than their names. Inputs in 8 bits are quantized by
omniplat's own kernels, whose codes are the declared ones on every architecture; AITER's own would divide by FNUZ's
largest number on gfx94x, and by zero for a row of zeros.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from omniplat.portable.mx_grid import regroup_rows
from omniplat.portable.quantize import quantize_rows
from omniplat.runtime.operators import linear_fake, new_library, register
from omniplat.runtime.quant_text import decode_quant
from omniplat.scheme import TensorQuant
from omniplat_rocm.kernels.vendor import aiter, require_half, to_fnuz

_LIBRARY = new_library()
_BLOCK = 128


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., K] as contiguous [M, K]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _quantized(
    rows: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None, input_scale: torch.Tensor | None, fnuz: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 or fp8 [M, K], and f32 scales: [M, 1], or [M, K/128] for groups."""
    if quant.scale_format == "e8m0":
        codes, scale = regroup_rows(rows, quant, pre_scale)
    elif quant.granularity == "group":
        groups = (rows if pre_scale is None else rows.to(torch.float32) * pre_scale).view(-1, _BLOCK)
        codes, scale = quantize_rows(groups, replace(quant, granularity="token", group_size=0), None, None)
        codes, scale = codes.view(rows.shape), scale.view(rows.shape[0], -1)
    else:
        codes, scale = quantize_rows(rows, quant, pre_scale, input_scale)
    if codes.dtype == torch.uint8:
        if fnuz:
            codes, scale = to_fnuz(codes, scale)
        codes = codes.view(torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn)
    return codes, scale if scale.shape[0] == rows.shape[0] else scale.expand(rows.shape[0], 1).contiguous()


#: What `gemm_a8wfp4` executes.
_PER_TOKEN = TensorQuant("fp8_e4m3", "token", dynamic=True)


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """A bias that the product does not add, and the leading shape of `x`."""
    if bias is not None:
        y = (y.to(torch.float32) + bias).to(y.dtype)
    return y.view(*x.shape[:-1], y.shape[-1])


def _gemm_a8w8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    product: str,
    fnuz: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`codes` int8, or bytes of the device's fp8 [N, K]; `scale` f32 [1, N], or [N/128, K/128] for blocks."""
    require_half(out_dtype, product)
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype)
    quantized, row_scale = _quantized(_rows(x), decode_quant(activation), pre_scale, input_scale, fnuz)
    weight = codes.view(quantized.dtype)
    function = aiter("", product)
    if product == "gemm_a8w8":
        # The product adds a bias of its output's dtype, before its one rounding.
        added = bias.to(out_dtype) if bias is not None else None
        return _with_bias(function(quantized, weight, row_scale, scale, bias=added, dtype=out_dtype), None, x)
    return _with_bias(function(quantized, weight, row_scale, scale, dtype=out_dtype), bias, x)


def _gemm_a4w4(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """`codes` uint8 [N, K/2] in tiles; `scale` bytes, shuffled and padded."""
    require_half(out_dtype, "gemm_a4w4")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype)
    dtypes = aiter("", "dtypes")
    quantize = aiter("", "get_hip_quant")(aiter("", "QuantType").per_1x32)
    quantized, row_scale = quantize(_rows(x).to(out_dtype), quant_dtype=dtypes.fp4x2, shuffle=True)
    weight, weight_scale = codes.view(dtypes.fp4x2), scale.view(dtypes.fp8_e8m0)
    y = aiter("", "gemm_a4w4")(quantized, weight, row_scale, weight_scale, dtype=out_dtype, bpreshuffle=True)
    return _with_bias(y, bias, x)


def _gemm_afp4wfp4(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """`codes` uint8 [N, K/2]; `scale` bytes [K/32, N], which the product reads column by column."""
    require_half(out_dtype, "gemm_afp4wfp4")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype)
    quantized, row_scale = aiter("ops.triton.quant", "dynamic_mxfp4_quant")(_rows(x).to(out_dtype))
    y = aiter("ops.triton.gemm_afp4wfp4", "gemm_afp4wfp4")(quantized, codes, row_scale, scale.t(), out_dtype)
    return _with_bias(y, bias, x)


def _gemm_a8wfp4(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`codes` uint8 [N, K/2]; `scale` bytes [N, K/32]; inputs in e4m3fn with a scale per token."""
    require_half(out_dtype, "gemm_a8wfp4")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype)
    quantized, row_scale = _quantized(_rows(x), _PER_TOKEN, pre_scale, None, False)
    y = torch.empty((quantized.shape[0], codes.shape[0]), dtype=out_dtype, device=x.device)
    aiter("ops.triton.gemm_a8wfp4", "gemm_a8wfp4")(quantized, codes, y, row_scale, scale, out_dtype)
    return _with_bias(y, bias, x)


_OPERATORS = (
    (
        "rocm_gemm_a8w8(Tensor x, Tensor codes, Tensor scale, Tensor? pre_scale, Tensor? input_scale, Tensor? bias, "
        "str activation, str product, bool fnuz, ScalarType out_dtype) -> Tensor",
        _gemm_a8w8,
    ),
    (
        "rocm_gemm_a4w4(Tensor x, Tensor codes, Tensor scale, Tensor? bias, ScalarType out_dtype) -> Tensor",
        _gemm_a4w4,
    ),
    (
        "rocm_gemm_afp4wfp4(Tensor x, Tensor codes, Tensor scale, Tensor? bias, ScalarType out_dtype) -> Tensor",
        _gemm_afp4wfp4,
    ),
    (
        "rocm_gemm_a8wfp4(Tensor x, Tensor codes, Tensor scale, Tensor? pre_scale, Tensor? bias, ScalarType out_dtype) "
        "-> Tensor",
        _gemm_a8wfp4,
    ),
)
for _schema, _implementation in _OPERATORS:
    register(_LIBRARY, _schema, {"CompositeExplicitAutograd": _implementation}, linear_fake)
