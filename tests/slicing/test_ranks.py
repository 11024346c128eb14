"""Loading by ranks: what all ranks compute together is what the whole layer computes, in float64 and on the CPU.

Expected outputs come from the dequantized whole, never from a slice.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat import load, oracle
from omniplat.canonical import Array, CanonicalWeight
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError, UsageError
from omniplat.legality import cut_layer, rank_spec
from omniplat.packed import PackedLayer, Split
from omniplat.reference.kernels import DequantLinear, ExpertLoop, LinearConfig
from omniplat.roworder import RowOrder
from omniplat.roworder_apply import to_disk_rows
from omniplat.runtime.kernel import Workspaces
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.load import load_layer
from omniplat.runtime.slicer import Rank, column_range, row_ranges
from omniplat.scheme import Scheme
from tests.goldens.entries import DATA
from tests.reference.build import Weights
from tests.slicing.weights import (
    RUN,
    Memory,
    Unread,
    columns_unit,
    concatenate,
    dequantized,
    expert_layer,
    linear_layer,
    make,
)

SCHEMES = st.sampled_from(RUN).map(Scheme.parse)
SIZES = st.sampled_from([1, 2, 3, 4, 8])
SEEDS = st.integers(0, 1 << 16)


def run(layer: PackedLayer, memory: Memory, rank: Rank, x: Array) -> Array:
    loaded = load_layer(layer, DequantLinear(), memory, rank=rank)
    assert isinstance(loaded, QuantLinear)
    assert loaded.spec == rank_spec(layer.spec, layer.split, rank.tp_size, rank.ep_size)
    y: Array = loaded(torch.from_numpy(np.ascontiguousarray(x))).numpy()
    return y


def input_of(weight: CanonicalWeight, x: Array) -> Array:
    """The layer's input after smoothing and quantization; `x` may be a slice of the columns."""
    activation = weight.scheme.activation
    if activation is None:
        return x.astype(np.float64)
    roles = {role: weight.tensors[role] for role in weight.tensors if role.startswith("input_")}
    return oracle.quantize_activation(x, activation, **roles)


def assert_near(y: Array, x: Array, w: Array, bias: Array | None) -> None:
    """Within the rounding of float32 sums over K of `x` @ `w`^T."""
    expected, bound = x @ w.T, np.abs(x) @ np.abs(w).T
    if bias is not None:
        expected, bound = expected + bias, bound + np.abs(bias)
    allowed = (16 + np.sqrt(w.shape[1])) * 2.0**-24 * bound + 1e-30
    assert (np.abs(y - expected) <= allowed).all(), float((np.abs(y - expected) / allowed).max())


def refused(layer: PackedLayer, tp: int) -> bool:
    """True for an illegal size, which every rank refuses before it reads anything."""
    if cut_layer(layer, tp).legal:
        return False
    for rank in range(tp):
        with pytest.raises(UsageError, match=f"cannot be shared by {tp}"):
            load_layer(layer, DequantLinear(), Unread(), rank=Rank(rank, tp))
    return True


@settings(max_examples=200, deadline=None)
@given(SCHEMES, SIZES, st.sampled_from([48, 96, 256, 300]), st.sampled_from([1, 2, 3, 4, 8]), SEEDS)
def test_row_parallel_outputs_add_up(scheme: Scheme, tp: int, rows: int, groups: int, seed: int) -> None:
    unit = columns_unit(scheme)
    weight = make(scheme, rows, unit * groups if unit > 2 else 96 * groups, seed)
    memory = Memory()
    layer = linear_layer(memory, {"o": weight}, Split("row"))
    if refused(layer, tp):
        return
    x, w, bias = Weights(seed + 1).values(3, weight.in_features), dequantized(weight), weight.tensors["bias"]
    total, rounded = np.zeros((3, rows)), np.zeros((3, weight.in_features))
    for rank in range(tp):
        held = column_range(weight.in_features, Rank(rank, tp))
        columns = slice(held.start, held.stop)
        y = run(layer, memory, Rank(rank, tp), x[:, columns])
        rounded[:, columns] = input_of(weight, x[:, columns])
        assert_near(y, rounded[:, columns], w[:, columns], bias if rank == 0 else None)
        total += y
    # one bias in all; groups are rounded alike on every rank, and so is what has a static scale
    activation = scheme.activation
    if activation is None or activation.granularity == "group" or not activation.dynamic:
        assert_near(total, input_of(weight, x), w, bias)


