"""fp8 by e2m1 on Hopper: weights stay in 4 bits in memory, and become e4m3 in the registers of the tensor core.

The product is computed transposed: a tile of rows of the weight, 64 for each of one or two groups of warps, is the left
operand, which Hopper's tensor core takes from registers; a tile of tokens is the right one, in shared memory. Another
group's warp fetches both with the device's copy engine, some steps ahead. Half a block of columns is decoded while the
other half is multiplied. Programs stay and take tile after tile. They start while the quantizer ends: see
`omniplat_cuda.kernels.predecessor`.

Gluon is experimental, and its names differ between releases of Triton: see `hopper_copies`. Imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from omniplat.portable.launch import Launch
from omniplat.portable.tensor_maps import Describe
from omniplat_cuda.kernels import predecessor
from omniplat_cuda.kernels.decoded_ptx import CONSTRAINTS, decoder
from omniplat_cuda.kernels.decoded_words import BLOCK
from omniplat_cuda.kernels.hopper_copies import async_load, async_store
from omniplat_cuda.kernels.int8_gemm_hopper import multiprocessors

#: Rows of the weight that a group of warps multiplies: what one instruction takes.
ROWS = 64
#: Registers of a thread of the second group that multiplies, and of the group that fetches: the first has the rest.
_MULTIPLYING, _FETCHING = 232, 24


@gluon.jit
def _place(tile, tiles_m, BM: gl.constexpr, BN: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    """First token and first row of the weight of a tile."""
    return (tile % tiles_m) * BM, (tile // tiles_m) * BN


@gluon.jit
def _producer(  # type: ignore[no-untyped-def]
    x,
    words,
    shifts,
    fetched,
    barriers,
    sizes,
    BLOCKS: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
):
    predecessor.wait()
    x_tiles, word_tiles, shift_tiles = fetched
    full, empty = barriers
    tiles, tiles_m, _, _ = sizes
    step = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, BM, BN)
        for block in range(BLOCKS):
            stage = step % STAGES
            # what was initialised counts as emptied once
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, x.block_type.nbytes + words.block_type.nbytes + shifts.block_type.nbytes)
            async_load(x, [m, block * 128], ready, x_tiles.index(stage))
            async_load(words, [n, block * 64], ready, word_tiles.index(stage))
            async_load(shifts, [block, n], ready, shift_tiles.index(stage))
            step += 1


@gluon.jit
def _decoded(  # type: ignore[no-untyped-def]
    words,
    shifts,
    ASM: gl.constexpr,
    OPERANDS: gl.constexpr,
    ROWS: gl.constexpr,
    operand: gl.constexpr,
):
    """e4m3 [ROWS, 64] of two groups."""
    codes = gl.inline_asm_elementwise(ASM, OPERANDS, [words, shifts], dtype=gl.uint8, is_pure=True, pack=16)
    # [row, q, group, half, i]: a register's four bytes lie side by side already
    codes = gl.permute(gl.reshape(codes, [ROWS, 4, 2, 2, 4]), [0, 2, 3, 1, 4])
    return gl.convert_layout(gl.reshape(codes, [ROWS, 64]), operand).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _stored(  # type: ignore[no-untyped-def]
    total,
    y,
    y_tile,
    scales,
    sizes,
    m,
    n,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    EVEN: gl.constexpr,
    BIAS: gl.constexpr,
    COPIED: gl.constexpr,
    PENDING: gl.constexpr,
    sums: gl.constexpr,
):
    """Scales sums f32 [ROWS, TOKENS] by row and by token, adds the bias, rounds once, writes."""
    scale, x_scale, bias = scales
    _, _, M, N = sizes
    rows = n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums))
    tokens = m + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, sums))
    by_token = gl.load(x_scale + tokens) if EVEN else gl.load(x_scale + tokens, mask=tokens < M, other=0.0)
    value = total * gl.load(scale + rows, mask=rows < N, other=0.0)[:, None] * by_token[None, :]
    if BIAS:
        value = value + gl.load(bias + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    if COPIED:
        value = value.to(y.dtype)
        # of the copies that are under way none but the last `PENDING` may still read this tile
        tma.store_wait(PENDING)
        y_tile.permute((1, 0)).store(value)
        fence_async_shared()
        async_store(y, [m, n], y_tile)
    else:
        at = y + tokens.to(gl.int64)[None, :] * N + rows[:, None]
        gl.store(at, value.to(y.dtype.element_ty), mask=(tokens < M)[None, :] & (rows < N)[:, None])


@gluon.jit
def _consumer(  # type: ignore[no-untyped-def]
    y,
    y_tiles,
    fetched,
    barriers,
    scales,
    sizes,
    FIRST_ROW: gl.constexpr,
    BLOCKS: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
    BIAS: gl.constexpr,
    COPIED: gl.constexpr,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    OPERANDS: gl.constexpr,
):
    predecessor.wait()
    x_tiles, word_tiles, shift_tiles = fetched
    full, empty = barriers
    tiles, tiles_m, _, _ = sizes
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 4)
    # A thread has 16 bytes of two rows: the words of one q. Columns of registers, of lanes, then rows of warps.
    held: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, 64],
    )
    shifts_held: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32]], [], [1, ROWS]
    )
    step = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, BM, BN)
        total = gl.zeros([ROWS, BM], gl.float32, sums)
        for block in range(BLOCKS):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            words = word_tiles.index(stage).slice(FIRST_ROW, ROWS, 0).load(held)
            shifts = shift_tiles.index(stage).slice(FIRST_ROW, ROWS, 1).load(shifts_held)
            shifts = gl.convert_layout(gl.reshape(shifts, [ROWS]), gl.SliceLayout(1, held))
            words, shifts = gl.broadcast(words, gl.expand_dims(shifts, 1))
            x = x_tiles.index(stage)
            left = _decoded(words, shifts, FIRST, OPERANDS, ROWS, operand)
            right = x.slice(0, 64, 1).permute((1, 0))
            total = warpgroup_mma(left, right, total, use_acc=block > 0, is_async=True)
            left = _decoded(words, shifts, SECOND, OPERANDS, ROWS, operand)
            total = warpgroup_mma(left, x.slice(64, 64, 1).permute((1, 0)), total, is_async=True)
            # The other group multiplies meanwhile: to go on before the end of these products was no faster.
            total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(empty.index(stage), count=1)
            step += 1
        row = n + FIRST_ROW
        if BM <= 128:
            _stored(total, y, y_tiles.index(0), scales, sizes, m, row, ROWS, BM, EVEN, BIAS, COPIED, 0, sums)
        else:
            halves = gl.permute(gl.reshape(total, [ROWS, 2, BM // 2]), [0, 2, 1])
            first, second = gl.split(halves)
            first, second = gl.convert_layout(first, sums), gl.convert_layout(second, sums)
            half: gl.constexpr = BM // 2
            _stored(first, y, y_tiles.index(0), scales, sizes, m, row, ROWS, half, EVEN, BIAS, COPIED, 1, sums)
            _stored(second, y, y_tiles.index(1), scales, sizes, m + half, row, ROWS, half, EVEN, BIAS, COPIED, 1, sums)
    if COPIED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _product(  # type: ignore[no-untyped-def]
    x,
    words,
    shifts,
    y,
    scale,
    x_scale,
    bias,
    M,
    N,
    BLOCKS: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
    BIAS: gl.constexpr,
    COPIED: gl.constexpr,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    OPERANDS: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    FETCHING: gl.constexpr,
):
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BM, 128], x.layout)
    word_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES, BN, 64], words.layout)
    shift_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 1, BN], shifts.layout)
    if COPIED:
        parts: gl.constexpr = 1 if BM <= 128 else 2
        y_first = gl.allocate_shared_memory(y.dtype, [parts, BM // parts, ROWS], y.layout)
        y_second = gl.allocate_shared_memory(y.dtype, [parts, BM // parts, ROWS], y.layout)
    else:
        y_first = shift_tiles
        y_second = shift_tiles
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=BN // ROWS)
    tiles_m = gl.cdiv(M, BM)
    tiles = tiles_m * gl.cdiv(N, BN)
    fetched = (x_tiles, word_tiles, shift_tiles)
    barriers = (full, empty)
    scales = (scale, x_scale, bias)
    sizes = (tiles, tiles_m, M, N)
    # fmt: off
    if BN == ROWS:
        gl.warp_specialize(
            [
                (_consumer, (y, y_first, fetched, barriers, scales, sizes, 0, BLOCKS, BM, BN, ROWS, STAGES, EVEN, BIAS,
                             COPIED, FIRST, SECOND, OPERANDS)),
                (_producer, (x, words, shifts, fetched, barriers, sizes, BLOCKS, BM, BN, STAGES)),
            ],
            [1],
            [FETCHING],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (y, y_first, fetched, barriers, scales, sizes, 0, BLOCKS, BM, BN, ROWS, STAGES, EVEN, BIAS,
                             COPIED, FIRST, SECOND, OPERANDS)),
                (_consumer, (y, y_second, fetched, barriers, scales, sizes, ROWS, BLOCKS, BM, BN, ROWS, STAGES, EVEN,
                             BIAS, COPIED, FIRST, SECOND, OPERANDS)),
                (_producer, (x, words, shifts, fetched, barriers, sizes, BLOCKS, BM, BN, STAGES)),
            ],
            [4, 1],
            [MULTIPLYING, FETCHING],
        )
    # fmt: on


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens of a tile (a power of two from 16 to 256), its rows of the weight (64, for one group of warps, or 128, for
    two), and blocks of columns that are fetched ahead."""

    tokens: int
    rows: int
    stages: int

    @property
    def written(self) -> int:
        """Tokens that are written at once."""
        return min(self.tokens, 128)


