"""The Triton form of `weight_only_product`: which tile for how many tokens, and the call. Imports triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from omniplat.portable.declared import meets
from omniplat.portable.launch import Launch, is_tested
from omniplat.portable.word_decode_triton import computes_in_pairs, constants_of, kind_of_zero
from omniplat.portable.word_kernels_triton import few_tokens, many_tokens
from omniplat.portable.word_weights import WordForm
from omniplat.portable.words import DEPTH, TABLES, parts_of
from omniplat.portable.words_ptx import place_of_zero

#: Tiles of the weight that share the tiles of tokens while those are in the cache.
_BAND = 8
_NO_TILES = (None,) * 4


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Which rows of which expert each tile of tokens has.

    `rows` int64 [R], sorted by expert, are rows of x; tile t has those from `first[t]` up to `end[t]`, of `expert[t]`,
    and at most `tokens` of them; all int32. Unless `gathered`, x has a row for each of `rows`, sorted as they are.
    """

    rows: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    tokens: int
    gathered: bool = True


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


@dataclass(frozen=True, slots=True)
class FragmentTile:
    """The same of `omniplat.portable.word_fragments_gluon`: each of the `warps` takes a slice of K.

    `ahead`: units of columns whose words are on their way; `tokens_ahead`: those of the next unit are, too.
    `registers`: that a thread may have at most; the compiler's choice with 0.
    """

    rows: int
    tokens: int
    warps: int
    ahead: int
    tokens_ahead: bool
    registers: int = 0


def _tiles(*tiles: tuple[int, int, int, int, bool, int]) -> tuple[FragmentTile, ...]:
    return tuple(FragmentTile(*tile) for tile in tiles)


#: (kind of weight, whether it has 8192 rows or more) -> tiles for up to 8, 16, 32 and 64 tokens, which may take
#: several. Kinds: numbers of a table; those whose parts have two scales; of 4 or 8 bits with packed scales, which go
#: into the weight, with zero points, and others. Measured on an H200 (`benchmarks/cuda_tiles.py`). How many registers a
#: thread may have decides in which order the compiler puts loads, and counts for as much as the tile.
FRAGMENT_TILES = {
    ("table", True): _tiles((16, 8, 4, 2, False, 168), (16, 16, 4, 1, False, 128), (48, 32, 4, 1, False, 0),
                            (32, 32, 4, 1, False, 0)),
    ("table", False): _tiles((16, 8, 8, 1, False, 168), (16, 16, 8, 1, False, 128), (32, 32, 8, 1, False, 0),
                             (32, 32, 4, 1, False, 0)),
    ("halves", True): _tiles((16, 8, 4, 2, False, 0), (32, 16, 4, 2, False, 0), (32, 32, 4, 1, False, 0),
                             (48, 64, 4, 1, False, 0)),
    ("halves", False): _tiles((16, 8, 8, 2, False, 168), (16, 16, 8, 1, False, 128), (32, 32, 8, 1, False, 0),
                              (32, 32, 4, 1, False, 0)),
    ("packed 4", True): _tiles((16, 8, 4, 2, False, 0), (32, 16, 4, 2, True, 0), (48, 32, 4, 1, True, 0),
                               (48, 64, 4, 1, False, 0)),
    ("packed 4", False): _tiles((16, 8, 8, 1, True, 168), (16, 16, 8, 1, True, 128), (32, 32, 8, 1, False, 0),
                                (32, 32, 4, 1, False, 168)),
    ("4", True): _tiles((16, 8, 4, 2, False, 0), (32, 16, 4, 1, True, 168), (48, 32, 4, 1, True, 0),
                        (32, 32, 4, 1, False, 168)),
    ("4", False): _tiles((16, 8, 8, 1, True, 168), (16, 16, 8, 1, True, 128), (32, 32, 8, 1, True, 0),
                         (32, 32, 4, 1, False, 0)),
    ("4 with zeros", True): _tiles((16, 8, 4, 1, False, 128), (32, 16, 4, 1, True, 0), (48, 32, 4, 1, True, 0),
                                   (32, 32, 4, 1, False, 168)),
    ("4 with zeros", False): _tiles((16, 8, 8, 1, True, 168), (16, 16, 8, 1, False, 128), (32, 32, 8, 1, True, 0),
                                    (32, 32, 4, 1, False, 0)),
    ("packed 8", True): _tiles((16, 8, 4, 2, False, 0), (32, 16, 4, 1, True, 168), (32, 32, 4, 1, False, 168),
                               (48, 64, 4, 1, False, 0)),
    ("packed 8", False): _tiles((16, 8, 8, 2, True, 128), (16, 16, 8, 1, True, 128), (32, 32, 8, 1, True, 0),
                                (32, 32, 4, 1, False, 168)),
    ("8", True): _tiles((16, 8, 4, 2, False, 128), (32, 16, 4, 1, True, 168), (32, 32, 4, 1, True, 168),
                        (48, 64, 4, 1, False, 0)),
    ("8", False): _tiles((16, 8, 8, 2, True, 128), (16, 16, 8, 1, True, 128), (32, 32, 8, 1, True, 168),
                         (32, 32, 8, 1, False, 0)),
    ("8 with zeros", True): _tiles((16, 8, 4, 2, False, 0), (32, 16, 4, 1, False, 168), (48, 32, 4, 1, True, 0),
                                   (32, 32, 4, 1, False, 168)),
    ("8 with zeros", False): _tiles((16, 8, 8, 2, True, 128), (16, 16, 8, 1, True, 128), (16, 32, 8, 1, False, 168),
                                    (32, 32, 4, 1, False, 0)),
}  # fmt: skip


