"""int8 by int8 on Hopper, in Gluon: exact in int32, and scaled and rounded as by `omniplat.portable.int8_gemm_triton`.

A program stays on each multiprocessor. One warp has the copy engine fetch tiles of both operands into a ring in shared
memory; two warpgroups take the tiles of the output in turn, so that one multiplies while the other scales and stores
("ping-pong", as in CUTLASS). A product starts while its quantizer ends: see `omniplat_cuda.kernels.predecessor`.

Gluon is experimental, and its names differ between releases of Triton: see `hopper_copies`. Imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
from omniplat_cuda.kernels.hopper_copies import async_load, async_store


@gluon.jit
def _tiles(M, N, BM: gl.constexpr, BN: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    return ((M + BM - 1) // BM) * ((N + BN - 1) // BN)


@gluon.jit
def _tile(tile, M, N, BM: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr):  # type: ignore[no-untyped-def]
    """First token and first row of the weight of a tile of the output."""
    tiles_m, tiles_n = (M + BM - 1) // BM, (N + BN - 1) // BN
    band = tile // (BAND * tiles_n)
    height = gl.minimum(tiles_m - band * BAND, BAND)
    place = tile % (BAND * tiles_n)
    return (band * BAND + place % height) * BM, (place // height) * BN


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    x, codes, a, b, full, empty, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What lies beyond an edge arrives as 0."""
    predecessor.wait()
    stage = 0
    phase = 1  # stages are empty at first
    for tile in range(gl.program_id(0), _tiles(M, N, BM, BN), gl.num_programs(0)):
        first_m, first_n = _tile(tile, M, N, BM, BN, BAND)
        for start in range(0, K, BK):
            mbarrier.wait(empty.index(stage), phase)
            arrived = full.index(stage)
            mbarrier.expect(arrived, (BM + BN) * BK)
            async_load(x, [first_m, start], arrived, a.index(stage))
            async_load(codes, [first_n, start], arrived, b.index(stage))
            stage += 1
            wrapped = stage == STAGES
            stage = gl.where(wrapped, 0, stage)
            phase = gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    WHICH: gl.constexpr, x_scale, scale, bias, y, a, b, c, full, empty, turn, M, N, K,
    ONE_TOKEN_SCALE: gl.constexpr, BIAS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Every second tile of this program, from tile number WHICH on."""
    predecessor.wait()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 32])
    steps = (K + BK - 1) // BK
    fetched = WHICH * steps  # before this tile
    turn_phase = WHICH ^ 1  # the first turn is that of WHICH = 0
    first = gl.program_id(0) + WHICH * gl.num_programs(0)
    for tile in range(first, _tiles(M, N, BM, BN), 2 * gl.num_programs(0)):
        first_m, first_n = _tile(tile, M, N, BM, BN, BAND)
        total = gl.zeros([BM, BN], gl.int32, layout)
        stage = fetched % STAGES
        phase = (fetched // STAGES) & 1
        # barriers tell odd phases from even ones only: before its turn a warpgroup would take others' steps for its own
        mbarrier.wait(turn.index(WHICH), turn_phase)
        for start in range(0, K, BK):
            mbarrier.wait(full.index(stage), phase)
            total = warpgroup_mma(a.index(stage), b.index(stage).permute((1, 0)), total, is_async=True)
            # All but this one are done: the stage before has been read. It is told from `stage`, because Triton carries
            # no variable through a loop that is equal to another as the loop begins.
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=start > 0)
            stage += 1
            wrapped = stage == STAGES
            stage = gl.where(wrapped, 0, stage)
            phase = gl.where(wrapped, phase ^ 1, phase)
        mbarrier.arrive(turn.index(1 - WHICH))
        turn_phase ^= 1
        fetched += 2 * steps
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
        _store(total, c.index(WHICH), y, x_scale, scale, bias, first_m, first_n, M, N, ONE_TOKEN_SCALE, BIAS)
    tma.store_wait(0)


@gluon.jit
def _store(  # type: ignore[no-untyped-def]
    total, staged, y, x_scale, scale, bias, first_m, first_n, M, N,
    ONE_TOKEN_SCALE: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Scales sums int32 by row and by token, adds the bias, rounds once; in parts of the width of `staged`."""
    rows: gl.constexpr = total.shape[0]
    columns: gl.constexpr = total.shape[1]
    if columns > staged.shape[1]:
        half: gl.constexpr = columns // 2
        left, right = total.reshape([rows, 2, half]).permute((0, 2, 1)).split()
        _store(left, staged, y, x_scale, scale, bias, first_m, first_n, M, N, ONE_TOKEN_SCALE, BIAS)
        _store(right, staged, y, x_scale, scale, bias, first_m, first_n + half, M, N, ONE_TOKEN_SCALE, BIAS)
    else:
        m = first_m + gl.arange(0, rows, gl.SliceLayout(1, total.type.layout))
        n = first_n + gl.arange(0, columns, gl.SliceLayout(0, total.type.layout))
        value = total.to(gl.float32) * gl.load(scale + n, mask=n < N, other=0.0)[None, :]
        if ONE_TOKEN_SCALE:
            value = value * gl.load(x_scale)
        else:
            value = value * gl.load(x_scale + m, mask=m < M, other=0.0)[:, None]
        if BIAS:
            value = value + gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
        # the part before has been read
        tma.store_wait(0)
        staged.store(value.to(y.dtype))
        fence_async_shared()
        async_store(y, [first_m, first_n], staged)


