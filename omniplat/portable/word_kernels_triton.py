"""Products of tokens with a weight held in words, in Triton: codes are decoded in registers and multiplied in 16 bits.

One program computes BN rows of the weight for BM tokens. The weight is the left operand of its products, so that few
tokens fill the columns of a tile. Imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from omniplat.portable.word_decode_triton import decoded_parts, multiplier, of_block, packed_of


@triton.jit
def _store(value, row_scale, bias, y, n, m, m_inside, N, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes sums f32 [BN, BM], scaled by row and with the bias, to y [M, N]."""
    inside = n < N
    if ROW_SCALE:
        value *= tl.load(row_scale + n, mask=inside, other=0.0)[:, None]
    if BIAS:
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = y + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, value.to(y.dtype.element_ty), mask=inside[:, None] & m_inside[None, :])


@triton.jit
def tile_tokens(  # type: ignore[no-untyped-def]
    tile, x_rows, tile_expert, tile_first, tile_end, M, BM: tl.constexpr, EXPERTS: tl.constexpr, GATHERED: tl.constexpr
):
    """Expert, rows of the output, which of them there are, and the rows of x that they come from."""
    if EXPERTS:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        m = tl.load(tile_first + tile) + tl.arange(0, BM)
        inside = m < tl.load(tile_end + tile)
        row = tl.where(inside, m, 0).to(tl.int64)
        if GATHERED:
            row = tl.load(x_rows + m, mask=inside, other=0)
    else:
        expert = tl.program_id(0).to(tl.int64) * 0
        m = tile * BM + tl.arange(0, BM)
        inside = m < M
        row = m.to(tl.int64)
    return expert, m, inside, row


