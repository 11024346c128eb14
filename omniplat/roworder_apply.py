"""Rows of a fused weight from the order in which they lie on disk to canonical order, and back.

Canonical order is [q; k; v] and [gate; up] (`roworder.py`). Everything with one entry per row follows: codes, scales
of any width, zero points, global scales, bias. A 2-D scale covers a block of rows, so it can follow only an order that
moves whole blocks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from omniplat.canonical import ROW_ROLES, CanonicalWeight
from omniplat.errors import InvalidCheckpointError
from omniplat.roworder import RowOrder

Rows = NDArray[np.int64]


def row_permutation(order: RowOrder, n: int) -> Rows:
    """For each canonical row the disk row that holds it: int64 [n]. `canonical = disk[row_permutation(order, n)]`.

    Raises InvalidCheckpointError where `n` rows do not have this order, or its kind is unknown.
    """
    rows = np.arange(n)
    if order.kind == "as_is":
        return rows
    if order.kind in ("halves_swapped", "interleaved"):
        if n % 2:
            raise InvalidCheckpointError(f"row order {order.kind} needs an even number of rows, found {n}")
        if order.kind == "interleaved":
            return np.concatenate([rows[0::2], rows[1::2]])
        return np.concatenate([rows[n // 2 :], rows[: n // 2]])
    if order.kind == "qkv_per_kv_head":
        needed = order.kv_heads * (order.q_per_kv + 2) * order.head_dim
        if n != needed or n == 0:
            raise InvalidCheckpointError(
                f"row order qkv_per_kv_head of {order.kv_heads} KV heads, {order.q_per_kv} queries each, head size "
                f"{order.head_dim} needs {needed} rows, found {n}"
            )
        heads = rows.reshape(order.kv_heads, order.q_per_kv + 2, order.head_dim)
        parts = (heads[:, : order.q_per_kv], heads[:, order.q_per_kv], heads[:, order.q_per_kv + 1])
        return np.concatenate([part.reshape(-1) for part in parts])
    raise InvalidCheckpointError(f"unknown row order {order.kind!r}")


def to_canonical_rows(weight: CanonicalWeight, order: RowOrder) -> CanonicalWeight:
    """The weight with its rows in canonical order. Raises InvalidCheckpointError (see `row_permutation`, and where the
    order would cut the blocks of a 2-D scale)."""
    return _permuted(weight, row_permutation(order, weight.out_features), order)


def to_disk_rows(weight: CanonicalWeight, order: RowOrder) -> CanonicalWeight:
    """The inverse of `to_canonical_rows`, with the same errors."""
    return _permuted(weight, np.argsort(row_permutation(order, weight.out_features)), order)


def _permuted(weight: CanonicalWeight, rows: Rows, order: RowOrder) -> CanonicalWeight:
    if order.kind == "as_is":
        return weight
    quant, n = weight.scheme.weight, weight.out_features
    tensors = dict(weight.tensors)
    for role in ROW_ROLES:
        if role not in tensors:
            continue
        array = tensors[role]
        # a bias has its rows last, [N] or [E, N]; everything else [..., N, columns]
        axis = array.ndim - 1 if role == "bias" else array.ndim - 2
        if quant.granularity == "block" and role in ("scale", "zero_point"):
            tensors[role] = np.take(array, _block_permutation(rows, quant.block[0], order), axis=axis)
            continue
        if array.shape[axis] != n:
            raise InvalidCheckpointError(f"{role} has {array.shape[axis]} rows, needed {n} to put them in order")
        tensors[role] = np.take(array, rows, axis=axis)
    return replace(weight, tensors=tensors)


def _block_permutation(rows: Rows, block: int, order: RowOrder) -> Rows:
    """For each canonical block of `block` rows (the last may be shorter) the disk block with the same rows."""
    source = rows // block
    starts = np.arange(0, rows.size, block)
    blocks = source[starts]
    whole = np.repeat(blocks, block)[: rows.size] == source
    if not whole.all():
        raise InvalidCheckpointError(
            f"row order {order.kind} cuts the {block}-row blocks of the scale (at row {int(np.argmin(whole))}): "
            "the scale cannot follow"
        )
    return blocks
