"""The Triton form of `regroup_rows`: one program per row reads it once and writes codes and scale. Imports triton."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch
from omniplat.portable.mx_grid import GROUP, HEADROOM, LEAST_EXPONENT
from omniplat.portable.quantize_triton import block_of, converts_fp8, warps_of
from omniplat.scheme import TensorQuant

#: In place of the exponents of a token's groups: below all of them, where they are all zeros; and above, where one is
#: not finite.
_NOTHING, _BAD = -1000, 1000


def _rows(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    x,
    pre,
    codes,
    scales,
    columns,
    stride,
    RULE: tl.constexpr,
    GATED: tl.constexpr,
    PRE: tl.constexpr,
    HARDWARE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADROOM: tl.constexpr,
    LEAST: tl.constexpr,
    NOTHING: tl.constexpr,
    BAD: tl.constexpr,
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
    groups = tl.reshape(v, [BLOCK // GROUP, GROUP])
    # As integers magnitudes have the same order, and NaN is above all of them: it is not lost.
    amax = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = amax < 0x7F800000
    if RULE == "ceil":
        # least e with amax <= 6 * 2^e, of the quotient rounded to f32
        quotient = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full([BLOCK // GROUP], 6.0, tl.float32))
        bits = quotient.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127 + tl.where((bits & 0x7FFFFF) > 0, 1, 0)
    elif RULE == "even":
        exponent = ((amax + 0x200000) >> 23) - 129
    else:
        exponent = (amax >> 23) - 129
    exponent = tl.where(amax == 0, -127, tl.minimum(tl.maximum(exponent, -127), 127))
    exponent = tl.where(finite, exponent, 0)
    # 2^-exponent; its reciprocal 2^-127 is subnormal, which these units multiply by exactly enough: only values from
    # 2^125 on meet it
    up = tl.where(exponent < 127, (127 - exponent) << 23, 0x400000).to(tl.float32, bitcast=True)
    # of the group's largest value: 0.25 is rounded to 0
    occupied = amax.to(tl.float32, bitcast=True) * up > 0.25
    top = tl.where(finite, tl.where(occupied, exponent, NOTHING), BAD)
    top = tl.max(top, axis=0)
    shift = tl.where(top == NOTHING, 0, tl.maximum(top, LEAST) - HEADROOM)
    scale = tl.where(top == BAD, float("nan"), ((shift + 127) << 23).to(tl.float32, bitcast=True))
    tl.store(scales + row, scale)
    scaled = groups * up[:, None]
    magnitude = tl.minimum(tl.abs(scaled), 6.0)
    # The power of two below, at least 1, times 1.5 * 2^22: a number whose unit is e2m1's spacing there. It is added and
    # taken away again.
    power = (tl.maximum(magnitude, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    grid = tl.fma(power, -6291456.0, tl.fma(power, 6291456.0, magnitude))
    # codes below 2^-10 are rounded to 0 whatever their exponent: 2^-126 stands for all of those
    down = tl.maximum(exponent - shift, -126)
    value = grid * ((down + 127) << 23).to(tl.float32, bitcast=True)[:, None]
    sign = scaled.to(tl.int32, bitcast=True) & -0x80000000
    if HARDWARE:
        signed = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        code = signed.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        pattern = value.to(tl.int32, bitcast=True)
        above = ((pattern + 0x7FFFF + ((pattern >> 20) & 1)) >> 20) - 960
        # 2^14: its unit is 2^-9, the spacing of e4m3's subnormals
        below = (value + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = (tl.where(value < 0.015625, below, above) | ((sign >> 24) & 0x80)).to(tl.uint8)
    codes_at = codes + row * columns + k
    if top == BAD:
        tl.store(codes_at, tl.zeros([BLOCK], tl.uint8), mask=inside)
    else:
        tl.store(codes_at, tl.reshape(code, [BLOCK]), mask=inside)


_KERNEL: Any = triton.jit(_rows)
_RULES = {"": "floor", "floor": "floor", "even": "even", "even-m1": "even", "ceil": "ceil", "rceil": "ceil"}


def regroup_rows(
    x: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None, *, gated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `omniplat.portable.mx_grid.regroup_rows`; of silu(left half) * right half of each row with `gated`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, columns = x.shape
    columns = columns // 2 if gated else columns
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    _launch_of(quant, columns, gated, pre_scale is not None, x.device)(
        (rows, 1, 1), (x, pre_scale, codes, scales), (columns, x.stride(0))
    )
    return codes, scales


@lru_cache(maxsize=1024)
def _launch_of(quant: TensorQuant, columns: int, gated: bool, pre: bool, device: torch.device) -> Launch:
    block = block_of(columns)
    constants = {
        "RULE": _RULES[quant.scale_rule],
        "GATED": gated,
        "PRE": pre,
        "HARDWARE": converts_fp8(device),
        "GROUP": GROUP,
        "HEADROOM": HEADROOM,
        "LEAST": LEAST_EXPONENT,
        "NOTHING": _NOTHING,
        "BAD": _BAD,
        "BLOCK": block,
    }
    # a product and a sum that become one operation would round once where the rule rounds twice
    return Launch(_KERNEL, constants, num_warps=warps_of(block), enable_fp_fusion=False)
