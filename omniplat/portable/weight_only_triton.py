"""The Triton form of `weight_only_product`: which tile for how many tokens, and the call. Imports triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from omniplat.portable.launch import Launch
from omniplat.portable.word_kernels_triton import few_tokens, many_tokens
from omniplat.portable.word_weights import WordForm
from omniplat.portable.words import parts_of
from omniplat.portable.words_ptx import base_of, instructions

#: Tiles of the weight that share the tiles of tokens while those are in the cache.
_BAND = 8
_NO_TILES = (None,) * 4


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Which rows of which expert each tile of tokens has: int32.

    `rows` [R], sorted by expert, are rows of x; tile t has those from `first[t]` up to `end[t]`, of `expert[t]`.
    """

    rows: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the weight and tokens of one program, and how it is run.

    `slices` of K are shared among the warps of a program; with 0 it is for many tokens.
    """

    rows: int
    tokens: int
    slices: int
    warps: int
    stages: int


@lru_cache(maxsize=4096)
def tile_of(m: int, fold: bool) -> Tile:
    """Measured on an H200; see docs/performance.md."""
    if m <= 64:
        return Tile(32, max(16, 1 << (m - 1).bit_length()), 4, 4, 2)
    return Tile(128, 128, 0, 4, 3) if fold else Tile(64, 128, 0, 4, 3)


def folds(form: WordForm, dtype: torch.dtype) -> bool:
    """True where scales go into the weight before the product: bf16 holds them, and their products with these codes,
    exactly."""
    return dtype == torch.bfloat16 and form.scale in ("e8m0", "e4m3") and form.element in ("fp4_e2m1", "fp8_e4m3")


@lru_cache(maxsize=256)
def _asm(element: str, bits: int, bf16: bool, fold: bool, packed: bool) -> tuple[str, ...]:
    """The instructions that decode each part; "" for those that have none."""
    return tuple(instructions(element, part, bf16, fold) if packed else "" for part in range(parts_of(bits)))


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
        "" if zero is None else ("fraction" if zero.is_floating_point() else "integer"),
        row_scale is not None,
        bias is not None,
        tiles is not None,
        x.device,
    )
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
        (tiles_m, m, n, x.stride(0), words.stride(-2), scale.stride(-2), scale.shape[-2]),
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
    parts = parts_of(form.bits)
    fold = folds(form, dtype)
    own = {"SLICES": tile.slices} if tile.slices else {"BAND": _BAND}
    constants = {
        "K": columns,
        "EXPERTS": experts,
        "ASM": _asm(form.element, form.bits, bf16, fold, computes_in_pairs(device)),
        "ELEMENT": form.element,
        "PARTS": parts,
        "DEPTH": form.depth,
        "SCALE": form.scale,
        "GROUP": form.group,
        "ROWS": form.rows,
        # all parts of a block in one group, and nothing else to be done with each part's product
        "ONE_SCALE": form.scale != "none" and form.group % (parts * form.depth) == 0 and zero != "fraction",
        "FOLD": fold,
        "ZERO": zero,
        "BASE": base_of(form.element, bf16),
        "ROW_SCALE": row_scale,
        "BIAS": bias,
        "EVEN": columns % (parts * form.depth * max(1, tile.slices)) == 0,
        "BF16": bf16,
        # The interpreter multiplies the bits of bf16 numbers, not their values.
        "WIDE": device.type == "cpu",
        "BN": tile.rows,
        "BM": tile.tokens,
        **own,
    }
    kernel = few_tokens if tile.slices else many_tokens
    return Launch(kernel, constants, num_warps=tile.warps, num_stages=tile.stages)


@lru_cache(maxsize=64)
def computes_in_pairs(device: torch.device) -> bool:
    """True where PTX computes on pairs of 16-bit floats, bf16 among them: NVIDIA from sm80 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
