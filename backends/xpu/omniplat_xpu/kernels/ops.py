"""Operators over the vendor's, registered in torch's library `omniplat` on import.

Weights and e8m0 scales are bytes: few of torch's tools know more of fp8 and fp4 than their names. The input's
quantization travels as its id; scales are derived as the vendor's quantizers do.
"""

from __future__ import annotations

import torch

from omniplat.errors import UsageError
from omniplat.portable.quantize import quantize_rows
from omniplat.runtime.operators import linear_fake, new_library, register
from omniplat.scheme import TensorQuant, parse_activation_id
from omniplat_xpu.kernels import activations
from omniplat_xpu.kernels.vendor import operator, require_dtype

_LIBRARY = new_library()
_INT8_SCALED = TensorQuant("int8", "token", scale_format="f16", dynamic=True)


def _rows(x: torch.Tensor, pre_scale: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [..., K] as contiguous [M, K]; smoothed in f32, which the quantizers read too."""
    rows = x.reshape(-1, x.shape[-1])
    return (rows if pre_scale is None else rows.to(torch.float32) * pre_scale).contiguous()


def _fp8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`codes` uint8 [N, K]; `scale` f32 [1], [N] or [K/128, N/128], or bytes [K/32, N]."""
    require_dtype(out_dtype, out_dtype, "fp8_gemm")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype)
    quant = parse_activation_id(activation)
    if quant is None:
        raise UsageError("fp8_gemm quantizes its input")
    quantized, row_scale = activations.fp8(_rows(x, pre_scale), quant, input_scale)
    weight_scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    weight = codes.view(torch.float8_e4m3fn).t()
    # Rows, never three dimensions: the operator would read scales per group as scales per token.
    y: torch.Tensor = operator("_xpu_C", "fp8_gemm")(quantized, weight, out_dtype, row_scale, weight_scale, bias)
    return y.view(*x.shape[:-1], codes.shape[0])


def _fp8_weight_only(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`codes` uint8 [N, K]; `scale` f32 [1], [N] or [K/128, N/128]."""
    require_dtype(x.dtype, out_dtype, "fp8_gemm_w8a16")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], codes.shape[0]))
    weight = codes.view(torch.float8_e4m3fn).t()
    y: torch.Tensor = operator("_xpu_C", "fp8_gemm_w8a16")(_rows(x), weight, scale, bias)
    return y.view(*x.shape[:-1], codes.shape[0])


def _fp4_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`codes` uint8 [N, K/2]; `scale` bytes [K/32, N]."""
    require_dtype(out_dtype, out_dtype, "fp4_gemm")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype)
    quantized, row_scale = activations.mxfp4(_rows(x, pre_scale))
    weight, weight_scale = codes.view(torch.float4_e2m1fn_x2).t(), scale.view(torch.float8_e8m0fnu)
    y: torch.Tensor = operator("_xpu_C", "fp4_gemm")(quantized, weight, row_scale, weight_scale, out_dtype, bias)
    return y.view(*x.shape[:-1], codes.shape[0])


def _int4_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    order: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`words` int32 [N, K/8]; `scale` [K/g, N] in x's dtype; `zero_point` int8 [1] or int32 [K/g, N/8]; `order` int32
    [K]: which column of x each column of the weight meets."""
    require_dtype(x.dtype, out_dtype, "int4_gemm_w4a16")
    require_dtype(x.dtype, scale.dtype, "int4_gemm_w4a16")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], words.shape[0]))
    product = operator("_xpu_C", "int4_gemm_w4a16")
    y: torch.Tensor = product(_rows(x), words.t(), bias, scale, zero_point, group_size, order)
    return y.view(*x.shape[:-1], words.shape[0])


def _int4_int8_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As `_int4_linear` with `scale` in f16, an input in int8 with a scale per token, and an output in f16."""
    require_dtype(out_dtype, torch.float16, "int4_gemm_w4a8")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], words.shape[0]), dtype=out_dtype)
    # The operator reads both scales as f16 whatever they are: codes are taken with the scale that it will see.
    quantized, row_scale = quantize_rows(_rows(x, pre_scale), _INT8_SCALED, None, None)
    zeros = torch.zeros(row_scale.shape, dtype=torch.int32, device=x.device)
    product = operator("_xpu_C", "int4_gemm_w4a8")
    half = row_scale.to(torch.float16)
    y: torch.Tensor = product(quantized, half, zeros, words.t(), scale, zero_point, group_size, None, bias)
    return y.view(*x.shape[:-1], words.shape[0])


_OPERATORS = (
    (
        "xpu_fp8_linear(Tensor x, Tensor codes, Tensor scale, Tensor? pre_scale, Tensor? input_scale, Tensor? bias, "
        "str activation, ScalarType out_dtype) -> Tensor",
        _fp8_linear,
    ),
    (
        "xpu_fp8_weight_only(Tensor x, Tensor codes, Tensor scale, Tensor? bias, ScalarType out_dtype) -> Tensor",
        _fp8_weight_only,
    ),
    (
        "xpu_fp4_linear(Tensor x, Tensor codes, Tensor scale, Tensor? pre_scale, Tensor? bias, ScalarType out_dtype) "
        "-> Tensor",
        _fp4_linear,
    ),
    (
        "xpu_int4_linear(Tensor x, Tensor words, Tensor scale, Tensor zero_point, Tensor? order, Tensor? bias, "
        "int group_size, ScalarType out_dtype) -> Tensor",
        _int4_linear,
    ),
    (
        "xpu_int4_int8_linear(Tensor x, Tensor words, Tensor scale, Tensor zero_point, Tensor? pre_scale, "
        "Tensor? bias, int group_size, ScalarType out_dtype) -> Tensor",
        _int4_int8_linear,
    ),
)
for _schema, _implementation in _OPERATORS:
    register(_LIBRARY, _schema, {"CompositeExplicitAutograd": _implementation}, linear_fake)