@gluon.jit(do_not_specialize=["M"])
def _ping_pong(  # type: ignore[no-untyped-def]
    x, codes, x_scale, scale, bias, y, M, N, K,
    ONE_TOKEN_SCALE: gl.constexpr, BIAS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    a = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    b = gl.allocate_shared_memory(codes.dtype, [STAGES, BN, BK], codes.layout)
    c = gl.allocate_shared_memory(y.dtype, [2, BM, y.block_shape[1]], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    gl.warp_specialize(
        [
            (_multiply, (0, x_scale, scale, bias, y, a, b, c, full, empty, turn, M, N, K,
                         ONE_TOKEN_SCALE, BIAS, BM, BN, BK, BAND, STAGES)),
            (_multiply, (1, x_scale, scale, bias, y, a, b, c, full, empty, turn, M, N, K,
                         ONE_TOKEN_SCALE, BIAS, BM, BN, BK, BAND, STAGES)),
            (_fetch, (x, codes, a, b, full, empty, M, N, K, BM, BN, BK, BAND, STAGES)),
        ],
        [4, 1],
        # registers of a thread: what fetching does not need is left to those who hold sums
        [240, 24],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens, rows of the weight and columns of one step; a ring of `stages` steps.

    The output leaves in parts of `part` columns. `band` tiles of tokens share the tiles of the weight while those are
    in the cache. Defaults were measured on an H200; see docs/performance.md.
    """

    tokens: int = 128
    rows: int = 128
    columns: int = 128
    stages: int = 6
    part: int = 32
    band: int = 16


TILE = Tile()


def int8_product(
    x: torch.Tensor,
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile = TILE,
) -> torch.Tensor:
    """As `omniplat.portable.int8_gemm_triton.int8_product`, for K a multiple of 16, N of 8 and outputs of 16 bits."""
    m, columns = x.shape
    n = codes.shape[0]
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    programs = min(multiprocessors(x.device), -(-m // tile.tokens) * -(-n // tile.rows))
    _launch_of(tile, x_scale.numel() == 1, bias is not None)(
        (programs, 1, 1), (x, codes, x_scale, scale, bias, y), (m, n, columns)
    )
    return y


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Of the device: as many programs run at once."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=64)
def _launch_of(tile: Tile, one_token_scale: bool, bias: bool) -> Launch:
    constants = {
        "ONE_TOKEN_SCALE": one_token_scale,
        "BIAS": bias,
        "BM": tile.tokens,
        "BN": tile.rows,
        "BK": tile.columns,
        "BAND": tile.band,
        "STAGES": tile.stages,
    }
    described = {
        0: _described(tile.tokens, tile.columns, bits=8),
        1: _described(tile.rows, tile.columns, bits=8),
        5: _described(tile.tokens, tile.part, bits=16),
    }
    # a product and a sum that become one operation would round once where torch's form rounds twice
    return Launch(_ping_pong, constants, described=described, num_warps=4, enable_fp_fusion=False, launch_pdl=True)


def _described(rows: int, columns: int, bits: int) -> Describe:
    """In blocks of `rows` by `columns` elements of so many bits."""
    layout = gl.NVMMASharedLayout(min(128, columns * bits // 8), bits)
    return lambda tensor: TensorDescriptor.from_tensor(tensor, [rows, columns], layout)
