"""Slices of canonical weights: bit for bit the rows and columns of the whole, in every scheme."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat.canonical import ROW_ROLES, CanonicalWeight
from omniplat.errors import UsageError
from omniplat.legality import cut_columns, cut_rows
from omniplat.packed import Split
from omniplat.runtime.slicer import Rank, column_range, expert_range, row_ranges, take_columns, take_rows, without_bias
from omniplat.scheme import Scheme
from tests.slicing.weights import HELD, RUN, columns_unit, dequantized, make

SCHEMES = st.sampled_from([*RUN, *HELD]).map(Scheme.parse)
SIZES = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def weights(draw: st.DrawFn) -> CanonicalWeight:
    scheme = draw(SCHEMES)
    rows = draw(st.sampled_from([24, 48, 96, 256, 300]))
    unit = columns_unit(scheme)
    columns = unit * draw(st.sampled_from([1, 2, 3, 4, 6, 8] if unit < 512 else [1, 2, 3]))
    return make(scheme, rows, columns, draw(st.integers(0, 1 << 16)))


@settings(max_examples=300, deadline=None)
@given(weights(), SIZES)
def test_columns_are_those_of_the_whole(weight: CanonicalWeight, tp: int) -> None:
    whole = dequantized(weight)
    quant = replace(weight.scheme, activation=None)
    if not cut_columns(quant, weight.in_features, tp).legal:
        if weight.in_features % tp or "group_index" in weight.tensors:
            return
        with pytest.raises(UsageError, match="cut there"):
            take_columns(weight, column_range(weight.in_features, Rank(0, tp)))
        return
    for rank in range(tp):
        columns = column_range(weight.in_features, Rank(rank, tp))
        held = take_columns(weight, columns)
        assert held.in_features == len(columns)
        np.testing.assert_array_equal(dequantized(held), whole[:, columns.start : columns.stop])
        assert without_bias(held).tensors.keys() == held.tensors.keys() - {"bias"}


@settings(max_examples=300, deadline=None)
@given(weights(), SIZES)
def test_rows_are_those_of_the_whole(weight: CanonicalWeight, tp: int) -> None:
    whole = dequantized(weight)
    legal = cut_rows(weight.scheme, (weight.out_features,), tp).legal
    if weight.out_features % tp:
        return
    if not legal:
        with pytest.raises(UsageError, match="cut there"):
            take_rows(weight, row_ranges((weight.out_features,), Split("column"), Rank(0, tp))[0])
        return
    for rank in range(tp):
        (rows,) = row_ranges((weight.out_features,), Split("column"), Rank(rank, tp))
        held = take_rows(weight, rows)
        np.testing.assert_array_equal(dequantized(held), whole[rows.start : rows.stop])
        np.testing.assert_array_equal(held.tensors["bias"], weight.tensors["bias"][rows.start : rows.stop])
        if weight.scheme.weight.granularity != "block":
            assert all(len(held.tensors[role]) == len(rows) for role in ROW_ROLES if role in held.tensors)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_gguf_blocks_are_cut_between_blocks(kind: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    values = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    codes = quants.quantize(values, GGMLQuantizationType[kind])
    weight = CanonicalWeight(Scheme.parse(f"gguf-{kind.lower()}/a16"), 6, 256, {"codes": codes})
    whole = dequantized(weight)
    for rank in range(4):
        held = take_columns(take_rows(weight, range(2, 6)), column_range(256, Rank(rank, 4)))
        np.testing.assert_array_equal(dequantized(held), whole[2:, rank * 64 : rank * 64 + 64])
    with pytest.raises(UsageError, match="block of 32"):
        take_columns(weight, range(16))


def test_a_partial_last_block_ends_the_last_slice() -> None:
    weight = make(Scheme.parse("fp8-block128x128/a16"), 300, 320, 0)
    whole = dequantized(weight)
    np.testing.assert_array_equal(dequantized(take_rows(weight, range(128, 300))), whole[128:])
    np.testing.assert_array_equal(dequantized(take_columns(weight, range(256, 320))), whole[:, 256:])
    for cut in (range(100), range(100, 300), range(301), range(8, 8)):
        with pytest.raises(UsageError, match="rows"):
            take_rows(weight, cut)
    with pytest.raises(UsageError, match="columns"):
        take_columns(weight, range(64, 320))


def test_the_whole_is_not_copied() -> None:
    weight = make(Scheme.parse("nvfp4/a16"), 32, 64, 0)
    assert take_rows(weight, range(32)) is weight
    assert take_columns(weight, range(64)) is weight
    held = take_columns(take_rows(weight, range(16, 32)), range(32, 64))
    assert np.shares_memory(held.tensors["codes"], weight.tensors["codes"])


def test_keys_and_values_are_replicated_when_there_are_fewer_heads_than_ranks() -> None:
    split = Split("column", heads=8, kv_heads=2, kv=(False, True, True))
    parts = (64, 16, 16)
    found = [row_ranges(parts, split, Rank(rank, 4)) for rank in range(4)]
    assert [held[0] for held in found] == [range(16), range(16, 32), range(32, 48), range(48, 64)]
    assert [held[1] for held in found] == [range(8), range(8), range(8, 16), range(8, 16)]
    assert row_ranges(parts, Split("row"), Rank(1, 4)) == tuple(range(n) for n in parts)
    assert [expert_range(6, Rank(ep_rank=rank, ep_size=3)) for rank in range(3)] == [range(2), range(2, 4), range(4, 6)]


@pytest.mark.parametrize("rank", [(2, 2), (-1, 1), (0, 0), (0, 1, 4, 4)])
def test_a_rank_is_below_its_size(rank: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="rank"):
        Rank(*rank)