@lru_cache(maxsize=4096)
def takes_fragments(form: WordForm, columns: int, dtype: torch.dtype, zero: str, device: torch.device) -> bool:
    """True where `fragments` computes the product: NVIDIA from sm80 on and a tested Triton, columns in eights and rows
    in whole tiles, scales of a unit or of whole parts of it, and codes for which there are instructions. `zero` as by
    `kind_of_zero`."""
    if not computes_in_pairs(device) or not is_tested() or zero == "fraction" or form.depth != DEPTH:
        return False
    unit = DEPTH * parts_of(form.bits)
    parts = form.group >= DEPTH and unit % form.group == 0
    groups = form.is_packed or form.scale == "none" or parts or form.group % unit == 0
    scaled = form.scale in ("none", "f32", "bf16", "f16") or (form.is_packed and folds(form, dtype))
    if columns % 8 or form.out_features % 16 or not groups or not scaled:
        return False
    return bool(constants_of(form, dtype == torch.bfloat16, zero, folds(form, dtype), device)["ASM"])


def most_tokens(form: WordForm, dtype: torch.dtype, zero: str, device: torch.device) -> int:
    """Tokens up to which a product that decodes in registers is faster than one that reads the weight written out.
    Measured on an H200; see docs/performance.md."""
    return 64 if form.bits == 8 or takes_fragments(form, form.in_features, dtype, zero, device) else 32


@lru_cache(maxsize=4096)
def tile_of(m: int, form: WordForm, dtype: torch.dtype, zero: str, device: torch.device) -> Tile | FragmentTile:
    """For `m` tokens. Measured on an H200; see docs/performance.md. `zero` as by `kind_of_zero`."""
    fold = folds(form, dtype)
    tokens = max(least_tokens(device), 1 << (m - 1).bit_length())
    if m > 64:
        return _tile_of_many(128, fold)
    if takes_fragments(form, form.in_features, dtype, zero, device):
        return _fragment_tile(tokens, form, zero)
    if form.out_features >= 8192:
        # codes of tables take so many instructions that smaller tiles share them better
        return Tile(32, tokens, 4, 4, 3) if m <= 8 or form.element in TABLES else Tile(64, tokens, 4, 4, 2)
    # Few programs wait for memory, and have the room to ask for more of it.
    short_blocks = parts_of(form.bits) * form.depth == 64
    return Tile(32, tokens, 4, 4, 4 if m <= 16 else 2, 2 if short_blocks and m <= 8 else 1)


def _fragment_tile(tokens: int, form: WordForm, zero: str) -> FragmentTile:
    tiles = FRAGMENT_TILES[_kind_of(form, zero), form.out_features >= 8192]
    return tiles[(8, 16, 32, 64).index(tokens)]


def _kind_of(form: WordForm, zero: str) -> str:
    """One of those of FRAGMENT_TILES."""
    if form.element in TABLES:
        return "table"
    if form.halves > 1:
        return "halves"
    if form.is_packed:
        return f"packed {form.bits}"
    return f"{form.bits} with zeros" if zero else f"{form.bits}"


