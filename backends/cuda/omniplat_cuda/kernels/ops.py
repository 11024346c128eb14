"""Operators over torch's own 8-bit matrix products, registered in torch's library `omniplat` on import.

Weights are codes [N, K], row by row, so that their transpose is the column-major operand which both products want.
The activation's quantization travels as JSON: a constant of a traced graph.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from omniplat.portable.mx_grid import regroup_rows
from omniplat.portable.quantize import has_triton, quantize_rows
from omniplat.runtime.operators import linear_fake, new_library, register
from omniplat.runtime.quant_text import decode_quant
from omniplat.scheme import TensorQuant

_LIBRARY = new_library()
_ARGUMENTS = (
    "(Tensor x, Tensor codes, Tensor scale, Tensor? pre_scale, Tensor? input_scale, Tensor? bias, str activation, "
    "ScalarType out_dtype) -> Tensor"
)
#: `torch._int_mm` refuses 16 rows and fewer on CUDA.
_INT_MM_ROWS = 17
_HALF = (torch.bfloat16, torch.float16)


def is_built_for_cuda(major: int, minor: int) -> bool:
    """True for a torch that was built for that release of CUDA, or a later one."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2]) >= (major, minor)


@lru_cache(maxsize=64)
def _rowwise_outputs(device: torch.device) -> tuple[torch.dtype, ...]:
    """Output dtypes of `torch._scaled_mm` with scales per row: cuBLAS has them all from 12.9 on, on sm90 and later."""
    if device.type != "cuda":
        return (torch.bfloat16,)
    every = is_built_for_cuda(12, 9) and torch.cuda.get_device_capability(device) >= (9, 0)
    return (*_HALF, torch.float32) if every else (torch.bfloat16,)


def scaled_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """fp8 by fp8: `codes` uint8 [N, K] (bytes of e4m3fn), `scale` f32 [1, N], or [1, 1] for one of the whole weight."""
    features = codes.shape[0]
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count == 0:
        return x.new_empty((*x.shape[:-1], features), dtype=out_dtype)
    quantized, row_scale = quantize_to_fp8(rows, decode_quant(activation), pre_scale, input_scale)
    a, b = quantized.view(torch.float8_e4m3fn), codes.view(torch.float8_e4m3fn).t()
    # The product adds a bias of its own output's dtype only, and none in f32.
    fused = bias is None or (out_dtype in _HALF and bias.dtype == out_dtype)
    dtype = out_dtype if fused else torch.float32
    added = bias if fused else None
    if scale.numel() == 1 and row_scale.numel() == 1:
        y = _product(a, b, row_scale, scale, added, dtype)
    else:
        if row_scale.shape[0] != count:
            row_scale = row_scale.expand(count, 1).contiguous()
        if scale.shape[1] != features:
            scale = scale.expand(1, features).contiguous()
        if dtype in _rowwise_outputs(x.device):
            y = _product(a, b, row_scale, scale, added, dtype)
        else:
            one = torch.ones((1, 1), dtype=torch.float32, device=x.device)
            y = _product(a, b, one, one, None, torch.float32).mul_(scale).mul_(row_scale)
            fused = bias is None
    if bias is not None and not fused:
        y = y.add_(bias)
    return shaped(y, x, out_dtype)


def shaped(y: torch.Tensor, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """`y` [M, N] in `out_dtype`, with the leading shape of `x`. Conversions to what a tensor is already take time."""
    if y.dtype != out_dtype:
        y = y.to(out_dtype)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def quantize_to_fp8(
    rows: torch.Tensor,
    quant: TensorQuant,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    *,
    releases: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of e4m3 [M, K] and multipliers: of an MX activation, regrouped under one scale per token. `releases` as of
    `quantize_rows`."""
    if quant.scale_format == "e8m0":
        return regroup_rows(rows, quant, pre_scale, releases=releases)
    return quantize_rows(rows, quant, pre_scale, input_scale, releases=releases)


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch._scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=True)


def _int_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """int8 by int8, exact in int32, scaled in f32: `codes` int8 [N, K], `scale` f32 [1, N]."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count == 0:
        return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype)
    quantized, row_scale = quantize_rows(rows, decode_quant(activation), pre_scale, input_scale, releases=True)
    if x.is_cuda and has_triton():
        from omniplat_cuda.kernels.int8_gemm import int8_product

        return shaped(int8_product(quantized, codes, row_scale, scale, bias, out_dtype), x, out_dtype)
    if count < _INT_MM_ROWS:
        quantized = F.pad(quantized, (0, 0, 0, _INT_MM_ROWS - count))
    y = torch._int_mm(quantized, codes.t())[:count].to(torch.float32).mul_(scale).mul_(row_scale)
    if bias is not None:
        y = y.add_(bias)
    return shaped(y, x, out_dtype)


for _name, _implementation in (("cuda_scaled_linear", scaled_linear), ("cuda_int_linear", _int_linear)):
    # On the CPU torch has the same products: slow, and enough to test the code around them.
    register(_LIBRARY, _name + _ARGUMENTS, dict.fromkeys(("CUDA", "CPU"), _implementation), linear_fake)
