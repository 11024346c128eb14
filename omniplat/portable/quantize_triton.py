"""The Triton form of `quantize_rows`: a program reads a row once and writes codes and scale.

Codes are rounded on the bits and not by a conversion, so that the result is the same on devices that have fp8
conversions, on those that have none, and under Triton's interpreter. NVIDIA's devices from sm89 on convert by
themselves, to the same bytes, and divide with a reciprocal that is corrected to the IEEE quotient. Imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch, is_nvidia
from omniplat.portable.quantize import divisor, least_scale
from omniplat.portable.rows_triton import launches_early, release_next, row_values, saturated_codes, tile_of
from omniplat.scheme import TensorQuant


@triton.jit
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
    EARLY: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    release_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    held = ()
    magnitude = tl.full([WIDTH], 0.0, tl.float32)
    for chunk in tl.static_range(CHUNKS):
        v = row_values(x + row * stride, pre, columns, chunk * WIDTH + k, GATED, PRE)
        held += (v,)  # type: ignore[assignment]
        magnitude = tl.maximum(magnitude, tl.abs(v), propagate_nan=tl.PropagateNan.ALL)
    if GIVEN:
        scale = tl.load(given)
    else:
        # As integers magnitudes have the same order, and NaN is above all of them: it is not lost.
        amax = tl.max(magnitude.to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
        scale = tl.div_rn(amax, divided_by)
        scale = tl.where(scale < least, least, scale)
        tl.store(scales + row, scale)
    is_zero = scale == 0.0
    is_finite = tl.abs(scale) < float("inf")
    safe = tl.where(is_zero, 1.0, scale)
    # Added to products: -0 leaves them what they are, 0 makes -0 to 0. As bits, for Triton's literals have one zero.
    nought = tl.broadcast_to(tl.where(is_zero, 0, -2147483648).to(tl.float32, bitcast=True), [WIDTH])
    if RECIPROCAL:
        multiplier = tl.where(is_zero, 0.0, tl.div_rn(top, tl.where(amax == 0.0, 1.0, amax)))
        multiplier = tl.broadcast_to(multiplier, [WIDTH])
    elif HARDWARE:
        # scales are brought near 1, so that nothing underflows that has a code
        size = tl.abs(safe)
        nearer = tl.where(size < 2.0**-60, 2.0**100, tl.where(size > 2.0**60, 2.0**-100, 1.0))
        inverse = tl.broadcast_to(tl.where(is_zero, 0.0, tl.div_rn(-1.0, safe * nearer)), [WIDTH])
        # quotients by Inf are 0, which no correction is to change
        divisor = tl.broadcast_to(tl.where(is_finite, safe * nearer, 0.0), [WIDTH])
    for chunk in tl.static_range(CHUNKS):
        v = held[chunk]
        if RECIPROCAL:
            scaled = tl.fma(v, multiplier, nought)
        elif HARDWARE:
            # A correctly rounded reciprocal and one step of correction give the rounded quotient (Markstein). The
            # signs are those with which -0 remains -0.
            negated = v * -nearer
            quotient = tl.fma(negated, inverse, nought)
            scaled = tl.fma(tl.fma(quotient, divisor, negated), inverse, quotient)
            if GIVEN:
                # beyond every code a quotient may be Inf, which does not survive the correction
                scaled = tl.where(tl.abs(quotient) < 65536.0, scaled, quotient)
                scaled = tl.where(is_zero, 0.0, scaled)
        else:
            scaled = tl.where(is_zero, 0.0, tl.div_rn(v, tl.broadcast_to(safe, [WIDTH])))
        if INTEGER:
            if GIVEN or RECIPROCAL:
                scaled = tl.where(scaled == scaled, scaled, 0.0)
            # 1.5 * 2^23: its unit is 1, so that the sum is rounded to nearest even, and ends in the code. A bad token
            # has no codes but 0.
            whole = (scaled + 12582912.0).to(tl.int32, bitcast=True)
            whole = tl.maximum(whole, 0x4B400000 - tl.where(is_finite, 128, 0))
            code = tl.minimum(whole, 0x4B400000 + tl.where(is_finite, 127, 0)).to(tl.int8)
        else:
            code = saturated_codes(scaled, HARDWARE)
        at = chunk * WIDTH + k
        tl.store(codes + row * columns + at, code, mask=at < columns)


@lru_cache(maxsize=64)
def converts_fp8(device: torch.device) -> bool:
    """True on NVIDIA's devices that round f32 to e4m3 themselves: nearest even, saturating."""
    return is_nvidia(device, (8, 9))


def quantize_rows(
    x: torch.Tensor,
    quant: TensorQuant,
    pre_scale: torch.Tensor | None,
    given: torch.Tensor | None,
    *,
    gated: bool = False,
    releases: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `omniplat.portable.quantize.quantize_rows`, for scales per token and static ones, in f32.

    A static scale (`given`, f32 [1, 1]) is divided by, whatever the rule. With `gated` what is quantized is
    silu(left half) * right half of each row.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, columns = x.shape
    columns = columns // 2 if gated else columns
    form = _form_of(quant, columns, gated, pre_scale is not None, given is not None, releases, x.device)
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
def _form_of(
    quant: TensorQuant, columns: int, gated: bool, pre: bool, given: bool, releases: bool, device: torch.device
) -> _Form:
    tile = tile_of(columns)
    constants = {
        "INTEGER": quant.is_integer,
        "GATED": gated,
        "PRE": pre,
        "GIVEN": given,
        "RECIPROCAL": not given and quant.scale_rule == "absmax-reciprocal",
        "HARDWARE": converts_fp8(device),
        "EARLY": releases and launches_early(device),
        "WIDTH": tile.width,
        "CHUNKS": tile.chunks,
    }
    # a product and a sum that become one operation would round once where the rule rounds twice
    launch = Launch(_rows, constants, num_warps=tile.warps, enable_fp_fusion=False)
    top, codes = (127.0, torch.int8) if quant.is_integer else (448.0, torch.uint8)
    return _Form(launch, codes, (divisor(quant), top, least_scale(quant)))
