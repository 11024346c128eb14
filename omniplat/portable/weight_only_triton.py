"""The Triton form of `weight_only_product`: which tile for how many tokens, and the call. Imports triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from omniplat.portable.launch import Launch
from omniplat.portable.word_decode_triton import computes_in_pairs, constants_of, kind_of_zero
from omniplat.portable.word_kernels_triton import few_tokens, many_tokens
from omniplat.portable.word_weights import WordForm
from omniplat.portable.words import TABLES, parts_of

#: Tiles of the weight that share the tiles of tokens while those are in the cache.
_BAND = 8
_NO_TILES = (None,) * 4


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Which rows of which expert each tile of tokens has: int32.

    `rows` [R], sorted by expert, are rows of x; tile t has those from `first[t]` up to `end[t]`, of `expert[t]`, and
    at most `tokens` of them.
    """

    rows: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    tokens: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the weight and tokens of one program, and how it is run.

    `slices` of K are shared among the warps of a program, which take `unroll` blocks of words at a time. With 0
    slices it is for many tokens.
    """

    rows: int
    tokens: int
    slices: int
    warps: int
    stages: int
    unroll: int = 1


@lru_cache(maxsize=4096)
def tile_of(m: int, form: WordForm, fold: bool, least: int = 16) -> Tile:
    """For `m` tokens. Measured on an H200; see docs/performance.md. `least`: tokens of the smallest tile, see
    `least_tokens`."""
    tokens = max(least, 1 << (m - 1).bit_length())
    if m > 64:
        return _tile_of_many(128, fold)
    if form.out_features >= 8192:
        # codes of tables take so many instructions that smaller tiles share them better
        return Tile(32, tokens, 4, 4, 3) if m <= 8 or form.element in TABLES else Tile(64, tokens, 4, 4, 2)
    # Few programs wait for memory, and have the room to ask for more of it.
    short_blocks = parts_of(form.bits) * form.depth == 64
    return Tile(32, tokens, 4, 4, 4 if m <= 16 else 2, 2 if short_blocks and m <= 8 else 1)


def tile_of_experts(tokens: int, fold: bool) -> Tile:
    """The same for the rows of one expert, at most `tokens` of them: there are tiles enough without small ones."""
    return Tile(64, tokens, 4, 4, 2) if tokens <= 16 else _tile_of_many(tokens, fold)


def _tile_of_many(tokens: int, fold: bool) -> Tile:
    return Tile(128 if fold else 64, tokens, 0, 4, 3)


def least_tokens(device: torch.device) -> int:
    """Tokens of the smallest tile that a product takes."""
    return 8 if computes_in_pairs(device) else 16


def folds(form: WordForm, dtype: torch.dtype) -> bool:
    """True where scales go into the weight before the product: bf16 holds them, and their products with these codes,
    exactly."""
    return dtype == torch.bfloat16 and form.is_packed


def _shared(form: WordForm, zero_kind: str) -> int:
    """Consecutive parts of a block that share a scale, and whose products are added up before it."""
    counts = [count for count in (4, 2) if count <= parts_of(form.bits) and form.group % (count * form.depth) == 0]
    return 1 if zero_kind == "fraction" or not counts else counts[0]


def weight_only_product(
    x: torch.Tensor,
    words: torch.Tensor,
    table: torch.Tensor | None,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    form: WordForm,
    tile: Tile,
    tiles: ExpertTiles | None = None,
) -> None:
    """Writes `x` [M, K], bf16 or f16, times the weight of N rows to `y` [M, N]. Columns of x lie side by side.

    With `tiles` every buffer but `table` has leading experts, and y a row for each of `tiles.rows`.
    """
    m, columns = x.shape
    n = form.out_features
    tiles_n, tiles_m = -(-n // tile.rows), -(-m // tile.tokens) if tiles is None else tiles.expert.shape[0]
    launch = _launch_of(
        form,
        tile,
        columns,
        x.dtype,
        kind_of_zero(zero),
        row_scale is not None,
        bias is not None,
        tiles is not None,
        x.device,
    )
    scale_stride = scale.shape[-1]
    launch(
        (tiles_n, tiles_m, 1) if tile.slices else (tiles_n * tiles_m, 1, 1),
        (
            x,
            words,
            table,
            scale,
            zero,
            row_scale,
            bias,
            y,
            *(_NO_TILES if tiles is None else (tiles.rows, tiles.expert, tiles.first, tiles.end)),
        ),
        (tiles_m, m, n, x.stride(0), words.stride(-2), scale_stride, scale_stride * scale.shape[-2]),
    )


@lru_cache(maxsize=4096)
def _launch_of(
    form: WordForm,
    tile: Tile,
    columns: int,
    dtype: torch.dtype,
    zero: str,
    row_scale: bool,
    bias: bool,
    experts: bool,
    device: torch.device,
) -> Launch:
    bf16 = dtype == torch.bfloat16
    fold = folds(form, dtype)
    own = {"SLICES": tile.slices, "UNROLL": tile.unroll} if tile.slices else {"BAND": _BAND}
    block = parts_of(form.bits) * form.depth
    constants = {
        **constants_of(form, bf16, zero, fold, device),
        "K": columns,
        "EXPERTS": experts,
        "SHARED": _shared(form, zero),
        "FOLD": fold,
        "ROW_SCALE": row_scale,
        "BIAS": bias,
        "EVEN": columns % (block * max(1, tile.slices) * tile.unroll) == 0,
        "BF16": bf16,
        # The interpreter multiplies the bits of bf16 numbers, not their values.
        "WIDE": device.type == "cpu",
        "BN": tile.rows,
        "BM": tile.tokens,
        **own,
    }
    kernel = few_tokens if tile.slices else many_tokens
    return Launch(kernel, constants, num_warps=tile.warps, num_stages=tile.stages)
