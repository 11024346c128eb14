"""The Triton form of `quantize_groups`: a program reads some groups of a row once and writes codes and scales.

Imports triton.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch
from omniplat.portable.quantize import least_scale
from omniplat.portable.quantize_groups import GROUP
from omniplat.portable.quantize_triton import converts_fp8
from omniplat.portable.rows_triton import row_values, saturated_codes
from omniplat.scheme import TensorQuant

#: Groups of a program, which so has 16 numbers for each of its threads.
_COUNT, _WARPS = 8, 2


@triton.jit(do_not_specialize=["rows"])
def _groups(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    x,
    pre,
    codes,
    scales,
    rows,
    columns,
    stride,
    least,
    GATED: tl.constexpr,
    PRE: tl.constexpr,
    POWERS: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    HARDWARE: tl.constexpr,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    v = row_values(x + row * stride, pre, columns, k, GATED, PRE)
    # As integers magnitudes have the same order, and NaN is above all of them: it is not lost.
    amax = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    if POWERS:
        bits = tl.div_rn(amax, tl.full([COUNT], 448.0, tl.float32)).to(tl.int32, bitcast=True)
        # what lies above a power of two belongs to the next; under 2^-126 that is 2^-126 or, at the end, 2^-127
        over = (bits & 0x7FFFFF) > tl.where(bits < 0x800000, 0x400000, 0)
        field = (bits >> 23) + over.to(tl.int32)
        # the quotient is 0, but the group is not: by the rule its scale is 1, and its codes are 0
        field = tl.where((bits == 0) & (amax > 0.0), 127, field)
        scale = tl.where(field == 0, 0x400000, field << 23).to(tl.float32, bitcast=True)
        scale = tl.where(amax < float("inf"), scale, float("nan"))
        inverse = ((254 - field) << 23).to(tl.float32, bitcast=True)
        scaled = v * inverse[:, None]
    else:
        scale = tl.div_rn(amax, tl.full([COUNT], 448.0, tl.float32))
        scale = tl.where(scale < least, least, scale)
        is_zero = scale == 0.0
        if RECIPROCAL:
            multiplier = tl.div_rn(tl.full([COUNT], 448.0, tl.float32), tl.where(amax == 0.0, 1.0, amax))
            scaled = tl.where(is_zero[:, None], 0.0, v * multiplier[:, None])
        elif HARDWARE:
            # As in `quantize_triton`: a correctly rounded reciprocal and one step of correction give the rounded
            # quotient (Markstein); scales are brought near 1, so that nothing underflows that has a code, and the
            # signs are those with which -0 remains -0.
            safe = tl.where(is_zero, 1.0, scale)
            nearer = tl.where(safe < 2.0**-60, 2.0**100, tl.where(safe > 2.0**60, 2.0**-100, 1.0))
            inverse = tl.where(is_zero, 0.0, tl.div_rn(tl.full([COUNT], -1.0, tl.float32), safe * nearer))
            divisor = tl.where(scale < float("inf"), safe * nearer, 0.0)
            nought = tl.where(is_zero, 0, -2147483648).to(tl.float32, bitcast=True)
            negated = v * -nearer[:, None]
            shape: tl.constexpr = [COUNT, GROUP]
            inverses = tl.broadcast_to(inverse[:, None], shape)
            quotient = tl.fma(negated, inverses, tl.broadcast_to(nought[:, None], shape))
            rest = tl.fma(quotient, tl.broadcast_to(divisor[:, None], shape), negated)
            scaled = tl.fma(rest, inverses, quotient)
        else:
            safe = tl.where(is_zero, 1.0, scale)
            quotient = tl.div_rn(v, tl.broadcast_to(safe[:, None], [COUNT, GROUP]))
            scaled = tl.where(is_zero[:, None], 0.0, quotient)
    code = saturated_codes(scaled, HARDWARE)
    tl.store(codes + row * columns + k, code, mask=k < columns)
    tl.store(scales + group.to(tl.int64) * rows + row, scale, mask=group * GROUP < columns)


def quantize_groups(
    x: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None, *, gated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `omniplat.portable.quantize_groups.quantize_groups`. With `gated` what is quantized is silu(left half) * right
    half of each row."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, columns = x.shape
    columns = columns // 2 if gated else columns
    groups = -(-columns // GROUP)
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    scales = torch.empty((groups, rows), dtype=torch.float32, device=x.device)
    launch = _launch_of(quant, gated, pre_scale is not None, x.device)
    launch(
        (rows, -(-groups // _COUNT), 1),
        (x, pre_scale, codes, scales),
        (rows, columns, x.stride(0), least_scale(quant)),
    )
    return codes, scales


@lru_cache(maxsize=256)
def _launch_of(quant: TensorQuant, gated: bool, pre: bool, device: torch.device) -> Launch:
    constants = {
        "GATED": gated,
        "PRE": pre,
        "POWERS": quant.scale_format == "e8m0",
        "RECIPROCAL": quant.scale_rule == "absmax-reciprocal",
        "HARDWARE": converts_fp8(device),
        "GROUP": GROUP,
        "COUNT": _COUNT,
    }
    # a product and a sum that become one operation would round once where the rule rounds twice
    return Launch(_groups, constants, num_warps=_WARPS, enable_fp_fusion=False)
