"""The Triton form of `quantize_blocks`: a program reads some groups of a row once and writes codes and scales.

Codes of e2m1 and scales in e4m3 are rounded on the bits, so that they are the same on every device and under Triton's
interpreter. Imports triton.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch
from omniplat.portable.quantize_blocks import LEAST_SCALE, element_of, rounds_up_from
from omniplat.portable.quantize_triton import converts_fp8
from omniplat.portable.rows_triton import row_values, saturated_codes
from omniplat.scheme import TensorQuant

#: Columns of a program, which so has 16 numbers for each of its threads.
_COLUMNS, _WARPS = 1024, 2


@triton.jit
def _power_of(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    amax, BY_QUOTIENT: tl.constexpr, LARGEST: tl.constexpr, EXPONENT: tl.constexpr, HALF: tl.constexpr
):
    """int32 bytes of e8m0 for groups whose largest magnitudes have the bits `amax`, finite."""
    if BY_QUOTIENT:
        largest = tl.full(amax.shape, LARGEST, tl.float32)
        bits = tl.div_rn(amax.to(tl.float32, bitcast=True), largest).to(tl.int32, bitcast=True)
        # what lies above a power of two belongs to the next; under 2^-126 that is 2^-126 or, at the end, 2^-127
        over = (bits & 0x7FFFFF) > tl.where(bits < 0x800000, 0x400000, 0)
        field = (bits >> 23) + over.to(tl.int32)
        # the quotient is 0, but the group is not: by the rule its scale is 1, and its codes are 0
        field = tl.where((bits == 0) & (amax > 0), 127, field)
    else:
        field = tl.maximum(((amax + HALF) >> 23) - EXPONENT, 0)
    return field


@triton.jit
def _local_scale(amax, above, RULE: tl.constexpr, WIDE: tl.constexpr, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """NVFP4's group scales before they are rounded to e4m3, f32: of largest magnitudes, under the multiplier `above`.

    WIDE: `above` is f64, and what it takes part in is rounded to f32 once.
    """
    top = tl.full(amax.shape, 6.0, tl.float32)
    if RULE == "absmax-clamped":
        divided, divisor = amax, above * 6.0
    else:
        divided, divisor = tl.div_rn(amax, top), above
    if RULE == "absmax-reciprocal":
        sixth = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), top)
        if WIDE:
            local = ((amax * sixth).to(tl.float64) * (1.0 / above)).to(tl.float32)
        else:
            local = amax * sixth * tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), above)
    elif WIDE:
        local = (divided.to(tl.float64) / divisor).to(tl.float32)
    else:
        local = tl.div_rn(divided, divisor)
    if RULE == "absmax-clamped":
        local = tl.maximum(tl.where(local == 0.0, 1.0, local), LEAST)
    return local


@triton.jit
def _e4m3_values(codes):  # type: ignore[no-untyped-def]
    """f32 numbers of int32 codes of e4m3 that are not negative."""
    normal = tl.where(codes == 0x7F, 0x7FC00000, (codes << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    return tl.where(codes < 8, codes.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _quotients(v, scale, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """|v| / scale as IEEE float32, or 6 where it is more; `scale` [COUNT, 1] is positive, and may be Inf."""
    # beyond every code a quotient may be Inf, which would not survive the correction
    magnitude = tl.minimum(tl.abs(v), tl.broadcast_to(scale * 6.0, v.shape))
    if HARDWARE:
        # As in `quantize_triton`: a correctly rounded reciprocal and one step of correction give the rounded quotient
        # (Markstein); scales are brought near 1, so that nothing underflows that has a code.
        nearer = tl.where(scale < 2.0**-60, 2.0**100, tl.where(scale > 2.0**60, 2.0**-100, 1.0))
        inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale * nearer), v.shape)
        # quotients by Inf are 0, which no correction is to change
        divisor = tl.broadcast_to(tl.where(scale < float("inf"), scale * -nearer, 0.0), v.shape)
        near = magnitude * nearer
        quotient = near * inverse
        quotient = tl.fma(tl.fma(quotient, divisor, near), inverse, quotient)
    else:
        quotient = tl.div_rn(magnitude, tl.broadcast_to(scale, v.shape))
    return quotient


@triton.jit
def _e2m1_codes(magnitude, v):  # type: ignore[no-untyped-def]
    """int32 codes 0..15, to nearest even, of f32 magnitudes up to 6 with the signs of `v`."""
    # e2m1's spacing is half of the power of two below a value, or of 1 if that is larger. A sum with 3 * 2^22 spacings
    # is rounded to multiples of one, to nearest even, and ends in their number; codes rise by 2 with every power.
    power = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    many = tl.full(v.shape, 6291456.0, tl.float32)
    total = tl.fma(power.to(tl.float32, bitcast=True), many, magnitude).to(tl.int32, bitcast=True)
    return (total - power - 0xB400000) + ((power >> 22) - 254) + ((v.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit(do_not_specialize=["step"])
def _groups(  # type: ignore[no-untyped-def]
    x,
    pre,
    above,
    codes,
    scales,
    columns,
    stride,
    step,
    RULE: tl.constexpr,
    LARGEST: tl.constexpr,
    EXPONENT: tl.constexpr,
    HALF: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    GATED: tl.constexpr,
    PRE: tl.constexpr,
    POWERS: tl.constexpr,
    PACKED: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    v = row_values(x + row * stride, pre, columns, k, GATED, PRE)
    # As integers magnitudes have the same order, and NaN is above all of them: it is not lost.
    most = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    is_finite = most < 0x7F800000
    most = tl.where(is_finite, most, 0)
    if POWERS:
        field = _power_of(most, RULE == "ceil", LARGEST, EXPONENT, HALF)
        stored = tl.where(is_finite, field, 255)
        counts = is_finite
        scaled = v * ((254 - field) << 23).to(tl.float32, bitcast=True)[:, None]
        magnitude = tl.minimum(tl.abs(scaled), 6.0)
    else:
        multiplier = tl.broadcast_to(tl.load(above + row * step), [COUNT])
        local = _local_scale(most.to(tl.float32, bitcast=True), multiplier, RULE, WIDE, LEAST_SCALE)
        # one NaN for all of them: the sign of 0 times Inf depends on the processor
        local = tl.where(is_finite & (local == local), local, float("nan"))
        stored = saturated_codes(local, False).to(tl.int32)
        if RULE == "absmax-reciprocal":
            scale = _e4m3_values(stored) * multiplier.to(tl.float32)
        else:
            scale = (_e4m3_values(stored) * multiplier).to(tl.float32)
        # values of a group whose scale is 0 are lost, as are those beside a NaN
        counts = scale > 0.0
        safe = tl.where(counts, scale, 1.0)
        if RULE == "absmax-reciprocal":
            scaled = v * tl.div_rn(tl.full([COUNT], 1.0, tl.float32), safe)[:, None]
            magnitude = tl.minimum(tl.abs(scaled), 6.0)
        else:
            magnitude = _quotients(v, safe[:, None], HARDWARE)
    groups = columns // GROUP
    tl.store(scales + row * groups + group, stored.to(tl.uint8), mask=group < groups)
    if PACKED:
        code = _e2m1_codes(magnitude, v)
        if RULE == "absmax-reciprocal":
            # 0 times an Inf
            code = tl.where(scaled == scaled, code, 8)
        # eight codes of a thread make a word
        eight = tl.reshape(code, [COUNT, GROUP // 8, 8]) << (tl.arange(0, 8) * 4)[None, None, :]
        word = tl.where(counts[:, None], tl.sum(eight, axis=2), 0)
        at = group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
        tl.store(codes + row * (columns // 8) + at, word, mask=at < columns // 8)
    else:
        code = tl.where(counts[:, None], saturated_codes(scaled, HARDWARE), 0).to(tl.uint8)
        tl.store(codes + row * columns + k, code, mask=k < columns)


def quantize_blocks(
    x: torch.Tensor,
    quant: TensorQuant,
    pre_scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    *,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `omniplat.portable.quantize_blocks.quantize_blocks`. With `gated` what is quantized is silu(left half) * right
    half of each row, computed in f32 and not rounded."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, columns = x.shape
    columns = columns // 2 if gated else columns
    packed = quant.element == "fp4_e2m1"
    codes = torch.empty((rows, columns // 2 if packed else columns), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, columns // quant.group_size), dtype=torch.uint8, device=x.device)
    is_wide = global_scale is not None and global_scale.dtype == torch.float64
    step = 0 if global_scale is None or global_scale.shape[0] == 1 else global_scale.stride(0)
    _launch_of(quant, gated, pre_scale is not None, is_wide, x.device)(
        (rows, -(-columns // _COLUMNS), 1),
        (x, pre_scale, global_scale, codes.view(torch.int32) if packed else codes, scales),
        (columns, x.stride(0), step),
    )
    return codes, scales


#: rules of one meaning -> the one that the kernel knows
_RULES = {"rceil": "ceil", "": "absmax", "half-range": "absmax"}


@lru_cache(maxsize=256)
def _launch_of(quant: TensorQuant, gated: bool, pre: bool, wide: bool, device: torch.device) -> Launch:
    largest, exponent, _ = element_of(quant)
    constants = {
        "RULE": _RULES.get(quant.scale_rule, quant.scale_rule),
        "LARGEST": largest,
        "EXPONENT": exponent,
        "HALF": rounds_up_from(quant),
        "LEAST_SCALE": LEAST_SCALE,
        "GATED": gated,
        "PRE": pre,
        "POWERS": quant.scale_format == "e8m0",
        "PACKED": quant.element == "fp4_e2m1",
        "WIDE": wide,
        "HARDWARE": converts_fp8(device),
        "GROUP": quant.group_size,
        "COUNT": _COLUMNS // quant.group_size,
    }
    # a product and a sum that become one operation would round once where the rule rounds twice
    return Launch(_groups, constants, num_warps=_WARPS, enable_fp_fusion=False)