def tile_of_experts(
    tokens: int, form: WordForm, dtype: torch.dtype, zero: str, device: torch.device
) -> Tile | FragmentTile:
    """The same for the rows of one expert, at most `tokens` of them: there are tiles enough without small ones."""
    fold = folds(form, dtype)
    if tokens <= 32 and takes_fragments(form, form.in_features, dtype, zero, device):
        if form.element in TABLES:
            return FragmentTile(32, tokens, 4, 1, False, 168 if tokens <= 16 else 0)
        return FragmentTile(32, tokens, 4, 2 if tokens <= 16 else 1, 8 < tokens <= 16, 128 if tokens <= 8 else 0)
    return Tile(64, tokens, 4, 4, 2) if tokens <= 16 else _tile_of_many(tokens, fold)


def _tile_of_many(tokens: int, fold: bool) -> Tile:
    return Tile(128 if fold else 64, tokens, 0, 4, 3)


@lru_cache(maxsize=64)
def least_tokens(device: torch.device) -> int:
    """Tokens of the smallest tile that a product takes: before 3.5 Triton took no eight."""
    return 8 if computes_in_pairs(device) and meets(triton.__version__, "triton>=3.5") else 16


def folds(form: WordForm, dtype: torch.dtype) -> bool:
    """True where scales go into the weight before the product: bf16 holds them, and their products with these codes,
    exactly. f16 holds those products of e4m3 scales, which cannot wait for the product where parts have two."""
    return form.is_packed and (dtype == torch.bfloat16 or form.halves > 1)


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
    tile: Tile | FragmentTile,
    tiles: ExpertTiles | None = None,
) -> None:
    """Writes `x` [M, K], bf16 or f16, times the weight of N rows to `y` [M, N]. Columns of x lie side by side.

    With `tiles` every buffer but `table` has leading experts, and y a row for each of `tiles.rows`.
    """
    if isinstance(tile, FragmentTile):
        x, words = _aligned(x), _aligned(words)
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
        tiles is not None and tiles.gathered,
        x.device,
    )
    scale_stride = scale.shape[-1]
    launch(
        (tiles_n * tiles_m, 1, 1) if isinstance(tile, Tile) and not tile.slices else (tiles_n, tiles_m, 1),
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


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """`rows`, or a copy of them, whose rows begin where a load of 16 bytes can."""
    width = 16 // rows.element_size()
    return rows if rows.data_ptr() % 16 == 0 and rows.stride(-2) % width == 0 else rows.clone().contiguous()


@lru_cache(maxsize=4096)
def _launch_of(
    form: WordForm,
    tile: Tile | FragmentTile,
    columns: int,
    dtype: torch.dtype,
    zero: str,
    row_scale: bool,
    bias: bool,
    experts: bool,
    gathered: bool,
    device: torch.device,
) -> Launch:
    bf16 = dtype == torch.bfloat16
    fold = folds(form, dtype)
    common = {
        **constants_of(form, bf16, zero, fold, device, held=isinstance(tile, FragmentTile)),
        "K": columns,
        "EXPERTS": experts,
        "GATHERED": gathered,
        "FOLD": fold,
        "ROW_SCALE": row_scale,
        "BIAS": bias,
        "BF16": bf16,
        "BN": tile.rows,
        "BM": tile.tokens,
    }
    if isinstance(tile, FragmentTile):
        own = {
            "WARPS": tile.warps,
            "AHEAD": tile.ahead,
            "TOKENS_AHEAD": tile.tokens_ahead,
            "ZERO_AT": place_of_zero(form.element) if form.element in TABLES else 0,
        }
        unused = ("ELEMENT", "RAISED")
        constants = {name: value for name, value in (common | own).items() if name not in unused}
        return Launch(_fragments(), constants, num_warps=tile.warps, maxnreg=tile.registers or None)
    block = parts_of(form.bits) * form.depth
    own = {
        "SHARED": _shared(form, zero),
        "EVEN": columns % (block * max(1, tile.slices) * tile.unroll) == 0,
        # The interpreter multiplies the bits of bf16 numbers, not their values.
        "WIDE": device.type == "cpu",
        **({"SLICES": tile.slices, "UNROLL": tile.unroll} if tile.slices else {"BAND": _BAND}),
    }
    kernel = few_tokens if tile.slices else many_tokens
    return Launch(kernel, common | own, num_warps=tile.warps, num_stages=tile.stages)


def _fragments() -> Any:
    """Imported where it is taken: releases of Triton that were not tested may lack what it needs."""
    from omniplat.portable.word_fragments_gluon import fragments

    return fragments
