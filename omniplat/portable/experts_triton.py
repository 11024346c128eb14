"""What lies beside the products of a layer of experts, in Triton: tiles of tokens by expert, the gated activation, and
the weighted sum over the experts of a token. Imports triton."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch
from omniplat.portable.weight_only_triton import (
    ExpertTiles,
    least_tokens,
    tile_of_experts,
    weight_only_product,
)
from omniplat.portable.word_decode_triton import kind_of_zero
from omniplat.portable.word_weights import WordForm
from omniplat.runtime.activate import activate

#: Columns of one program.
_COLUMNS = 1024


@triton.jit
def _silu_and_mul(both, hidden, columns, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < columns
    gate = tl.load(both + row * 2 * columns + k, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * columns + columns + k, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(hidden + row * columns + k, value.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    out, place, weights, y, held, columns, SLOTS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < columns
    limit = tl.load(held)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        at = tl.load(place + token * SLOTS + slot).to(tl.int64)
        # rows that no expert here computed are not read: what lies there is nothing
        value = tl.load(
            out + at * columns + k, mask=inside & (at + tl.zeros([BLOCK], dtype=tl.int64) < limit), other=0.0
        ).to(tl.float32)
        total += value * tl.load(weights + token * SLOTS + slot).to(tl.float32)
    tl.store(y + token * columns + k, total.to(y.dtype.element_ty), mask=inside)


_SILU_AND_MUL = Launch(_silu_and_mul, {"BLOCK": _COLUMNS}, num_warps=4)


@lru_cache(maxsize=64)
def _combine_of(slots: int) -> Launch:
    return Launch(_combine, {"SLOTS": slots, "BLOCK": _COLUMNS}, num_warps=4)


def silu_and_mul(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of `both` [R, 2I], gate first, contiguous: [R, I], computed in f32, rounded once."""
    rows, columns = len(both), both.shape[1] // 2
    hidden = torch.empty((rows, columns), dtype=both.dtype, device=both.device)
    _SILU_AND_MUL((rows, -(-columns // _COLUMNS), 1), (both, hidden), (columns,))
    return hidden


def activated(both: torch.Tensor, activation: str, limit: float, alpha: float) -> torch.Tensor:
    """What w2 takes of `both` [R, 2I], gate first, contiguous: [R, I] in its dtype; see `omniplat.runtime.activate`."""
    if activation == "silu" and not limit:
        return silu_and_mul(both)
    gate, up = both.to(torch.float32).chunk(2, dim=1)
    return activate(gate, up, activation, limit, alpha).to(both.dtype)


def combine(
    out: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, held: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Sum over slots of weights [M, T] times rows `place` [M, T] of `out` [R, K], in f32, to [M, K] in `dtype`.

    Rows from `held` (one int32) on count as 0 and are not read.
    """
    tokens, slots = place.shape
    columns = out.shape[1]
    y = torch.empty((tokens, columns), dtype=dtype, device=out.device)
    _combine_of(slots)((tokens, -(-columns // _COLUMNS), 1), (out, place, weights.contiguous(), y, held), (columns,))
    return y


def tokens_of(rows: int, experts: int, device: torch.device) -> int:
    """Rows of a tile for `rows` pairs of a token and an expert: half as many again as an expert has on average, since a
    second tile of an expert decodes its weight anew."""
    each = -(-3 * rows // (2 * experts))
    return min(128, max(least_tokens(device), 1 << (each - 1).bit_length()))


def in_place(tiles: ExpertTiles) -> ExpertTiles:
    """The same tiles over rows that are sorted already."""
    return replace(tiles, gathered=False)


def product(x: torch.Tensor, buffers: list[torch.Tensor | None], form: WordForm, tiles: ExpertTiles) -> torch.Tensor:
    """Rows `tiles.rows` of `x` [M, K] by their expert's weight, [R, N] in x's dtype; rows of no expert hold anything.

    `buffers` are words, scale, zero, row_scale, table and bias, with leading experts but for table.
    """
    words, scale, zero, row_scale, table, bias = buffers
    assert words is not None
    assert scale is not None
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty((len(tiles.rows), form.out_features), dtype=x.dtype, device=x.device)
    tile = tile_of_experts(tiles.tokens, form, x.dtype, kind_of_zero(zero), x.device)
    weight_only_product(x, words, table, scale, zero, row_scale, bias, y, form, tile, tiles)
    return y
