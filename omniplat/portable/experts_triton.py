"""What lies beside the products of a layer of experts, in Triton: the gated activation, quantized in the same pass, and
the weighted sum over the experts of a token. Imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omniplat.portable.quantize_triton import converts_fp8


@triton.jit
def _silu_quantize(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    both, codes, scales, columns, HARDWARE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < columns
    gate = tl.load(both + row * 2 * columns + k, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * columns + columns + k, mask=inside, other=0.0).to(tl.float32)
    v = gate / (1.0 + tl.exp(-gate)) * up
    magnitude = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, 448.0)
    tl.store(scales + row, scale)
    scaled = v * tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale))
    absolute = tl.minimum(tl.abs(scaled), 448.0)
    if HARDWARE:
        code = absolute.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        pattern = absolute.to(tl.int32, bitcast=True)
        above = ((pattern + 0x7FFFF + ((pattern >> 20) & 1)) >> 20) - 960
        below = (absolute + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(absolute < 0.015625, below, above)
    code = code | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)
    tl.store(codes + row * columns + k, code.to(tl.uint8), mask=inside)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    out, place, weights, y, columns, held, SLOTS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < columns
    limit = tl.load(held)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        at = tl.load(place + token * SLOTS + slot).to(tl.int64)
        # rows that no expert here computed are not read: what lies there is nothing
        value = tl.load(out + at * columns + k, mask=inside & (at < limit), other=0.0).to(tl.float32)
        total += value * tl.load(weights + token * SLOTS + slot)
    tl.store(y + token * columns + k, total.to(y.dtype.element_ty), mask=inside)


def silu_quantize(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of `both` [M, 2I], gate first, contiguous, to bytes of e4m3 [M, I] and scales f32 [M, 1].

    One scale per token, amax / 448. Values are computed in f32 and divided by the scale through its reciprocal: a code
    may differ from the oracle's where a quotient lies within two units of float32 of a tie.
    """
    rows, columns = len(both), both.shape[1] // 2
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=both.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=both.device)
    block = max(128, triton.next_power_of_2(columns))
    _silu_quantize[(rows,)](
        both,
        codes,
        scales,
        columns,
        HARDWARE=converts_fp8(both.device),
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return codes, scales


def combine(
    out: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, held: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Sum over slots of weights [M, T] (f32) times rows `place` [M, T] of `out` [R, K], in f32, to [M, K] in `dtype`.

    Rows from `held` (one int32) on count as 0 and are not read.
    """
    tokens, slots = place.shape
    columns = out.shape[1]
    y = torch.empty((tokens, columns), dtype=dtype, device=out.device)
    _combine[(tokens, triton.cdiv(columns, 1024))](
        out, place, weights, y, columns, held, SLOTS=slots, BLOCK=1024, num_warps=4
    )
    return y
