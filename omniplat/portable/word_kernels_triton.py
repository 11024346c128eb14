"""Products of tokens with a weight held in words, in Triton: codes are decoded in registers and multiplied in 16 bits.

One program computes BN rows of the weight for BM tokens. The weight is the left operand of its products, so that few
tokens fill the columns of a tile. NVIDIA's devices decode two codes with each of their own instructions (ASM);
elsewhere, and under the interpreter, Triton's operations give the same numbers. Imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def value_of(words, table, PART: tl.constexpr, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """f32: what part PART of each word stands for, without a zero point and a scale."""
    wide = words.to(tl.int32)
    if ELEMENT == "fp4_e2m1":
        code = (wide >> (4 * PART)) & 15
        # a code's exponent and mantissa become the lowest of the wider exponent and the highest of its mantissa
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif ELEMENT == "fp8_e4m3":
        code = (wide >> (8 * PART)) & 255
        bits = ((code & 128) << 24) | ((code & 127) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif ELEMENT == "nf4" or ELEMENT == "fp4_bnb":
        value = tl.load(table + ((wide >> (4 * PART)) & 15))
    elif ELEMENT == "int4":
        value = (((wide >> (4 * PART)) & 15) - 8).to(tl.float32)
    elif ELEMENT == "uint4":
        value = ((wide >> (4 * PART)) & 15).to(tl.float32)
    elif ELEMENT == "int8":
        value = (((wide >> (8 * PART)) & 255) - 128).to(tl.float32)
    else:
        value = ((wide >> (8 * PART)) & 255).to(tl.float32)
    return value


@triton.jit
def _decoded(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    words, table, less, factor, ASM: tl.constexpr, PART: tl.constexpr, ELEMENT: tl.constexpr, LESS: tl.constexpr,
    FOLD: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """What part PART of each word stands for, less a zero point (LESS), times `factor` (FOLD), in 16-bit floats of the
    same shape."""
    half = tl.bfloat16 if BF16 else tl.float16
    if ASM[PART] != "":
        return tl.inline_asm_elementwise(ASM[PART], "=r,r,r,r", [words, less, factor], dtype=half, is_pure=True, pack=2)
    value = value_of(words, table, PART, ELEMENT)
    if LESS:
        value -= less
    if FOLD:
        value *= factor.to(tl.float32)
    return value.to(half)


@triton.jit
def multiplier(stored, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """f32: powers of two of e8m0 bytes, values of e4m3 bytes, floats as they are."""
    if SCALE == "e8m0":
        byte = stored.to(tl.int32)
        return tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)
    if SCALE == "e4m3":
        byte = stored.to(tl.int32)
        bits = ((byte & 128) << 24) | ((byte & 127) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return stored.to(tl.float32)


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    held,
    table,
    zeros,
    scales,
    ASM: tl.constexpr,
    PART: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    BASE: tl.constexpr,
    FOLD: tl.constexpr,
    BF16: tl.constexpr,
):
    """Part PART of words [..., DEPTH] in 16-bit floats: less the zero point where that is an integer, times the scale
    where FOLD says so. `zeros` and `scales` are those of a block's parts, [...] each."""
    half = tl.bfloat16 if BF16 else tl.float16
    if ZERO == "integer":
        # in packed form the zero point is subtracted from the number that carries the code
        z = tl.expand_dims(zeros[PART].to(tl.float32), -1)
        less = (-(z + BASE)).to(half) if ASM[PART] != "" else z
        less = tl.broadcast_to(less, held.shape)
    else:
        less = tl.full(held.shape, -BASE, tl.float32).to(half)
    factor = less
    if FOLD:
        factor = tl.broadcast_to(tl.expand_dims(multiplier(scales[PART], SCALE).to(half), -1), held.shape)
    return _decoded(held, table, less, factor, ASM, PART, ELEMENT, ZERO == "integer", FOLD, BF16)


