"""The Triton form of `regroup_rows`: a program reads a row once and writes codes and scale. Imports triton."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch
from omniplat.portable.mx_grid import GROUP, HEADROOM, LEAST_EXPONENT
from omniplat.portable.quantize_triton import converts_fp8
from omniplat.portable.rows_triton import e4m3_codes, launches_early, release_next, row_values, tile_of
from omniplat.scheme import TensorQuant


@triton.jit
def _exponent_of(amax, RULE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Exponents, at least -127, of groups of e2m1 whose largest magnitudes have the bits `amax`."""
    if RULE == "ceil":
        # least e with amax <= 6 * 2^e, of the quotient rounded to f32
        quotient = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full(amax.shape, 6.0, tl.float32))
        bits = quotient.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127 + tl.where((bits & 0x7FFFFF) > 0, 1, 0)
    elif RULE == "even":
        exponent = ((amax + 0x200000) >> 23) - 129
    else:
        exponent = (amax >> 23) - 129
    return tl.maximum(exponent, -127)


@triton.jit
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
    EARLY: tl.constexpr,
    GROUP: tl.constexpr,
    HEADROOM: tl.constexpr,
    LEAST: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    GROUPS: tl.constexpr = WIDTH // GROUP
    release_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    held = ()
    largest = ()
    across = tl.full([GROUPS], 0, tl.int32)
    for chunk in tl.static_range(CHUNKS):
        v = row_values(x + row * stride, pre, columns, chunk * WIDTH + k, GATED, PRE)
        v = tl.reshape(v, [GROUPS, GROUP])
        # As integers magnitudes have the same order, and NaN is above all of them: it is not lost.
        amax = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        held += (v,)  # type: ignore[assignment]
        largest += (amax,)  # type: ignore[assignment]
        across = tl.maximum(across, amax)
    most = tl.max(across, axis=0)
    is_finite = most < 0x7F800000
    # Exponents rise with magnitudes: the token's is that of its largest. Up to 2^-129, a quarter of the least scale of
    # a group, all values are rounded to 0, and a token of those is scaled by 1.
    shift = tl.where(most > 0x100000, tl.maximum(_exponent_of(most, RULE), LEAST) - HEADROOM, 0)
    shift = tl.where(is_finite, shift, 0)
    tl.store(scales + row, tl.where(is_finite, (shift + 127) << 23, 0x7FC00000).to(tl.float32, bitcast=True))
    down = tl.broadcast_to(((127 - shift) << 23).to(tl.float32, bitcast=True), [GROUPS, GROUP])
    # Added to the bits of a power of two it makes them 1.5 * 2^22 times as much, in the token's scale.
    raised = ((22 - shift) << 23) + 0x400000
    for chunk in tl.static_range(CHUNKS):
        v = held[chunk]
        # groups whose scale is 2^-14 or less in the token's are 0 in all codes, however they are rounded
        exponent = tl.maximum(_exponent_of(largest[chunk], RULE), shift - 14)
        # e2m1's spacing is half of the power of two below a value, or of the group's scale if that is larger. A sum
        # with 3 * 2^22 spacings is rounded to multiples of one, to nearest even.
        bits = v.to(tl.int32, bitcast=True)  # type: ignore[var-annotated]
        units = tl.maximum((bits & 0x7F800000) + raised, (((exponent + 127) << 23) + raised)[:, None])
        units = units.to(tl.float32, bitcast=True)
        # a bad token has no codes but 0
        limit = tl.where(is_finite, ((exponent - shift + 129) << 23) + 0x400000, 0).to(tl.float32, bitcast=True)
        value = tl.minimum(tl.abs(tl.fma(v, down, units) - units), limit[:, None])
        sign = bits & tl.where(is_finite, -2147483648, 0)
        if HARDWARE:
            value = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
            code = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            code = tl.where(is_finite, e4m3_codes(value) | ((sign >> 24) & 0x80), 0).to(tl.uint8)
        at = chunk * WIDTH + k
        tl.store(codes + row * columns + at, tl.reshape(code, [WIDTH]), mask=at < columns)


_RULES = {"": "floor", "floor": "floor", "even": "even", "even-m1": "even", "ceil": "ceil", "rceil": "ceil"}


def regroup_rows(
    x: torch.Tensor,
    quant: TensorQuant,
    pre_scale: torch.Tensor | None,
    *,
    gated: bool = False,
    releases: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `omniplat.portable.mx_grid.regroup_rows`; of silu(left half) * right half of each row with `gated`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, columns = x.shape
    columns = columns // 2 if gated else columns
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    _launch_of(quant, columns, gated, pre_scale is not None, releases, x.device)(
        (rows, 1, 1), (x, pre_scale, codes, scales), (columns, x.stride(0))
    )
    return codes, scales


@lru_cache(maxsize=1024)
def _launch_of(
    quant: TensorQuant, columns: int, gated: bool, pre: bool, releases: bool, device: torch.device
) -> Launch:
    tile = tile_of(columns)
    constants = {
        "RULE": _RULES[quant.scale_rule],
        "GATED": gated,
        "PRE": pre,
        "HARDWARE": converts_fp8(device),
        "EARLY": releases and launches_early(device),
        "GROUP": GROUP,
        "HEADROOM": HEADROOM,
        "LEAST": LEAST_EXPONENT,
        "WIDTH": tile.width,
        "CHUNKS": tile.chunks,
    }
    # a product and a sum that become one operation would round once where the rule rounds twice
    return Launch(_rows, constants, num_warps=tile.warps, enable_fp_fusion=False)
