"""Products of a few tokens with a weight held in words, for NVIDIA's tensor cores, in Gluon: codes go from memory into
the registers that a product takes, and are decoded there.

`mma.m16n8k16` multiplies 16 rows of a weight by 8 tokens over 16 columns. Thread 4g + t of a warp holds four of the
columns of rows g and g + 8, and of token g. Which four is free, as long as both operands agree. Here a thread has 8
words that lie side by side, 16 bytes of a row; a part of them is 8 columns that lie side by side, 16 bytes of a token,
and two products take those. So every load is as wide as there is, and nothing goes through shared memory but the sums
of warps, which divide K among them.

Triton leaves open which thread has which element of a tensor; a layout of Gluon's says it. The first dimension of every
tensor here are the threads of a program, then come 16 rows each, then 8 tokens each.

What `omniplat.portable.word_kernels_triton` computes is the same, and is what runs elsewhere. Triton interprets no
Gluon: where there is no device, tests run this very source on numpy arrays (`tests/support/gluon.py`), against the
oracle and with every read checked, and compile it for one. An operation of Gluon's or an instruction that is new here
is to be added there. Imports triton.
"""

# Statements of Gluon are not all of them Python's: tuples grow, and no expression is starred.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _words_at(at):
    """16 bytes from each of `at`, in four registers; nobody reads them again."""
    return gl.inline_asm_elementwise(
        "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [at],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _held(table, thread, HELD: gl.constexpr, ZERO_AT: gl.constexpr):
    """The numbers of HELD, each in a register. What the compiler knows to be constant, or the same for all threads, it
    moves there anew for each use; so 0 is added, as it stands in the table."""
    found = ()
    if len(HELD) > 0:
        nothing = gl.load(table + ZERO_AT + thread * 0).to(gl.int32, bitcast=True)
        for i in gl.static_range(len(HELD)):
            found = found + (nothing + HELD[i],)
    return found


@gluon.jit
def _tokens_at(at, left, PARTS: gl.constexpr, EVEN: gl.constexpr):
    """Of each part, 16 bytes from each of `at`, in four registers; unless EVEN, zeros where none of `left` columns are
    left."""
    found = ()
    for part in gl.static_range(PARTS):
        if EVEN:
            held = gl.inline_asm_elementwise(
                "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];",
                "=r,=r,=r,=r,l",
                [at + 32 * part],
                (gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=1,
            )
        else:
            held = gl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
                "@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }",
                "=&r,=&r,=&r,=&r,l,r",
                [at + 32 * part, (left > 32 * part).to(gl.int32)],
                (gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=1,
            )
        found = found + (held,)
    return found


@gluon.jit
def _multiplied(a0, a1, a2, a3, b0, b1, sums, BF16: gl.constexpr):
    """`sums` and the product of rows and tokens, [threads, rows, tokens]: a0 and a2 of row g, a1 and a3 of g + 8."""
    KIND: gl.constexpr = "bf16.bf16" if BF16 else "f16.f16"
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32." + KIND + ".f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, sums[0], sums[1], sums[2], sums[3]],
        (gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _parts(
    words, scales, less, held, ASM: gl.constexpr, OPERANDS: gl.constexpr, EXTRA: gl.constexpr, PARTS: gl.constexpr
):
    """Every part of two words, decoded to a pair of 16-bit floats; see `omniplat.portable.words_ptx`."""
    SPANS: gl.constexpr = len(less)
    if EXTRA == "factor":
        given = [words, scales[0], scales[0]]
    elif EXTRA == "less" and PARTS == 2:
        given = [words, less[0], less[SPANS - 1]]
    elif EXTRA == "less":
        given = [words, less[0], less[SPANS // 4], less[SPANS // 2], less[SPANS - 1]]
    elif EXTRA == "held":
        given = [words, held[0], held[1], held[2], held[3]]
    else:
        given = [words]
    if PARTS == 2:
        made = gl.inline_asm_elementwise(ASM, OPERANDS, given, (gl.int32, gl.int32), is_pure=True, pack=1)
    else:
        made = gl.inline_asm_elementwise(
            ASM, OPERANDS, given, (gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
        )
    return made


@gluon.jit
def _pairs_of(zero, BASE: gl.constexpr, BF16: gl.constexpr):
    """What is added to the numbers that carry integers, twice in a register."""
    less = (-(zero.to(gl.float32) + BASE)).to(gl.bfloat16 if BF16 else gl.float16)
    return (less.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001


@gluon.jit
def _group(unit, span, K: gl.constexpr, UNIT: gl.constexpr, GROUP: gl.constexpr):
    """Which group the span of a unit is in: the last one for those that are not there."""
    found = unit * UNIT // GROUP + span
    if K % UNIT != 0:
        found = gl.minimum(found, (K - 1) // GROUP)
    return found


@gluon.jit
def _fetched(
    row, unit, t, word_stride, scale_stride, K: gl.constexpr, UNIT: gl.constexpr, SCALE: gl.constexpr,
    GROUP: gl.constexpr, SPANS: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """Of a unit of columns: words of rows g and of rows g + 8, their scales and their zero points, for each span of
    columns that has its own. `row` points to those of column 0. Words and packed scales are there for whole units."""
    words, scale_low, scale_high, zero_low, zero_high = row
    low = _words_at(words + unit * 32)
    high = _words_at(words + word_stride * 8 + unit * 32)
    if SCALE == "packed_e8m0" or SCALE == "packed_bf16":
        # scales of 16 columns: of those that the first two of four threads have, then of the others
        HALVES: gl.constexpr = 1 if GROUP >= 32 else 2
        at = (unit * HALVES + t * HALVES // 4) * scale_stride
        scales_low, scales_high = (gl.load(scale_low + at),), (gl.load(scale_high + at),)
    elif SCALE == "none":
        # nothing looks at them
        scales_low, scales_high = (low[0],), (high[0],)
    else:
        scales_low, scales_high = (), ()
        for span in gl.static_range(SPANS):
            at = _group(unit, span, K, UNIT, GROUP)
            scales_low = scales_low + (gl.load(scale_low + at).to(gl.float32),)
            scales_high = scales_high + (gl.load(scale_high + at).to(gl.float32),)
    zeros_low, zeros_high = scales_low, scales_high
    if ZERO != "":
        zeros_low, zeros_high = (), ()
        for span in gl.static_range(SPANS):
            at = _group(unit, span, K, UNIT, GROUP)
            zeros_low = zeros_low + (gl.load(zero_low + at),)
            zeros_high = zeros_high + (gl.load(zero_high + at),)
    return low, high, scales_low, scales_high, zeros_low, zeros_high


@gluon.jit
def _added(
    sums, fetched, tokens, held, ASM: gl.constexpr, OPERANDS: gl.constexpr, EXTRA: gl.constexpr, PARTS: gl.constexpr,
    SPANS: gl.constexpr, OWN: gl.constexpr, ZERO: gl.constexpr, BASE: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """`sums` and the products of a unit of columns. OWN: scales are those of sums, not of weights."""
    low, high, scales_low, scales_high, zeros_low, zeros_high = fetched
    less_low, less_high = zeros_low, zeros_high
    if ZERO != "":
        less_low, less_high = (), ()
        for span in gl.static_range(SPANS):
            less_low = less_low + (_pairs_of(zeros_low[span], BASE, BF16),)
            less_high = less_high + (_pairs_of(zeros_high[span], BASE, BF16),)
    l0 = _parts(low[0], scales_low, less_low, held, ASM, OPERANDS, EXTRA, PARTS)
    h0 = _parts(high[0], scales_high, less_high, held, ASM, OPERANDS, EXTRA, PARTS)
    l1 = _parts(low[1], scales_low, less_low, held, ASM, OPERANDS, EXTRA, PARTS)
    h1 = _parts(high[1], scales_high, less_high, held, ASM, OPERANDS, EXTRA, PARTS)
    l2 = _parts(low[2], scales_low, less_low, held, ASM, OPERANDS, EXTRA, PARTS)
    h2 = _parts(high[2], scales_high, less_high, held, ASM, OPERANDS, EXTRA, PARTS)
    l3 = _parts(low[3], scales_low, less_low, held, ASM, OPERANDS, EXTRA, PARTS)
    h3 = _parts(high[3], scales_high, less_high, held, ASM, OPERANDS, EXTRA, PARTS)
    for span in gl.static_range(SPANS):
        if OWN:
            nothing = gl.zeros_like(sums[0])
            products = (nothing, nothing, nothing, nothing)
        else:
            products = sums
        for part in gl.static_range(span * (PARTS // SPANS), (span + 1) * (PARTS // SPANS)):
            x = tokens[part]
            products = _multiplied(l0[part], h0[part], l1[part], h1[part], x[0], x[1], products, BF16)
            products = _multiplied(l2[part], h2[part], l3[part], h3[part], x[2], x[3], products, BF16)
        if OWN:
            s_low, s_high = scales_low[span], scales_high[span]
            sums = (
                sums[0] + products[0] * s_low,
                sums[1] + products[1] * s_low,
                sums[2] + products[2] * s_high,
                sums[3] + products[3] * s_high,
            )
        else:
            sums = products
    return sums


@gluon.jit
def _store(
    sums, first_row, first_token, end, N, row_scale, bias, y, TILES: gl.constexpr, EIGHTS: gl.constexpr,
    WARPS: gl.constexpr, ROW_SCALE: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Adds the warps' sums up and writes them to y, scaled by row and with the bias."""
    EACH: gl.constexpr = TILES * EIGHTS * 4
    both = gl.join(gl.join(sums[0], sums[1]), gl.join(sums[2], sums[3]))
    both = gl.permute(gl.reshape(both, [WARPS, 32, EACH]), [0, 2, 1])
    shared = gl.allocate_shared_memory(gl.float32, [WARPS, EACH, 32], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    shared.store(both)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    value = shared.slice(0, 1, dim=0).load(OUT)
    for warp in gl.static_range(1, WARPS):
        value += shared.slice(warp, 1, dim=0).load(OUT)
    FLAT: gl.constexpr = gl.SliceLayout(0, OUT)
    place = gl.expand_dims(gl.expand_dims(gl.arange(0, EACH, layout=gl.SliceLayout(1, FLAT)), 1), 0)
    lane = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, FLAT)), 0), 0)
    n = first_row + place // (4 * EIGHTS) * 16 + place % 2 * 8 + lane // 4
    m = first_token + place // 4 % EIGHTS * 8 + lane % 4 * 2 + place // 2 % 2
    if ROW_SCALE:
        value = value * gl.load(row_scale + n, mask=n < N, other=0.0)
    if BIAS:
        value = value + gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
    gl.store(y + m.to(gl.int64) * N + n, value.to(y.dtype.element_ty), mask=(n < N) & (m < end))


@gluon.jit(do_not_specialize=["tiles_m", "M"])
def fragments(
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
    K: gl.constexpr,
    EXPERTS: gl.constexpr,
    GATHERED: gl.constexpr,
    ASM: gl.constexpr,
    OPERANDS: gl.constexpr,
    EXTRA: gl.constexpr,
    PARTS: gl.constexpr,
    DEPTH: gl.constexpr,
    SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    FOLD: gl.constexpr,
    ZERO: gl.constexpr,
    BASE: gl.constexpr,
    ROW_SCALE: gl.constexpr,
    BIAS: gl.constexpr,
    BF16: gl.constexpr,
    BN: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    TOKENS_AHEAD: gl.constexpr,
    HELD: gl.constexpr,
    ZERO_AT: gl.constexpr,
) -> None:
    """Operands as those of `few_tokens`; `takes` of `omniplat.portable.weight_only_triton` says which it can have.

    AHEAD: units of columns whose words are asked for before the first is multiplied. TOKENS_AHEAD: those of the next
    unit are asked for before this one's are multiplied. HELD: what instructions take from registers; ZERO_AT: where
    the table has 0.
    """
    gl.static_assert(DEPTH == 32)
    UNIT: gl.constexpr = 32 * PARTS
    UNITS: gl.constexpr = (K + UNIT - 1) // UNIT
    EACH: gl.constexpr = (UNITS + WARPS - 1) // WARPS
    EVEN: gl.constexpr = K % UNIT == 0 and EACH * WARPS == UNITS and EACH % AHEAD == 0
    OWN: gl.constexpr = SCALE != "none" and not FOLD
    SPANS: gl.constexpr = UNIT // GROUP if OWN and GROUP < UNIT else 1
    gl.static_assert(PARTS % SPANS == 0)
    # a dimension is a power of two; three times one are three tensors
    THIRDS: gl.constexpr = 3 if BN % 3 == 0 else 1
    TILES: gl.constexpr = BN // (16 * THIRDS)
    EIGHTS: gl.constexpr = BM // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, TILES, EIGHTS], [32, 1, 1], [WARPS, 1, 1], [2, 1, 0])
    BY_ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    BY_TOKENS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    thread = gl.expand_dims(gl.expand_dims(gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, BY_ROWS)), 1), 2)
    tile = gl.expand_dims(gl.expand_dims(gl.arange(0, TILES, layout=gl.SliceLayout(0, BY_ROWS)), 0), 2)
    eight = gl.expand_dims(gl.expand_dims(gl.arange(0, EIGHTS, layout=gl.SliceLayout(0, BY_TOKENS)), 0), 1)
    g, t = thread % 32 // 4, thread % 4
    first_row = gl.program_id(0) * BN
    first_unit = thread // 32 * EACH
    steps = EACH
    if EXPERTS:
        expert = gl.load(tile_expert + gl.program_id(1)).to(gl.int64)
        first_token, end = gl.load(tile_first + gl.program_id(1)), gl.load(tile_end + gl.program_id(1))
        # nothing to do for a tile without tokens
        steps = gl.where(first_token < end, EACH, 0)
        m = first_token + eight * 8 + g
        x_row = gl.where(m < end, m, 0).to(gl.int64)
        if GATHERED:
            x_row = gl.load(x_rows + m, mask=m < end, other=0)
        words += expert * N * word_stride
        scale += expert * expert_scales
        zero += expert * expert_scales
        row_scale += expert * N
        bias += expert * N
    else:
        first_token, end = gl.program_id(1) * BM, M
        x_row = gl.minimum(first_token + eight * 8 + g, M - 1).to(gl.int64)
    x_at = x + x_row * x_stride + t * 8
    left = K - t * 8
    rows = ()
    sums = ()
    nothing = gl.zeros([32 * WARPS, TILES, EIGHTS], gl.float32, LAYOUT)
    for third in gl.static_range(THIRDS):
        # N is a multiple of 16: tiles are whole, or are not stored
        n = gl.minimum(first_row + (third * TILES + tile) * 16, N - 16) + g
        low, high = n, n + 8
        if not (SCALE == "packed_e8m0" or SCALE == "packed_bf16"):
            low, high = n // ROWS * scale_stride, (n + 8) // ROWS * scale_stride
        rows = rows + (
            (words + n.to(gl.int64) * word_stride + t * 8, scale + low, scale + high, zero + low, zero + high),
        )
        sums = sums + ((nothing, nothing, nothing, nothing),)
    held = _held(table, thread, HELD, ZERO_AT)
    fetched = ()
    for step in gl.static_range(AHEAD):
        for third in gl.static_range(THIRDS):
            unit = gl.minimum(first_unit + step, UNITS - 1)
            fetched = fetched + (
                _fetched(rows[third], unit, t, word_stride, scale_stride, K, UNIT, SCALE, GROUP, SPANS, ZERO),
            )
    if TOKENS_AHEAD:
        next_tokens = _tokens_at(x_at + first_unit * UNIT, left - first_unit * UNIT, PARTS, EVEN)
    for first in range(0, steps, AHEAD):
        for step in gl.static_range(AHEAD):
            at = first + step
            if TOKENS_AHEAD:
                tokens = next_tokens
                following = (first_unit + gl.minimum(at + 1, EACH - 1)) * UNIT
                there = gl.where(at + 1 < EACH, left - following, 0)
                next_tokens = _tokens_at(x_at + following, there, PARTS, EVEN)
            else:
                column = (first_unit + at) * UNIT
                tokens = _tokens_at(x_at + column, gl.where(at < EACH, left - column, 0), PARTS, EVEN)
            later = first_unit + gl.minimum(at + AHEAD, EACH - 1)
            if not EVEN:
                later = gl.minimum(later, UNITS - 1)
            added = ()
            for third in gl.static_range(THIRDS):
                now = fetched[0]
                fetched = fetched[1:] + (
                    _fetched(rows[third], later, t, word_stride, scale_stride, K, UNIT, SCALE, GROUP, SPANS, ZERO),
                )
                added = added + (
                    _added(sums[third], now, tokens, held, ASM, OPERANDS, EXTRA, PARTS, SPANS, OWN, ZERO, BASE, BF16),
                )
            sums = added
    for third in gl.static_range(THIRDS):
        _store(
            sums[third], first_row + third * TILES * 16, first_token, end, N, row_scale, bias, y,
            TILES, EIGHTS, WARPS, ROW_SCALE, BIAS,
        )  # fmt: skip
