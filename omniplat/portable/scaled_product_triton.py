"""Products of tokens in 8 bits with weights in 8 bits, whose scales are applied to sums: fp8 by fp8 and int8 by int8.

With scales of groups of columns (fp8 in blocks) each group is a product of its own, which the tensor cores add up in as
many bits as they keep; times the token's and the block's scale it is added to the total in f32. With scales of whole
rows there is one sum. Outputs are rounded once. The weight is the left operand: so few tokens, too, are enough for
Hopper's own instructions, which take 64 rows on that side and as few as 8 on the other. Imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch
from omniplat.portable.weight_only_triton import ExpertTiles
from omniplat.portable.word_kernels_triton import tile_tokens

#: Tiles of the weight that share the tiles of tokens while those are in the cache.
_BAND = 8
_NO_TILES = (None,) * 4


@triton.jit(do_not_specialize=["tiles_m", "M", "x_scale_stride"])
def _product(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    x,
    codes,
    x_scale,
    scale,
    bias,
    y,
    x_rows,
    tile_expert,
    tile_first,
    tile_end,
    tiles_m,
    M,
    N,
    x_scale_stride,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATHERED: tl.constexpr,
    BIAS: tl.constexpr,
    INTEGER: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
) -> None:
    STEPS: tl.constexpr = (K + BK - 1) // BK
    EVEN: tl.constexpr = K % BK == 0
    tiles_n = tl.cdiv(N, BN)
    program = tl.program_id(0)
    band = program // (BAND * tiles_m)
    width = tl.minimum(tiles_n - band * BAND, BAND)
    first_n = (band * BAND + (program % (BAND * tiles_m)) % width) * BN
    expert, m, m_inside, x_row = tile_tokens(
        (program % (BAND * tiles_m)) // width, x_rows, tile_expert, tile_first, tile_end, M, BM, EXPERTS, GATHERED
    )
    n, k = first_n + tl.arange(0, BN), tl.arange(0, BK)
    n_inside = n < N
    # what lies beyond the last row or token is read from the first instead, and never written
    x_row = tl.where(m_inside, x_row, 0)
    row = tl.where(n_inside, n, 0)
    code_at = codes + ((expert * N + row) * K)[:, None] + k[None, :]
    x_at = x + (x_row * K)[None, :] + k[:, None]
    if BLOCKS:
        # scales go through no pipeline: those of the next step are asked for a step ahead
        ONE: tl.constexpr = ROWS % BN == 0
        scale_at = scale + expert * tl.cdiv(N, ROWS) * STEPS + ((first_n if ONE else row) // ROWS) * STEPS
        x_scale_at = x_scale + x_row
        by_rows, by_tokens = tl.load(scale_at), tl.load(x_scale_at)
        total = tl.zeros([BN, BM], dtype=tl.float32)
        for step in range(STEPS):
            if EVEN:
                a, b = tl.load(code_at + step * BK), tl.load(x_at + step * BK)
            else:
                inside = step * BK + k < K
                a = tl.load(code_at + step * BK, mask=inside[None, :], other=0.0)
                b = tl.load(x_at + step * BK, mask=inside[:, None], other=0.0)
            rows, tokens = by_rows, by_tokens
            ahead = tl.minimum(step + 1, STEPS - 1)
            by_rows = tl.load(scale_at + ahead)
            by_tokens = tl.load(x_scale_at + ahead.to(tl.int64) * x_scale_stride)
            sums = tl.dot(a, b, out_dtype=tl.float32)
            if ONE:
                total += sums * (tokens * rows)[None, :]
            else:
                total += sums * tokens[None, :] * rows[:, None]
        value = total
    else:
        sums = tl.zeros([BN, BM], dtype=tl.int32 if INTEGER else tl.float32)
        for step in range(STEPS):
            if EVEN:
                a, b = tl.load(code_at + step * BK), tl.load(x_at + step * BK)
            else:
                inside = step * BK + k < K
                a = tl.load(code_at + step * BK, mask=inside[None, :], other=0.0)
                b = tl.load(x_at + step * BK, mask=inside[:, None], other=0.0)
            sums = tl.dot(a, b, sums, out_dtype=tl.int32 if INTEGER else tl.float32)
        value = sums.to(tl.float32) * tl.load(scale + expert * N + row)[:, None] * tl.load(x_scale + x_row)[None, :]
    if BIAS:
        value += tl.load(bias + expert * N + row).to(tl.float32)[:, None]
    at = y + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, value.to(y.dtype.element_ty), mask=n_inside[:, None] & m_inside[None, :])


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the weight, tokens and columns of one step, and how a program is run. Steps of weights in blocks are as
    wide as a block."""

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int


