"""Layers that are quantized while pieces of their weights arrive: the same as if everything had been there."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniplat import oracle
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.reference.kernels import DequantLinear, ExpertLoop
from omniplat.runtime import online
from omniplat.runtime.online import OnlineExperts, OnlineLinear, Pieces, round_to_nearest
from omniplat.runtime.tensors import to_array
from omniplat.scheme import Scheme

SCHEMES = [
    *("fp8-tensor/fp8-tensor", "fp8-channel/fp8-token", "fp8-block32x32/fp8-g32", "int8-channel/int8-token"),
    *("mxfp8/mxfp8", "mxfp4/mxfp4", "mxfp4-dual/mxfp4-dual", "nvfp4/nvfp4", "int4-g32/a16"),
]


def values(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float32).bfloat16()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_runs_of_rows_have_the_codes_of_the_whole(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "_ELEMENTS", 40 * 96)  # blocks of 32 rows begin where a run begins
    parsed, weight = Scheme.parse(scheme), values(135, 96)
    whole = oracle.quantize_weight(to_array(weight.float()), parsed.weight)
    runs = list(round_to_nearest(weight, parsed))
    assert len(runs) > 3
    for start, run in runs:
        assert run.scheme == parsed
        rows = slice(start, start + run.out_features)
        assert np.array_equal(run.tensors["codes"], whole.tensors["codes"][rows])
    for role in set(whole.tensors) - {"codes"}:
        assert np.array_equal(np.concatenate([run.tensors[role] for _, run in runs]), whole.tensors[role])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), [(64, 96), (160, 96), (96, 1000), (33, 130)])
def test_blocks_side_by_side_have_the_codes_of_the_whole(
    scheme: str, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = Scheme.parse(scheme)
    if parsed.weight.granularity == "group":
        columns -= columns % 32  # groups are whole, blocks need not be
    monkeypatch.setattr(online, "_ELEMENTS", 2 * 32 * 32)
    weight = values(rows, columns)
    whole = oracle.quantize_weight(to_array(weight.float()), parsed.weight)
    runs = [run for _, run in round_to_nearest(weight, parsed)]
    assert all(run.in_features == columns for run in runs)
    for role in whole.tensors:
        assert np.array_equal(np.concatenate([run.tensors[role] for run in runs]), whole.tensors[role])


@pytest.mark.parametrize("scheme", [*SCHEMES, "fp8-block128x128/fp8-g128"])
@pytest.mark.parametrize("shape", [(1024, 256), (256, 4096)])
def test_rounding_needs_the_same_memory_for_weights_of_every_size(scheme: str, shape: tuple[int, int]) -> None:
    parsed, weight = Scheme.parse(scheme), values(*shape)
    tracemalloc.start()
    try:
        for _ in round_to_nearest(weight, parsed):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    blocks = parsed.weight.granularity == "block"
    # of a row of blocks the codes are held twice while they are put side by side, and once by the run before
    assert peak < (1 << 20) + blocks * 3 * parsed.weight.block[0] * shape[1]


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[range]:
    inner = draw(st.lists(st.integers(1, size - 1), max_size=3, unique=True))
    return [range(*pair) for pair in pairwise(sorted({0, size, *inner}))]


@given(data=st.data(), scheme=st.sampled_from(SCHEMES))
def test_pieces_in_any_order_make_the_fused_layer(data: st.DataObject, scheme: str) -> None:
    parsed, sizes = Scheme.parse(scheme), (64, 32, 32)
    weights = [values(size, 64, seed) for seed, size in enumerate(sizes)]
    biases = [torch.randn(size) for size in sizes]
    layer = OnlineLinear(
        LayerSpec("qkv_proj", "linear", sum(sizes), 64, parsed, bias=True, parts=sizes), DequantLinear()
    )
    pieces: list[tuple[int, range, range]] = []
    for part, size in enumerate(sizes):
        pieces += [(part, r, c) for r in data.draw(cuts(size)) for c in data.draw(cuts(64))]
    for part, rows, columns in data.draw(st.permutations(pieces)):
        assert layer.missing
        layer.put(weights[part][rows.start : rows.stop, columns.start : columns.stop], part, rows=rows, columns=columns)
    assert layer.missing == tuple(f"qkv_proj[{part}].bias" for part in range(3))
    for part in data.draw(st.permutations(range(3))):
        layer.put_bias(biases[part], part)
    x = values(3, 64, 9).float()
    found = layer.finish()(x)
    rows = 0
    for weight, bias in zip(weights, biases, strict=True):
        alone = oracle.quantize_weight(to_array(weight.float()), parsed.weight)
        expected = oracle.linear(x.numpy(), replace(alone, scheme=parsed)) + bias.numpy()
        np.testing.assert_allclose(found[:, rows : rows + len(bias)].numpy(), expected, rtol=1e-4, atol=1e-4)
        rows += len(bias)


@pytest.mark.parametrize("scheme", ["fp8-tensor/fp8-tensor", "mxfp4/mxfp4", "int8-channel/int8-token"])
def test_experts_from_halves_are_those_from_stacks(scheme: str) -> None:
    spec = LayerSpec("experts", "moe", 64, 64, Scheme.parse(scheme), bias=True, moe=MoeSpec(2, 32))
    whole, halves = OnlineExperts(spec, ExpertLoop()), OnlineExperts(spec, ExpertLoop())
    for expert in range(2):
        w13, w2 = values(64, 64, expert), values(64, 32, 5 + expert)
        whole.put_w13(w13, expert)
        whole.put_w2(w2, expert)
        halves.put_w2(w2[:, 16:], expert, columns=range(16, 32))
        halves.put_w13(w13[32:], expert, rows=range(32, 64))
        halves.put_w13(w13[:32], expert, rows=range(32))
        halves.put_w2(w2[:, :16], expert, columns=range(16))
        for layer in (whole, halves):
            layer.put_bias(w13[0], expert, down=False)
            layer.put_bias(w2[:, 0].contiguous(), expert, down=True)
    made, other = whole.finish(), halves.finish()
    x, ids, chosen = values(3, 64, 9).float(), torch.tensor([[0, 1], [1, 0], [1, -1]]), torch.full((3, 2), 0.5)
    assert torch.equal(made(x, ids, chosen), other(x, ids, chosen))
    assert all(torch.equal(one, two) for one, two in zip(made.buffers(), other.buffers(), strict=True))


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([(torch.zeros(4, 8), range(4), None), (torch.zeros(1, 8), range(3, 4), None)], "delivered twice"),
        ([(torch.zeros(4, 8), None, None)], r"is \[4, 8\] where \[6, 8\]"),
        ([(torch.zeros(4, 8), range(4, 8), None)], r"is \[4, 8\] where \[4, 8\] of \[6, 8\] belongs"),
        ([(torch.zeros(6, 8, dtype=torch.int8), None, None)], "is torch.int8"),
        ([(torch.zeros(6, 8).to(torch.float8_e4m3fn), None, None)], "is torch.float8_e4m3fn"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(
    pieces: list[tuple[torch.Tensor, range | None, range | None]], reason: str
) -> None:
    taken = Pieces("w", 6, 8)
    for piece in pieces[:-1]:
        assert not taken.put(*piece)
    with pytest.raises(InvalidCheckpointError, match=reason):
        taken.put(*pieces[-1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_or_not_whole_makes_no_layer(bad: float) -> None:
    spec = LayerSpec("gate_up_proj", "linear", 64, 64, Scheme.parse("mxfp8/mxfp8"), parts=(32, 32))
    layer = OnlineLinear(spec, DequantLinear())
    weight = values(32, 64)
    layer.put(weight, 1)
    with pytest.raises(InvalidCheckpointError, match=r"gate_up_proj: is incomplete: .*gate_up_proj\[0\]"):
        layer.finish()
    weight[3, 5] = bad
    with pytest.raises(InvalidCheckpointError, match=r"gate_up_proj\[0\]: is not finite"):
        layer.put(weight, 0)
    with pytest.raises(InvalidCheckpointError, match="has a bias, the layer has none"):
        layer.put_bias(torch.zeros(32))


def test_static_activations_of_experts_are_refused() -> None:
    spec = LayerSpec("experts", "moe", 64, 64, Scheme.parse("fp8-tensor/fp8-tensor-static"), moe=MoeSpec(2, 32))
    with pytest.raises(UsageError, match="experts have no static activations"):
        OnlineExperts(spec, ExpertLoop())
