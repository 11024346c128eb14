"""A weight held in words, written out in bf16 for one product of a matrix library. Imports triton."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch
from omniplat.portable.word_kernels_triton import multiplier, value_of
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
    ELEMENT: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    BN: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BN + tl.arange(0, BN)[:, None]
    d = tl.arange(0, DEPTH)[None, :]
    inside = (n < N) & (d < DEPTH)
    n_wide = n.to(tl.int64)
    by_row = tl.full([BN, 1], 1.0, tl.float32)
    if ROW_SCALE:
        by_row = tl.load(row_scale + n, mask=n < N, other=0.0)
    for block in tl.static_range(BLOCKS):
        first = (tl.program_id(1) * BLOCKS + block) * PARTS * DEPTH
        held = tl.load(words + n_wide * word_stride + first // PARTS + d, mask=inside & (first + d * 0 < K), other=0)
        for part in tl.static_range(PARTS):
            column = first + part * DEPTH + d
            here = inside & (column < K)
            value = value_of(held, table, part, ELEMENT)
            group = column // GROUP
            if ZERO:
                value -= tl.load(zero + n_wide * scale_stride + group, mask=here, other=0).to(tl.float32)
            if SCALE != "none":
                at = scale + (n_wide // ROWS) * scale_stride + group
                value *= multiplier(tl.load(at, mask=here, other=0), SCALE)
            tl.store(y + n_wide * K + column, (value * by_row).to(y.dtype.element_ty), mask=here)


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
    _launch_of(form, columns, zero is not None, row_scale is not None)(
        (-(-n // _ROWS), -(-columns // (parts_of(form.bits) * form.depth * _BLOCKS)), 1),
        (words, table, scale, zero, row_scale, y),
        (n, words.stride(-2), scale.stride(-2)),
    )
    return y


@lru_cache(maxsize=1024)
def _launch_of(form: WordForm, columns: int, zero: bool, row_scale: bool) -> Launch:
    constants = {
        "K": columns,
        "ELEMENT": form.element,
        "PARTS": parts_of(form.bits),
        "DEPTH": form.depth,
        "SCALE": form.scale,
        "GROUP": form.group,
        "ROWS": form.rows,
        "ZERO": zero,
        "ROW_SCALE": row_scale,
        "BN": _ROWS,
        "BLOCKS": _BLOCKS,
    }
    return Launch(_decode, constants, num_warps=4)
