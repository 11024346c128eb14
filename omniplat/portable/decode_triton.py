"""A weight held in words, written out in bf16 for one product of a matrix library. Imports triton."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch
from omniplat.portable.word_decode_triton import (
    constants_of,
    decoded_parts,
    kind_of_zero,
    multiplier,
    of_block,
    packed_of,
)
from omniplat.portable.word_weights import WordForm
from omniplat.portable.words import parts_of

#: Rows of a program's tile, and blocks of columns that it goes through.
_ROWS = 32
_BLOCKS = 4


@triton.jit
def _decode(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    words,
    table,
    scale,
    zero,
    row_scale,
    y,
    N,
    word_stride,
    scale_stride,
    K: tl.constexpr,
    ASM: tl.constexpr,
    OPERANDS: tl.constexpr,
    EXTRA: tl.constexpr,
    ELEMENT: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALE: tl.constexpr,
    RAISED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ZERO: tl.constexpr,
    BASE: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    BN: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    PACKED: tl.constexpr = SCALE == "packed_e8m0" or SCALE == "packed_bf16"
    BLOCK: tl.constexpr = PARTS * DEPTH
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, DEPTH)
    n_inside = n < N
    row = n.to(tl.int64)
    by_row = tl.full([BN, 1], 1.0, tl.float32)
    if ROW_SCALE:
        by_row = tl.load(row_scale + n, mask=n_inside, other=0.0)[:, None]
    for step in tl.static_range(BLOCKS):
        # tensors beside `n`: the interpreter takes no mask that a scalar took part in
        block = n * 0 + tl.program_id(1) * BLOCKS + step
        inside = n_inside & (block * BLOCK < K)
        held = tl.load(words + (row * word_stride + block * DEPTH)[:, None] + d[None, :], mask=inside[:, None], other=0)
        used, below = held, held
        if PACKED:
            used = packed_of(scale + row, block, scale_stride, inside, DEPTH, GROUP)
        if ZERO != "":
            below = of_block(zero + row * scale_stride, block * BLOCK, inside, K, PARTS, DEPTH, GROUP)
        w = decoded_parts(
            held, table, below, used, ASM, OPERANDS, EXTRA, ELEMENT, PARTS, SCALE, RAISED, ZERO, BASE, PACKED, True
        )
        for part in tl.static_range(PARTS):
            first = block * BLOCK + part * DEPTH
            value = w[part].to(tl.float32)
            if ZERO == "fraction":
                value -= below[part][:, None]
            if SCALE != "none" and not PACKED:
                stored = tl.load(
                    scale + (row // ROWS) * scale_stride + first // GROUP, mask=inside & (first < K), other=0
                )
                value *= multiplier(stored, 0, SCALE, RAISED)[:, None]
            column = first[:, None] + d[None, :]
            at = y + (row * K)[:, None] + column
            tl.store(at, (value * by_row).to(y.dtype.element_ty), mask=inside[:, None] & (column < K))


def decoded(
    words: torch.Tensor,
    table: torch.Tensor | None,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    form: WordForm,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight [N, K] in `dtype`: values times scales in float32, rounded once. Buffers as in `word_tensors`."""
    n, columns = form.out_features, form.in_features
    y = torch.empty((n, columns), dtype=dtype, device=words.device)
    _launch_of(form, columns, kind_of_zero(zero), row_scale is not None, words.device)(
        (-(-n // _ROWS), -(-columns // (parts_of(form.bits) * form.depth * _BLOCKS)), 1),
        (words, table, scale, zero, row_scale, y),
        (n, words.stride(-2), scale.shape[-1]),
    )
    return y


@lru_cache(maxsize=1024)
def _launch_of(form: WordForm, columns: int, zero: str, row_scale: bool, device: torch.device) -> Launch:
    constants = {
        **constants_of(form, True, zero, form.is_packed, device),
        "K": columns,
        "ROW_SCALE": row_scale,
        "BN": _ROWS,
        "BLOCKS": _BLOCKS,
    }
    return Launch(_decode, constants, num_warps=4)
