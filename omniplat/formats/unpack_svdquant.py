"""SVDQuant's tensors to the canonical form: a 4-bit residual like any other, and a low-rank pair beside it.

y = Q(x * pre_scale) R^T + (x D) U^T + bias, with R the residual, D [K, R] and U [N, R] the pair, pre_scale the inverse
of `smooth_factor`. vllm-omni keeps everything in rows. nunchaku keeps codes, scales, vectors and the pair in the order
in which the threads of a warp load them: 128 rows x 64 columns for codes (8 x 4 threads, 2 x 2 registers of 8 codes),
128 rows for scales and vectors, 16 x 16 for the pair. Both orders are permutations of whole bytes, undone here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from omniplat.canonical import Array
from omniplat.formats.recognise.svdquant import WARP_TILES
from omniplat.formats.storage import Storage
from omniplat.formats.unpack_codes import StoredModule
from omniplat.scheme import Scheme, low_rank_base

_WARP_N, _WARP_K = 128, 64
#: K is loaded two tiles at a time, and vectors along K in runs of as many entries as a tile has rows.
_UNROLLED_K = 128
_PAIR = 16


def residual(m: StoredModule) -> StoredModule:
    """The residual as a module of a plain scheme, with `pre_scale` and `bias`. Raises as `m.error`."""
    base = low_rank_base(m.quant)
    if base is None:
        raise m.error(f"{m.scheme.weight_id} has no low-rank form")
    tiled = m.storage.packing == WARP_TILES
    if tiled and (m.n % _WARP_N or m.k % _UNROLLED_K):
        raise m.error(f"{m.n} x {m.k} does not fill tiles of {_WARP_N} x {_UNROLLED_K}")
    codes, scale = m.get("codes").view(np.uint8), m.get("scale")
    groups = m.k // base.group_size
    if codes.shape != (m.n, m.k // 2):
        raise m.shape_error("codes", [m.n, m.k // 2], codes.shape)
    if scale.shape != (groups, m.n):
        raise m.shape_error("scale", [groups, m.n], scale.shape)
    arrays: dict[str, Array] = {
        "codes": _codes_in_rows(codes) if tiled else codes,
        "scale": np.ascontiguousarray(_scale_in_rows(scale, base.group_size) if tiled else scale.T),
    }
    smooth = _vector(m, "smooth_factor", m.k, tiled)
    if not np.isfinite(smooth).all() or (smooth == 0).any():
        raise m.error("scale not finite: smooth_factor has a 0, NaN or Inf")
    arrays["pre_scale"] = np.float32(1) / smooth
    if base.second_scale == "global":
        tensor_scale = m.get("tensor_scale").astype(np.float32)
        if tensor_scale.size != 1:
            raise m.shape_error("tensor_scale", [1], tensor_scale.shape)
        arrays["global_scale"] = (_vector(m, "channel_scale", m.n, tiled) * tensor_scale.reshape(())).reshape(m.n, 1)
    if "bias" in m.arrays:
        arrays["bias"] = _untile_vector(m.arrays["bias"]) if tiled else m.arrays["bias"]
    scheme = Scheme(base, None, pre_scale=True)
    return replace(m, arrays=arrays, scheme=scheme, storage=Storage("nibbles_k", m.storage.container))


def low_rank_pair(m: StoredModule) -> dict[str, Array]:
    """`low_rank_down` [K, R] and `low_rank_up` [N, R], in their stored dtype."""
    pair = {}
    for role, rows in (("low_rank_down", m.k), ("low_rank_up", m.n)):
        stored = m.get(role)
        if stored.ndim != 2 or stored.shape[0] != rows:
            raise m.shape_error(role, [rows, "R"], stored.shape)
        if m.storage.packing == WARP_TILES:
            if rows % _PAIR or stored.shape[1] % _PAIR:
                raise m.error(f"{role} {list(stored.shape)} does not fill tiles of {_PAIR} x {_PAIR}")
            stored = _pair_in_rows(stored, is_down=role == "low_rank_down")
        pair[role] = stored
    if pair["low_rank_down"].shape[1] != pair["low_rank_up"].shape[1]:
        raise m.error("the two factors of the low-rank pair have different ranks")
    return pair


def _vector(m: StoredModule, role: str, size: int, tiled: bool) -> Array:
    stored = m.get(role)
    if stored.shape not in ((size,), (size, 1)):
        raise m.shape_error(role, [size], stored.shape)
    flat = stored.reshape(size)
    return (_untile_vector(flat) if tiled else flat).astype(np.float32)


def _codes_in_rows(codes: Array) -> Array:
    """uint8 [N, K/2] out of warp tiles. A register holds eight codes of a row in four bytes, lowest column first."""
    n, half = codes.shape
    tall, wide = n // _WARP_N, 2 * half // _WARP_K
    # tile row, tile column, 16-row pack, thread row, thread column, 8-row half, 32-column half, bytes
    loads = codes.reshape(tall, wide, 8, 8, 4, 2, 2, 4)
    return np.ascontiguousarray(loads.transpose(0, 2, 5, 3, 1, 6, 4, 7)).reshape(n, half)


def _scale_in_rows(scale: Array, group_size: int) -> Array:
    """[G, N] out of warp tiles to [N, G]."""
    groups, n = scale.shape
    if group_size == 16:
        # four groups of a row in one word: tile, 64 columns, 8 rows apart by 1, 4 apart by 8, 4 apart by 32, groups
        loads = scale.reshape(n // _WARP_N, groups // 4, 8, 4, 4, 4)
        words: Array = loads.transpose(0, 4, 3, 2, 1, 5).reshape(n, groups)
        return words
    rows: Array = _rows_of_scale(scale.reshape(n // _WARP_N, groups, _WARP_N)).transpose(0, 2, 1).reshape(n, groups)
    return rows


def _rows_of_scale(loads: Array) -> Array:
    """[..., 128] in load order (8 x 4 threads, two pairs each) to row order."""
    lead = loads.shape[:-1]
    parts = loads.reshape(*lead, 8, 4, 2, 2)
    rows: Array = np.swapaxes(parts, -3, -2).reshape(*lead, _WARP_N)
    return rows


def _untile_vector(stored: Array) -> Array:
    return np.ascontiguousarray(_rows_of_scale(stored.reshape(-1, _WARP_N)).reshape(stored.shape))


def _pair_in_rows(stored: Array, *, is_down: bool) -> Array:
    """[C, R] out of tiles of 16 x 16; the down factor was tiled as [R, C]."""
    c, r = stored.shape
    # tile of c, tile of r, thread row, thread column, two halves of 8 rows, two halves of 8 columns, pair
    loads = stored.reshape(c // _PAIR, r // _PAIR, 8, 4, 2, 2, 2)
    tiles = loads.transpose(0, 1, 4, 2, 5, 3, 6).reshape(c // _PAIR, r // _PAIR, _PAIR, _PAIR)
    if is_down:
        return np.ascontiguousarray(tiles.transpose(1, 2, 0, 3).reshape(r, c).T)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3).reshape(c, r))
