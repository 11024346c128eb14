"""int8 by int8 in Triton, exact in int32, scaled and rounded once in the same kernel. Imports triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch, is_nvidia
from omniplat.portable.tensor_maps import Describe

#: Tiles of tokens that share the tiles of the weight while those are in the cache.
_BAND = 8


@triton.jit
def _tile(M, N, BM: tl.constexpr, BN: tl.constexpr, BAND: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    """First token and first row of the weight of this program's tile."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    program = tl.program_id(0)
    band = program // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    place = program % (BAND * tiles_n)
    return (band * BAND + place % height) * BM, (place // height) * BN


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    total,
    x_scale,
    scale,
    bias,
    y,
    m,
    n,
    M,
    N,
    ONE_TOKEN_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Scales sums int32 [BM, BN] by row and by token, adds the bias, rounds once."""
    m_inside, n_inside = m < M, n < N
    value = total.to(tl.float32) * tl.load(scale + n, mask=n_inside, other=0.0)[None, :]
    if ONE_TOKEN_SCALE:
        value = value * tl.load(x_scale)
    else:
        value = value * tl.load(x_scale + m, mask=m_inside, other=0.0)[:, None]
    if BIAS:
        value = value + tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, value.to(y.dtype.element_ty), mask=m_inside[:, None] & n_inside[None, :])


@triton.jit(do_not_specialize=["M"])
def _by_pointers(  # type: ignore[no-untyped-def]
    x,
    codes,
    x_scale,
    scale,
    bias,
    y,
    M,
    N,
    K: tl.constexpr,
    ONE_TOKEN_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
) -> None:
    first_m, first_n = _tile(M, N, BM, BN, BAND)
    m, n, k = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN), tl.arange(0, BK)
    # rows beyond the last are read again instead of not at all, and never written
    x_at = x + (m % M).to(tl.int64)[:, None] * K + k[None, :]
    codes_at = codes + (n % N).to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros([BM, BN], dtype=tl.int32)
    for start in range(0, K, BK):
        if K % BK == 0:
            a, b = tl.load(x_at + start), tl.load(codes_at + start)
        else:
            a = tl.load(x_at + start, mask=(start + k < K)[None, :], other=0)
            b = tl.load(codes_at + start, mask=(start + k < K)[:, None], other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    _store(total, x_scale, scale, bias, y, m, n, M, N, ONE_TOKEN_SCALE, BIAS)


@triton.jit(do_not_specialize=["M"])
def _by_descriptors(  # type: ignore[no-untyped-def]
    x,
    codes,
    x_scale,
    scale,
    bias,
    y,
    M,
    N,
    K: tl.constexpr,
    ONE_TOKEN_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
) -> None:
    """With tiles that the device's copy engine fetches; what lies beyond an edge reads as 0."""
    first_m, first_n = _tile(M, N, BM, BN, BAND)
    total = tl.zeros([BM, BN], dtype=tl.int32)
    for start in range(0, K, BK):
        a, b = x.load([first_m, start]), codes.load([first_n, start])
        total = tl.dot(a, b.T, total, out_dtype=tl.int32)
    m, n = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN)
    _store(total, x_scale, scale, bias, y, m, n, M, N, ONE_TOKEN_SCALE, BIAS)


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens, rows of the weight and columns of one step, and how a program is run.

    `descriptors`: the copy engine fetches tiles (NVIDIA from sm90 on; K is a multiple of 16).
    """

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int
    descriptors: bool = False


@lru_cache(maxsize=4096)
def tile_of(m: int, columns: int, device: torch.device) -> Tile:
    """Measured on an H200; see docs/performance.md."""
    if m <= 16:
        return Tile(16, 64, 256, 4, 4)
    if m <= 32:
        return Tile(32, 64, 256, 4, 4)
    if m <= 512:
        return Tile(64, 128, 128, 4, 4)
    return Tile(128, 128, 128, 4, 3, descriptors=columns % 16 == 0 and has_copy_engine(device))


@lru_cache(maxsize=64)
def has_copy_engine(device: torch.device) -> bool:
    """True on NVIDIA from sm90 on, where this Triton has descriptors (3.4 and later)."""
    return is_nvidia(device, (9, 0)) and find_spec("triton.tools.tensor_descriptor") is not None


def int8_product(
    x: torch.Tensor,
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
) -> torch.Tensor:
    """`x` int8 [M, K] by `codes` int8 [N, K], both contiguous, to [M, N] in `out_dtype`.

    `x_scale` f32 [M, 1] or [1, 1], `scale` f32 [1, N]: y = int32 * scale * x_scale + bias, each in f32.
    """
    m, columns = x.shape
    n = codes.shape[0]
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    _launch_of(tile, columns, x_scale.numel() == 1, bias is not None)(
        (-(-m // tile.tokens) * -(-n // tile.rows), 1, 1), (x, codes, x_scale, scale, bias, y), (m, n)
    )
    return y


@lru_cache(maxsize=1024)
def _launch_of(tile: Tile, columns: int, one_token_scale: bool, bias: bool) -> Launch:
    constants = {
        "K": columns,
        "ONE_TOKEN_SCALE": one_token_scale,
        "BIAS": bias,
        "BM": tile.tokens,
        "BN": tile.rows,
        "BK": tile.columns,
        "BAND": _BAND,
    }
    return Launch(
        _by_descriptors if tile.descriptors else _by_pointers,
        constants,
        described=_described(tile) if tile.descriptors else {},
        num_warps=tile.warps,
        num_stages=tile.stages,
        # a product and a sum that become one operation would round once where torch's form rounds twice
        enable_fp_fusion=False,
    )


def _described(tile: Tile) -> dict[int, Describe]:
    """The first two tensors, in blocks of the tile."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    def blocks_of(rows: int) -> Describe:
        return lambda tensor: TensorDescriptor.from_tensor(tensor, [rows, tile.columns])

    return {0: blocks_of(tile.tokens), 1: blocks_of(tile.rows)}