#: Tiles, and nanoseconds that a multiprocessor took for one block of columns of one, on an H200: with little to choose
#: between rounds, those of 64 rows are for weights and calls so small that they leave multiprocessors without work.
_TILES = (
    (Tile(16, 64, 8), 230),
    (Tile(32, 64, 12), 240),
    (Tile(64, 64, 12), 270),
    (Tile(16, 128, 8), 300),
    (Tile(64, 128, 8), 345),
    (Tile(128, 128, 6), 450),
    (Tile(256, 128, 4), 720),
)


@lru_cache(maxsize=4096)
def tile_of(m: int, n: int, device: torch.device) -> Tile:
    """The tile with which the multiprocessors of `device` are done first."""

    def time(measured: tuple[Tile, int]) -> int:
        tile, nanoseconds = measured
        return -(-_tiles(m, n, tile) // multiprocessors(device)) * nanoseconds

    return min(_TILES, key=time)[0]


def _tiles(m: int, n: int, tile: Tile) -> int:
    return -(-m // tile.tokens) * -(-n // tile.rows)


def decoded_product(
    x: torch.Tensor,
    words: torch.Tensor,
    shifts: torch.Tensor,
    x_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    wide: bool,
    tile: Tile,
) -> torch.Tensor:
    """`x` uint8 [M, K] (bytes of e4m3fn, contiguous; K a multiple of 32) by a weight of `decoded_words`, to [M, N].

    `x_scale` f32 [M, 1], `scale` f32 [1, N]: y = sums * scale * x_scale + bias in f32, rounded once. N is a multiple of
    8. `wide` as of `omniplat_cuda.kernels.decoded_ptx.decoder`.
    """
    m = x.shape[0]
    blocks, n = shifts.shape
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    programs = min(_tiles(m, n, tile), multiprocessors(x.device))
    launch = _launch_of(tile, blocks, wide, m % tile.tokens == 0, bias is not None, out_dtype.itemsize)
    launch((programs, 1, 1), (x.view(torch.float8_e4m3fn), words, shifts, y, scale, x_scale, bias), (m, n))
    return y


@lru_cache(maxsize=1024)
def _launch_of(tile: Tile, blocks: int, wide: bool, even: bool, bias: bool, out_bytes: int) -> Launch:
    # tiles of four bytes a number would be too much for shared memory: threads write those themselves
    copied = out_bytes == 2
    constants: dict[str, Any] = {
        "BLOCKS": blocks,
        "BM": tile.tokens,
        "BN": tile.rows,
        "ROWS": ROWS,
        "STAGES": tile.stages,
        "EVEN": even,
        "BIAS": bias,
        "COPIED": copied,
        "FIRST": decoder(0, wide),
        "SECOND": decoder(2, wide),
        "OPERANDS": CONSTRAINTS,
        "MULTIPLYING": _MULTIPLYING,
        "FETCHING": _FETCHING,
    }
    described = {
        0: _described(tile.tokens, BLOCK, 128, bits=8),
        1: _described(tile.rows, BLOCK // 2, 64, bits=8),
        2: _described(1, tile.rows, 0, bits=32),
    }
    if copied:
        described[3] = _described(tile.written, ROWS, 128, bits=16)
    # a product and a sum that become one operation would round once where torch's form rounds twice
    return Launch(_product, constants, described=described, num_warps=4, enable_fp_fusion=False, launch_pdl=True)


def _described(rows: int, columns: int, swizzled: int, bits: int) -> Describe:
    """A contiguous matrix in tiles, whose rows are swizzled over that many bytes of shared memory."""
    layout = gl.NVMMASharedLayout(swizzled, bits, rank=2)

    def describe(matrix: torch.Tensor) -> TensorDescriptor:
        # strides of its shape: a matrix of a single row may have any
        return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, columns], layout)

    return describe