#: The largest tile of tokens. Sums of a group and the total take twice the registers of a sum alone.
MOST_TOKENS = 64
_MANY = Tile(128, MOST_TOKENS, 128, 4, 3)


@lru_cache(maxsize=4096)
def tile_of(m: int) -> Tile:
    """For `m` tokens. Not measured; for more than 32 the sizes that vLLM's tables have for its kernel of this kind, on
    an H200 (https://github.com/vllm-project/vllm/tree/v0.30.0/vllm/model_executor/layers/quantization/utils/configs)."""
    if m > 2 * MOST_TOKENS:
        return _MANY
    tokens = min(MOST_TOKENS, max(16, 1 << (m - 1).bit_length()))
    return Tile(64, tokens, 128, 4, 6 if tokens == 16 else 4)


def tile_of_experts(tokens: int) -> Tile:
    """For at most so many rows of one expert: there are tiles enough without small ones."""
    return _MANY if tokens >= MOST_TOKENS else tile_of(tokens)


def scaled_product(
    x: torch.Tensor,
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    block_rows: int,
    tile: Tile,
    tiles: ExpertTiles | None = None,
) -> None:
    """Writes `x` [M, K] times the weight's `codes` [N, K] to `y` [M, N]; all contiguous, codes float8_e4m3fn or int8.

    With `block_rows` 0 `x_scale` is f32 [M] and `scale` f32 [N]. Else a block of the weight is so many rows high and as
    wide as a step of `tile`: `x_scale` f32 [G, M], `scale` f32 [ceil(N / block_rows), G], G = ceil(K / tile.columns).
    `bias` [N] of any float dtype. With `tiles` codes, scale and bias have leading experts, and y has a row for each of
    `tiles.rows`.
    """
    m, columns = x.shape
    n = codes.shape[-2]
    tiles_m = -(-m // tile.tokens) if tiles is None else tiles.expert.shape[0]
    by_expert, gathered = tiles is not None, tiles is not None and tiles.gathered
    is_integer = codes.dtype == torch.int8
    launch = _launch_of(tile, columns, block_rows, by_expert, gathered, bias is not None, is_integer)
    launch(
        (-(-n // tile.rows) * tiles_m, 1, 1),
        (
            x,
            codes,
            x_scale,
            scale,
            bias,
            y,
            *(_NO_TILES if tiles is None else (tiles.rows, tiles.expert, tiles.first, tiles.end)),
        ),
        (tiles_m, m, n, x_scale.shape[-1]),
    )


@lru_cache(maxsize=1024)
def _launch_of(
    tile: Tile, columns: int, block_rows: int, experts: bool, gathered: bool, bias: bool, integer: bool
) -> Launch:
    constants = {
        "K": columns,
        "BLOCKS": block_rows > 0,
        "ROWS": block_rows,
        "EXPERTS": experts,
        "GATHERED": gathered,
        "BIAS": bias,
        "INTEGER": integer,
        "BN": tile.rows,
        "BM": tile.tokens,
        "BK": tile.columns,
        "BAND": _BAND,
    }
    # scaled sums are added up in one operation with their product
    return Launch(_product, constants, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True)