@settings(max_examples=200, deadline=None)
@given(SCHEMES, SIZES, st.sampled_from([48, 96, 256, 300, 512]), SEEDS)
def test_column_parallel_outputs_lie_side_by_side(scheme: Scheme, tp: int, rows: int, seed: int) -> None:
    columns = max(columns_unit(scheme), 64) * (1 + seed % 2)
    gate, up = (make(scheme, rows, columns, 2 * seed + i, extras=False) for i in range(2))
    up = replace(up, tensors={**up.tensors, "bias": Weights(seed).values(rows)})
    memory = Memory()
    layer = linear_layer(memory, {"gate": gate, "up": up}, Split("column"))
    if refused(layer, tp):
        return
    x = Weights(seed + 1).values(3, columns)
    outputs = [run(layer, memory, Rank(rank, tp), x) for rank in range(tp)]
    for index, part in enumerate((gate, up)):
        y = np.concatenate([np.split(output, 2, axis=1)[index] for output in outputs], axis=1)
        assert_near(y, input_of(part, x), dequantized(part), part.tensors.get("bias"))


@settings(max_examples=200, deadline=None)
@given(
    SCHEMES,
    SIZES,
    st.sampled_from([(8, 1, 16), (8, 2, 16), (8, 4, 16), (8, 8, 16), (6, 3, 32), (4, 2, 128), (16, 2, 8)]),
    st.booleans(),
    SEEDS,
)
def test_attention_heads_go_to_their_ranks(
    scheme: Scheme, tp: int, shape: tuple[int, int, int], on_disk: bool, seed: int
) -> None:
    """Keys and values are replicated; as three modules, or as one whose rows are interleaved per KV head."""
    heads, kv_heads, dim = shape
    columns = max(columns_unit(scheme), 64)
    counts = (heads * dim, kv_heads * dim, kv_heads * dim)
    parts = [make(scheme, rows, columns, 2 * (seed + i), extras=True) for i, rows in enumerate(counts)]
    split = Split("column", heads, kv_heads, (False, True, True))
    memory = Memory()
    if on_disk and scheme.weight.granularity != "block":
        whole = concatenate(concatenate(parts[0], parts[1]), parts[2])
        order = RowOrder("qkv_per_kv_head", kv_heads, heads // kv_heads, dim)
        layer = linear_layer(memory, {"qkv": to_disk_rows(whole, order)}, split, counts)
        layer = replace(layer, parts=(replace(layer.parts[0], row_order=order),))
    else:
        layer = linear_layer(memory, dict(zip("qkv", parts, strict=True)), split)
    if refused(layer, tp):
        return
    x = Weights(seed + 9).values(2, columns)
    for rank in range(tp):
        y = run(layer, memory, Rank(rank, tp), x)
        held = [heads // tp, max(1, kv_heads // tp), max(1, kv_heads // tp)]
        first = [rank * heads // tp, rank * kv_heads // tp, rank * kv_heads // tp]
        found = np.split(y, np.cumsum(held)[:-1] * dim, axis=1)
        for part, output, count, start in zip(parts, found, held, first, strict=True):
            rows = slice(start * dim, (start + count) * dim)
            assert_near(output, input_of(part, x), dequantized(part)[rows], part.tensors["bias"][rows])


def test_gate_and_up_that_lie_swapped_on_disk() -> None:
    for tp in (1, 2, 4):
        halves = [make(Scheme.parse("mxfp4/a16"), 64, 64, seed) for seed in (0, 2)]
        memory = Memory()
        order = RowOrder("halves_swapped")
        layer = linear_layer(
            memory, {"gate_and_up": to_disk_rows(concatenate(*halves), order)}, Split("column"), (64, 64)
        )
        layer = replace(layer, parts=(replace(layer.parts[0], row_order=order),))
        x = Weights(5).values(3, 64)
        for rank in range(tp):
            found = np.split(run(layer, memory, Rank(rank, tp), x), 2, axis=1)
            (rows,) = row_ranges((64,), Split("column"), Rank(rank, tp))
            for half, y in zip(halves, found, strict=True):
                window = slice(rows.start, rows.stop)
                assert_near(y, x, dequantized(half)[window], half.tensors["bias"][window])


def test_replicated_layers_are_whole_everywhere() -> None:
    weight = make(Scheme.parse("nvfp4/a16"), 40, 64, 0)
    memory = Memory()
    layer = linear_layer(memory, {"a": weight}, Split())
    x = Weights(1).values(2, 64)
    assert np.array_equal(run(layer, memory, Rank(2, 3), x), run(layer, memory, Rank(), x))


# --- experts -----------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([s for s in RUN if not s.startswith(("nf4", "fp4bnb", "mxfp4-dual"))]).map(Scheme.parse),
    SIZES,
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(["separate", "fused", "swapped", "stacked"]),
    st.sampled_from([96, 128, 256]),
    SEEDS,
)
def test_ranks_of_experts_add_up(scheme: Scheme, tp: int, ep: int, form: str, inner: int, seed: int) -> None:
    hidden, experts = 128, 4
    if inner % columns_unit(scheme) or (form == "swapped" and scheme.weight.granularity == "block"):
        return
    weights = []
    for expert in range(experts):
        gate, up = (make(scheme, inner, hidden, 8 * seed + 2 * expert + i * 8, extras=False) for i in range(2))
        down = make(scheme, hidden, inner, 8 * seed + 2 * expert, extras=form != "stacked")
        weights.append((gate, up, down))
    memory, order = Memory(), RowOrder("halves_swapped" if form == "swapped" else "as_is")
    if form == "swapped":
        layer = expert_layer(memory, [(up, gate, down) for gate, up, down in weights], form="fused", order=order)
    else:
        layer = expert_layer(memory, weights, form=form)
    if refused_experts(layer, tp, ep):
        return
    random = np.random.default_rng(seed)
    x = Weights(seed + 1).values(5, hidden)
    ids = np.stack([random.permutation(experts)[:2] for _ in range(5)])
    probabilities = random.random((5, 2)).astype(np.float32)
    total = np.zeros((5, hidden))
    for tp_rank in range(tp):
        for ep_rank in range(ep):
            loaded = load_layer(layer, ExpertLoop(), memory, rank=Rank(tp_rank, tp, ep_rank, ep))
            assert isinstance(loaded, QuantExperts)
            first = ep_rank * experts // ep
            local = [e - first if first <= e < first + experts // ep else -1 for e in range(experts)]
            y = loaded(
                torch.from_numpy(x),
                torch.from_numpy(ids),
                torch.from_numpy(probabilities),
                torch.tensor(local, dtype=torch.int32),
            )
            total += y.numpy()
    if scheme.activation is not None and scheme.activation.granularity != "group":
        whole = load_layer(layer, ExpertLoop(), memory)
        wanted = whole(torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(probabilities)).numpy()
        # each rank rounds its own slice of the hidden state
        assert np.linalg.norm(total - wanted) <= 0.05 * np.linalg.norm(wanted)
        return
    expected = np.zeros((5, hidden))
    for row in range(5):
        for slot in range(2):
            gate, up, down = weights[ids[row, slot]]
            g, u = (input_of(part, x[row : row + 1]) @ dequantized(part).T for part in (gate, up))
            rounded = input_of(down, (g / (1 + np.exp(-g)) * u).astype(np.float32))
            y = rounded @ dequantized(down).T + down.tensors.get("bias", np.zeros(hidden))
            expected[row] += probabilities[row, slot] * y[0]
    # float32 between the two products: a value on the edge between two codes may be rounded either way
    allowed = 1e-5 if scheme.activation is None else 0.08
    assert np.linalg.norm(total - expected) <= allowed * np.linalg.norm(expected)


def refused_experts(layer: PackedLayer, tp: int, ep: int) -> bool:
    assert layer.spec.moe is not None
    if cut_layer(layer, tp).legal and layer.spec.moe.experts % ep == 0:
        return False
    with pytest.raises(UsageError, match="cannot be shared"):
        load_layer(layer, ExpertLoop(), Unread(), rank=Rank(0, tp, ep - 1, ep))
    return True


def test_a_rank_reads_only_its_experts() -> None:
    weights = [tuple(make(Scheme.parse("mxfp4/a16"), 64, 64, e, extras=False) for _ in range(3)) for e in range(4)]
    memory = Memory()
    layer = expert_layer(memory, [(a, b, c) for a, b, c in weights], form="separate")
    for name in list(memory.arrays):
        if name.startswith(("0.", "1.", "3.")):
            del memory.arrays[name]
    loaded = load_layer(layer, ExpertLoop(), memory, rank=Rank(ep_rank=2, ep_size=4))
    assert isinstance(loaded, QuantExperts)
    with pytest.raises(KeyError):
        load_layer(layer, ExpertLoop(), memory)
    with pytest.raises(InvalidCheckpointError, match="4 expected"):
        load_layer(replace(layer, w2=layer.w2[:2]), ExpertLoop(), memory, rank=Rank(ep_rank=0, ep_size=4))


# --- a checkpoint ------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_loaded_by_rank() -> None:
    folder = DATA / "lc-qwen3-nvfp4" / "checkpoint"
    whole = load(folder, "cpu")
    ranks = [load(folder, "cpu", rank=Rank(rank, 2)) for rank in (0, 1)]
    assert all(held.keys() == whole.keys() for held in ranks)
    x = torch.from_numpy(Weights(0).values(3, 384))
    name = "model.layers.0.mlp.gate_up_proj"
    gates, ups = zip(*(held[name](x[:, :256]).chunk(2, dim=1) for held in ranks), strict=True)
    assert torch.equal(torch.cat([*gates, *ups], dim=1), whole[name](x[:, :256]))
    name = "model.layers.0.mlp.down_proj"
    total = sum(held[name](x[:, 192 * rank : 192 * (rank + 1)]) for rank, held in enumerate(ranks))
    assert (total - whole[name](x)).norm() < 1e-6 * total.norm()
    with pytest.raises(UnsupportedCombinationError, match="tp = 3"):
        load(folder, "cpu", rank=Rank(0, 3))


def test_layers_of_one_checkpoint_share_scratch_memory() -> None:
    class Hungry(DequantLinear):
        def workspace_bytes(self, config: LinearConfig) -> int:
            return 64 * config.out_features

    memory, workspaces = Memory(), Workspaces()
    found = []
    for rows in (32, 64, 16):
        layer = linear_layer(memory, {f"a{rows}": make(Scheme.parse("mxfp4/a16"), rows, 64, 0)}, Split())
        loaded = load_layer(layer, Hungry(), memory, workspaces=workspaces)
        assert loaded.workspace is not None
        assert loaded.workspace.numel() >= 64 * rows
        found.append(loaded.workspace)
    assert found[2] is found[1]
    assert found[1] is not found[0]
    alone = load_layer(layer, Hungry(), memory)
    assert alone.workspace is not None
    assert alone.workspace is not found[2]
    assert alone.to("meta").workspace.device.type == "meta"