@triton.jit(do_not_specialize=["tiles_m", "M"])
def few_tokens(  # type: ignore[no-untyped-def]
    x,
    words,
    table,
    scale,
    zero,
    row_scale,
    bias,
    y,
    x_rows,
    tile_expert,
    tile_first,
    tile_end,
    tiles_m,
    M,
    N,
    x_stride,
    word_stride,
    scale_stride,
    expert_scales,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATHERED: tl.constexpr,
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
    SHARED: tl.constexpr,
    FOLD: tl.constexpr,
    ZERO: tl.constexpr,
    BASE: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SLICES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    BLOCK: tl.constexpr = PARTS * DEPTH
    PACKED: tl.constexpr = SCALE == "packed_e8m0" or SCALE == "packed_bf16"
    OWN: tl.constexpr = SCALE != "none" and not PACKED
    # each slice of K is a batch of the product, and warps divide the batches among them
    STRIDE: tl.constexpr = BLOCK * UNROLL
    SLICE: tl.constexpr = (K + STRIDE * SLICES - 1) // (STRIDE * SLICES) * STRIDE
    n = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    expert, m, m_inside, x_row = tile_tokens(
        tl.program_id(1), x_rows, tile_expert, tile_first, tile_end, M, BM, EXPERTS, GATHERED
    )
    d = tl.arange(0, DEPTH)
    k = tl.arange(0, SLICES)[:, None] * SLICE
    n_inside = n < N
    word_at = words + ((expert * N + n) * word_stride + k // PARTS)[:, :, None] + d[None, None, :]
    x_at = x + x_row[None, None, :] * x_stride + (k + d[None, :])[:, :, None]
    # what is not packed has the shape of zero points, if there are any
    own = expert * expert_scales + (n // ROWS) * scale_stride
    packed_at = scale + expert * expert_scales + n
    total = tl.zeros([SLICES, BN, BM], dtype=tl.float32)
    # These are asked for one block ahead: unlike codes, tokens and packed scales they go through no pipeline.
    if OWN:
        scales = of_block(scale + own, k, n_inside, K, PARTS, DEPTH, GROUP)
    if ZERO != "":
        zeros = of_block(zero + own, k, n_inside, K, PARTS, DEPTH, GROUP)
    for stride in range(0, SLICE, STRIDE):
        for block in tl.static_range(UNROLL):
            start = stride + block * BLOCK
            inside = n_inside if EVEN else n_inside & (k + start < K)
            held = tl.load(word_at + start // PARTS, mask=inside[:, :, None], other=0)
            # where there are none, nothing looks at them
            used, below = held, held
            if PACKED:
                used = packed_of(packed_at, (k + start) // BLOCK, scale_stride, inside, DEPTH, GROUP)
            elif OWN:
                used = scales
                scales = of_block(scale + own, k + (start + BLOCK), n_inside, K, PARTS, DEPTH, GROUP)
            if ZERO != "":
                below = zeros
                zeros = of_block(zero + own, k + (start + BLOCK), n_inside, K, PARTS, DEPTH, GROUP)
            w = decoded_parts(
                held, table, below, used, ASM, OPERANDS, EXTRA, ELEMENT, PARTS, SCALE, RAISED, ZERO, BASE, FOLD, BF16
            )
            product = tl.zeros([SLICES, BN, BM], dtype=tl.float32)
            for part in tl.static_range(PARTS):
                first = start + part * DEPTH
                decoded = w[part]
                here = (
                    m_inside[None, None, :]
                    if EVEN
                    else m_inside[None, None, :] & ((k + (first + d)[None, :]) < K)[:, :, None]
                )
                tokens = tl.load(x_at + first, mask=here, other=0.0)
                if WIDE:
                    decoded, tokens = decoded.to(tl.float32), tokens.to(tl.float32)
                if SCALE == "none" or FOLD:
                    total = tl.dot(decoded, tokens, total)
                else:
                    product = tl.dot(decoded, tokens, product)
                    if ZERO == "fraction":
                        product -= below[part][:, :, None] * tl.sum(tokens.to(tl.float32), axis=1)[:, None, :]
                    if part % SHARED == SHARED - 1:
                        by = used if PACKED else used[part][:, :, None]
                        total += product * multiplier(by, part, SCALE, RAISED)
                        product = tl.zeros([SLICES, BN, BM], dtype=tl.float32)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    _store(tl.sum(total, axis=0), row_scale + expert * N, bias + expert * N, y, rows, m, m_inside, N, ROW_SCALE, BIAS)


@triton.jit(do_not_specialize=["tiles_m", "M"])
def many_tokens(  # type: ignore[no-untyped-def]
    x,
    words,
    table,
    scale,
    zero,
    row_scale,
    bias,
    y,
    x_rows,
    tile_expert,
    tile_first,
    tile_end,
    tiles_m,
    M,
    N,
    x_stride,
    word_stride,
    scale_stride,
    expert_scales,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATHERED: tl.constexpr,
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
    SHARED: tl.constexpr,
    FOLD: tl.constexpr,
    ZERO: tl.constexpr,
    BASE: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BF16: tl.constexpr,
    WIDE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BAND: tl.constexpr,
) -> None:
    """As `few_tokens`, with products large enough for Hopper's own instructions, and K in one piece."""
    BLOCK: tl.constexpr = PARTS * DEPTH
    PACKED: tl.constexpr = SCALE == "packed_e8m0" or SCALE == "packed_bf16"
    OWN: tl.constexpr = SCALE != "none" and not PACKED
    tiles_n = tl.cdiv(N, BN)
    program = tl.program_id(0)
    band = program // (BAND * tiles_m)
    width = tl.minimum(tiles_n - band * BAND, BAND)
    n = (band * BAND + (program % (BAND * tiles_m)) % width) * BN + tl.arange(0, BN)
    expert, m, m_inside, x_row = tile_tokens(
        (program % (BAND * tiles_m)) // width, x_rows, tile_expert, tile_first, tile_end, M, BM, EXPERTS, GATHERED
    )
    d = tl.arange(0, DEPTH)
    n_inside = n < N
    word_at = words + ((expert * N + n) * word_stride)[:, None] + d[None, :]
    x_at = x + x_row[None, :] * x_stride + d[:, None]
    # what is not packed has the shape of zero points, if there are any
    own = expert * expert_scales + (n // ROWS) * scale_stride
    packed_at = scale + expert * expert_scales + n
    total = tl.zeros([BN, BM], dtype=tl.float32)
    if OWN:
        scales = of_block(scale + own, 0, n_inside, K, PARTS, DEPTH, GROUP)
    if ZERO != "":
        zeros = of_block(zero + own, 0, n_inside, K, PARTS, DEPTH, GROUP)
    for start in range(0, K, BLOCK):
        held = tl.load(word_at + start // PARTS, mask=n_inside[:, None], other=0)
        # where there are none, nothing looks at them
        used, below = held, held
        if PACKED:
            used = packed_of(packed_at, start // BLOCK, scale_stride, n_inside, DEPTH, GROUP)
        elif OWN:
            used = scales
            scales = of_block(scale + own, start + BLOCK, n_inside, K, PARTS, DEPTH, GROUP)
        if ZERO != "":
            below = zeros
            zeros = of_block(zero + own, start + BLOCK, n_inside, K, PARTS, DEPTH, GROUP)
        w = decoded_parts(
            held, table, below, used, ASM, OPERANDS, EXTRA, ELEMENT, PARTS, SCALE, RAISED, ZERO, BASE, FOLD, BF16
        )
        product = tl.zeros([BN, BM], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            first = start + part * DEPTH
            decoded = w[part]
            here = m_inside[None, :] if EVEN else m_inside[None, :] & ((first + d) < K)[:, None]
            tokens = tl.load(x_at + first, mask=here, other=0.0)
            if WIDE:
                decoded, tokens = decoded.to(tl.float32), tokens.to(tl.float32)
            if SCALE == "none" or FOLD:
                total = tl.dot(decoded, tokens, total)
            else:
                product = tl.dot(decoded, tokens, product)
                if ZERO == "fraction":
                    product -= below[part][:, None] * tl.sum(tokens.to(tl.float32), axis=0)[None, :]
                if part % SHARED == SHARED - 1:
                    by = used if PACKED else used[part][:, None]
                    total += product * multiplier(by, part, SCALE, RAISED)
                    product = tl.zeros([BN, BM], dtype=tl.float32)
    _store(total, row_scale + expert * N, bias + expert * N, y, n, m, m_inside, N, ROW_SCALE, BIAS)
