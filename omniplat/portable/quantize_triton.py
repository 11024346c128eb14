"""The Triton form of `quantize_rows`: one program per row reads it once and writes codes and scale.

Codes are rounded on the bits and not by a conversion, so that the result is the same on devices that have fp8
conversions, on those that have none, and under Triton's interpreter. NVIDIA's devices from sm89 on convert by
themselves, to the same bytes, and divide with a reciprocal that is corrected to the IEEE quotient. Imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch
from omniplat.portable.quantize import divisor, least_scale
from omniplat.scheme import TensorQuant


def _rows(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    x,
    pre,
    given,
    codes,
    scales,
    columns,
    stride,
    divided_by,
    top,
    least,
    INTEGER: tl.constexpr,
    GATED: tl.constexpr,
    PRE: tl.constexpr,
    GIVEN: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < columns
    v = tl.load(x + row * stride + k, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        v = v / (1.0 + tl.exp(-v)) * tl.load(x + row * stride + columns + k, mask=inside, other=0.0).to(tl.float32)
    if PRE:
        v = v * tl.load(pre + k, mask=inside, other=0.0)
    if GIVEN:
        scale = tl.load(given)
        multiplier = scale
    else:
        # As integers magnitudes have the same order, and NaN is above all of them: it is not lost.
        magnitude = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax = tl.max(magnitude, axis=0).to(tl.float32, bitcast=True)
        scale = tl.div_rn(amax, divided_by)
        scale = tl.where(scale < least, least, scale)
        tl.store(scales + row, scale)
        multiplier = tl.div_rn(top, tl.where(amax == 0.0, 1.0, amax))
    safe = tl.where(scale == 0.0, 1.0, scale)
    if RECIPROCAL:
        scaled = v * multiplier
    elif HARDWARE:
        if (safe > 2.0**-60) & (safe < 2.0**60):
            # A correctly rounded reciprocal and one step of correction give the rounded quotient (Markstein), as long
            # as nothing underflows. Quotients beyond every code, and those that no code but 0 is near, keep their
            # first form: the one may be Inf, the other -0, which no correction survives.
            inverse = tl.div_rn(1.0, safe)
            quotient = v * inverse
            corrected = tl.fma(tl.fma(-quotient, tl.broadcast_to(safe, [BLOCK]), v), inverse, quotient)
            size = tl.abs(quotient)
            scaled = tl.where((size < 65536.0) & (size > 2.0**-20), corrected, quotient)
        else:
            scaled = tl.div_rn(v, tl.broadcast_to(safe, [BLOCK]))
    else:
        scaled = tl.div_rn(v, tl.broadcast_to(safe, [BLOCK]))
    scaled = tl.where(scale == 0.0, 0.0, scaled)
    if INTEGER:
        bounded = tl.where(scaled > 127.0, 127.0, tl.where(scaled < -128.0, -128.0, scaled))
        # 1.5 * 2^23: its unit is 1, so that the sum is rounded to nearest even
        whole = (bounded + 12582912.0) - 12582912.0
        tl.store(codes + row * columns + k, whole.to(tl.int8), mask=inside)
    elif HARDWARE:
        tl.store(codes + row * columns + k, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        absolute = tl.abs(scaled)
        bounded = tl.where(absolute > 448.0, 448.0, absolute)
        pattern = bounded.to(tl.int32, bitcast=True)
        normal = ((pattern + 0x7FFFF + ((pattern >> 20) & 1)) >> 20) - 960
        # 2^14: its unit is 2^-9, the spacing of e4m3's subnormals
        subnormal = (bounded + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(bounded < 0.015625, subnormal, normal)
        code = tl.where(absolute != absolute, 0x7F, code) | sign
        tl.store(codes + row * columns + k, code.to(tl.uint8), mask=inside)


_KERNEL: Any = triton.jit(_rows)


@lru_cache(maxsize=64)
def converts_fp8(device: torch.device) -> bool:
    """True on NVIDIA's devices that round f32 to e4m3 themselves: nearest even, saturating."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def quantize_rows(
    x: torch.Tensor,
    quant: TensorQuant,
    pre_scale: torch.Tensor | None,
    given: torch.Tensor | None,
    *,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `omniplat.portable.quantize.quantize_rows`, for scales per token and static ones, in f32.

    A static scale (`given`, f32 [1, 1]) is divided by, whatever the rule. With `gated` what is quantized is
    silu(left half) * right half of each row.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, columns = x.shape
    columns = columns // 2 if gated else columns
    form = _form_of(quant, columns, gated, pre_scale is not None, given is not None, x.device)
    codes = torch.empty((rows, columns), dtype=form.codes, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device) if given is None else given
    form.launch((rows, 1, 1), (x, pre_scale, given, codes, scales), (columns, x.stride(0), *form.numbers))
    return codes, scales


@dataclass(frozen=True, slots=True)
class _Form:
    """The kernel for one kind of input; `numbers` are what magnitudes are divided by, the top code, the least scale."""

    launch: Launch
    codes: torch.dtype
    numbers: tuple[float, float, float]


@lru_cache(maxsize=1024)
def _form_of(quant: TensorQuant, columns: int, gated: bool, pre: bool, given: bool, device: torch.device) -> _Form:
    block = block_of(columns)
    constants = {
        "INTEGER": quant.is_integer,
        "GATED": gated,
        "PRE": pre,
        "GIVEN": given,
        "RECIPROCAL": not given and quant.scale_rule == "absmax-reciprocal",
        "HARDWARE": converts_fp8(device),
        "BLOCK": block,
    }
    # a product and a sum that become one operation would round once where the rule rounds twice
    launch = Launch(_KERNEL, constants, num_warps=warps_of(block), enable_fp_fusion=False)
    top, codes = (127.0, torch.int8) if quant.is_integer else (448.0, torch.uint8)
    return _Form(launch, codes, (divisor(quant), top, least_scale(quant)))


def block_of(columns: int) -> int:
    """Columns that a program holds of a row: the next power of two.

    At least 128: the device converts four numbers of a thread at once, and mixes them up where a thread has fewer.
    """
    return max(128, 1 << (columns - 1).bit_length())


def warps_of(block: int) -> int:
    """Measured on an H200; see docs/performance.md."""
    return max(1, min(8, block // 1024))