@triton.jit
def _of_block(at, first, inside, K: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """What one block's parts have at `at`, [BN] each, as a tuple; parts of one group share one load."""
    # a tensor beside `inside`: the interpreter takes no mask that a scalar took part in
    column = first + tl.zeros(inside.shape, dtype=tl.int32)
    p0 = tl.load(at + first // GROUP, mask=inside & (column < K), other=0)
    p1 = p0
    p2 = p0
    p3 = p0
    if GROUP % (PARTS * DEPTH) != 0:
        second = first + DEPTH
        if GROUP != 2 * DEPTH:
            p1 = tl.load(at + second // GROUP, mask=inside & (column + DEPTH < K), other=0)
        if PARTS == 4:
            third = second + DEPTH
            p2 = tl.load(at + third // GROUP, mask=inside & (column + 2 * DEPTH < K), other=0)
            p3 = p2
            if GROUP != 2 * DEPTH:
                fourth = third + DEPTH
                p3 = tl.load(at + fourth // GROUP, mask=inside & (column + 3 * DEPTH < K), other=0)
    return p0, p1, p2, p3


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
def _tokens_of(  # type: ignore[no-untyped-def]
    tile, x_rows, tile_expert, tile_first, tile_end, M, BM: tl.constexpr, EXPERTS: tl.constexpr
):
    """Expert, rows of the output, which of them there are, and the rows of x that they come from."""
    if EXPERTS:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        m = tl.load(tile_first + tile) + tl.arange(0, BM)
        inside = m < tl.load(tile_end + tile)
        row = tl.load(x_rows + m, mask=inside, other=0).to(tl.int64)
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
    scale_rows,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ASM: tl.constexpr,
    ELEMENT: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
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
) -> None:
    BLOCK: tl.constexpr = PARTS * DEPTH
    # each slice of K is a batch of the product, and warps divide the batches among them
    STEPS: tl.constexpr = (K + BLOCK * SLICES - 1) // (BLOCK * SLICES)
    n = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    expert, m, m_inside, x_row = _tokens_of(tl.program_id(1), x_rows, tile_expert, tile_first, tile_end, M, BM, EXPERTS)
    d = tl.arange(0, DEPTH)
    k = tl.arange(0, SLICES)[:, None] * (STEPS * BLOCK)
    n_inside = n < N
    word_at = words + ((expert * N + n) * word_stride + k // PARTS)[:, :, None] + d[None, None, :]
    x_at = x + x_row[None, None, :] * x_stride + (k + d[None, :])[:, :, None]
    scale_row = scale + (expert * scale_rows + n // ROWS) * scale_stride
    zero_row = zero + (expert * N + n) * scale_stride
    total = tl.zeros([SLICES, BN, BM], dtype=tl.float32)
    # Scales are asked for one block ahead: unlike codes and tokens they go through no pipeline.
    if SCALE != "none":
        scales = _of_block(scale_row, k, n_inside, K, PARTS, DEPTH, GROUP)
    if ZERO != "":
        zeros = _of_block(zero_row, k, n_inside, K, PARTS, DEPTH, GROUP)
    for start in range(0, STEPS * BLOCK, BLOCK):
        inside = n_inside if EVEN else n_inside & (k + start < K)
        held = tl.load(word_at + start // PARTS, mask=inside[:, :, None], other=0)
        # where there are none, nothing looks at them
        used, below = held, held
        if SCALE != "none":
            used = scales
            scales = _of_block(scale_row, k + (start + BLOCK), n_inside, K, PARTS, DEPTH, GROUP)
        if ZERO != "":
            below = zeros
            zeros = _of_block(zero_row, k + (start + BLOCK), n_inside, K, PARTS, DEPTH, GROUP)
        product = tl.zeros([SLICES, BN, BM], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            first = start + part * DEPTH
            w = _part(held, table, below, used, ASM, part, ELEMENT, SCALE, ZERO, BASE, FOLD, BF16)
            here = (
                m_inside[None, None, :]
                if EVEN
                else m_inside[None, None, :] & ((k + (first + d)[None, :]) < K)[:, :, None]
            )
            tokens = tl.load(x_at + first, mask=here, other=0.0)
            if WIDE:
                w, tokens = w.to(tl.float32), tokens.to(tl.float32)
            if SCALE == "none" or FOLD:
                total = tl.dot(w, tokens, total)
            elif ONE_SCALE:
                product = tl.dot(w, tokens, product)
            else:
                product = tl.dot(w, tokens)
                if ZERO == "fraction":
                    product -= below[part][:, :, None] * tl.sum(tokens.to(tl.float32), axis=1)[:, None, :]
                total += product * multiplier(used[part], SCALE)[:, :, None]
        if ONE_SCALE:
            total += product * multiplier(used[0], SCALE)[:, :, None]
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
    scale_rows,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ASM: tl.constexpr,
    ELEMENT: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
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
    tiles_n = tl.cdiv(N, BN)
    program = tl.program_id(0)
    band = program // (BAND * tiles_m)
    width = tl.minimum(tiles_n - band * BAND, BAND)
    n = (band * BAND + (program % (BAND * tiles_m)) % width) * BN + tl.arange(0, BN)
    expert, m, m_inside, x_row = _tokens_of(
        (program % (BAND * tiles_m)) // width, x_rows, tile_expert, tile_first, tile_end, M, BM, EXPERTS
    )
    d = tl.arange(0, DEPTH)
    n_inside = n < N
    word_at = words + ((expert * N + n) * word_stride)[:, None] + d[None, :]
    x_at = x + x_row[None, :] * x_stride + d[:, None]
    scale_row = scale + (expert * scale_rows + n // ROWS) * scale_stride
    zero_row = zero + (expert * N + n) * scale_stride
    total = tl.zeros([BN, BM], dtype=tl.float32)
    if SCALE != "none":
        scales = _of_block(scale_row, 0, n_inside, K, PARTS, DEPTH, GROUP)
    if ZERO != "":
        zeros = _of_block(zero_row, 0, n_inside, K, PARTS, DEPTH, GROUP)
    for start in range(0, K, BLOCK):
        held = tl.load(word_at + start // PARTS, mask=n_inside[:, None], other=0)
        # where there are none, nothing looks at them
        used, below = held, held
        if SCALE != "none":
            used = scales
            scales = _of_block(scale_row, start + BLOCK, n_inside, K, PARTS, DEPTH, GROUP)
        if ZERO != "":
            below = zeros
            zeros = _of_block(zero_row, start + BLOCK, n_inside, K, PARTS, DEPTH, GROUP)
        product = tl.zeros([BN, BM], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            first = start + part * DEPTH
            w = _part(held, table, below, used, ASM, part, ELEMENT, SCALE, ZERO, BASE, FOLD, BF16)
            here = m_inside[None, :] if EVEN else m_inside[None, :] & ((first + d) < K)[:, None]
            tokens = tl.load(x_at + first, mask=here, other=0.0)
            if WIDE:
                w, tokens = w.to(tl.float32), tokens.to(tl.float32)
            if SCALE == "none" or FOLD:
                total = tl.dot(w, tokens, total)
            elif ONE_SCALE:
                product = tl.dot(w, tokens, product)
            else:
                product = tl.dot(w, tokens)
                if ZERO == "fraction":
                    product -= below[part][:, None] * tl.sum(tokens.to(tl.float32), axis=0)[None, :]
                total += product * multiplier(used[part], SCALE)[:, None]
        if ONE_SCALE:
            total += product * multiplier(used[0], SCALE)[:, None]
    _store(total, row_scale + expert * N, bias + expert * N, y, n, m, m_inside, N, ROW_SCALE, BIAS)
