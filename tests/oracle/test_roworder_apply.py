"""Row orders against the reshapes of the model families that use them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniplat.canonical import CanonicalWeight
from omniplat.errors import InvalidCheckpointError
from omniplat.oracle import dequantize, quantize_weight
from omniplat.roworder import AS_IS, RowOrder
from omniplat.roworder_apply import row_permutation, to_canonical_rows, to_disk_rows
from omniplat.scheme import parse_weight_id

HALVES, PAIRS = RowOrder("halves_swapped"), RowOrder("interleaved")


def weight_of(scheme: str, rows: int, experts: int = 0) -> CanonicalWeight:
    shape = (experts, rows, 64) if experts else (rows, 64)
    weight = quantize_weight(np.random.default_rng(0).standard_normal(shape), parse_weight_id(scheme))
    bias = np.broadcast_to(np.arange(rows, dtype=np.float32), shape[:-1])
    return replace(weight, tensors={**weight.tensors, "bias": bias})


def test_orders_by_hand() -> None:
    assert row_permutation(AS_IS, 3).tolist() == [0, 1, 2]
    assert row_permutation(HALVES, 6).tolist() == [3, 4, 5, 0, 1, 2]
    assert row_permutation(PAIRS, 6).tolist() == [0, 2, 4, 1, 3, 5]
    # two KV heads of [q, q, k, v], head size 2
    order = RowOrder("qkv_per_kv_head", kv_heads=2, q_per_kv=2, head_dim=2)
    assert row_permutation(order, 16).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_qkv_interleaving_equals_the_model_code(kv_heads: int, q_per_kv: int, head_dim: int) -> None:
    """q, k and v fused as a model does it come back as [q; k; v]."""
    q = np.arange(kv_heads * q_per_kv * head_dim)
    k = 1000 + np.arange(kv_heads * head_dim)
    v = 2000 + np.arange(kv_heads * head_dim)
    parts = [
        q.reshape(kv_heads, q_per_kv, head_dim),
        k.reshape(kv_heads, 1, head_dim),
        v.reshape(kv_heads, 1, head_dim),
    ]
    disk = np.concatenate(parts, axis=1).reshape(-1)
    order = RowOrder("qkv_per_kv_head", kv_heads, q_per_kv, head_dim)
    np.testing.assert_array_equal(disk[row_permutation(order, disk.size)], np.concatenate([q, k, v]))


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8", "nvfp4", "uint4-g32", "int8-channel", "fp8-tensor", "bf16"])
@pytest.mark.parametrize("order", [HALVES, PAIRS, RowOrder("qkv_per_kv_head", 2, 1, 2)], ids=lambda o: o.kind)
@pytest.mark.parametrize("experts", [0, 2])
def test_everything_of_a_row_moves_with_it(scheme: str, order: RowOrder, experts: int) -> None:
    if scheme == "bf16":
        weight = replace(weight_of("fp8-tensor", 12, experts))
        codes = np.random.default_rng(1).standard_normal(weight.tensors["codes"].shape).astype(np.float32)
        scheme_bf16 = replace(weight.scheme, weight=parse_weight_id("bf16"))
        weight = replace(weight, scheme=scheme_bf16, tensors={"codes": codes, "bias": weight.tensors["bias"]})
    else:
        weight = weight_of(scheme, 12, experts)
    rows = row_permutation(order, 12)
    moved = to_canonical_rows(weight, order)
    np.testing.assert_array_equal(dequantize(moved), dequantize(weight)[..., rows, :])
    np.testing.assert_array_equal(moved.tensors["bias"], weight.tensors["bias"][..., rows])
    back = to_disk_rows(moved, order)
    for role, array in weight.tensors.items():
        np.testing.assert_array_equal(back.tensors[role].view(np.uint8), np.ascontiguousarray(array).view(np.uint8))


def test_as_is_copies_nothing() -> None:
    weight = weight_of("mxfp4", 4)
    assert to_canonical_rows(weight, AS_IS) is weight


def test_block_scales_follow_whole_blocks() -> None:
    weight = weight_of("fp8-block4x32", 16)
    moved = to_canonical_rows(weight, HALVES)
    np.testing.assert_array_equal(moved.tensors["scale"], weight.tensors["scale"][[2, 3, 0, 1]])
    np.testing.assert_array_equal(dequantize(moved), dequantize(weight)[row_permutation(HALVES, 16)])
    np.testing.assert_array_equal(dequantize(to_disk_rows(moved, HALVES)), dequantize(weight))
    heads = RowOrder("qkv_per_kv_head", kv_heads=2, q_per_kv=2, head_dim=4)
    wide = weight_of("fp8-block4x32", 32)
    np.testing.assert_array_equal(
        dequantize(to_canonical_rows(wide, heads)), dequantize(wide)[row_permutation(heads, 32)]
    )


@pytest.mark.parametrize(
    ("order", "rows"),
    [(HALVES, 12), (PAIRS, 16), (RowOrder("qkv_per_kv_head", 2, 2, 2), 16), (HALVES, 20)],
    ids=["half a block", "pairs", "heads smaller than blocks", "partial last block"],
)
def test_orders_that_cut_blocks_are_refused(order: RowOrder, rows: int) -> None:
    block = 8 if rows != 16 else 4
    with pytest.raises(InvalidCheckpointError, match="cuts the"):
        to_canonical_rows(weight_of(f"fp8-block{block}x32", rows), order)


@pytest.mark.parametrize(
    ("order", "rows", "message"),
    [
        (HALVES, 5, "even number of rows, found 5"),
        (PAIRS, 5, "even number of rows, found 5"),
        (RowOrder("qkv_per_kv_head", 2, 2, 2), 17, "needs 16 rows, found 17"),
        (RowOrder("spiral"), 4, "unknown row order 'spiral'"),
    ],
)
def test_rows_that_do_not_have_the_order(order: RowOrder, rows: int, message: str) -> None:
    with pytest.raises(InvalidCheckpointError, match=message):
        row_permutation(order, rows)


def test_a_role_with_another_number_of_rows_is_refused() -> None:
    weight = weight_of("mxfp4", 4)
    short = replace(weight, tensors={**weight.tensors, "scale": weight.tensors["scale"][:3]})
    with pytest.raises(InvalidCheckpointError, match="scale has 3 rows, needed 4"):
        to_canonical_rows(short, HALVES)
