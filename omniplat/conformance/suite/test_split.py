"""Group split: what ranks hold of a layer computes the layer together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from omniplat.canonical import Array
from omniplat.checkpoint.reader import ShardReader
from omniplat.conformance import expected
from omniplat.conformance.build import make_routing, run_experts, run_linear
from omniplat.conformance.checks import Named, check
from omniplat.conformance.files import (
    ROWS,
    assert_module_right,
    canonical_of,
    held,
    loaded_input,
    plan_model,
    pseudo_case,
    stacked_of,
    write_model,
)
from omniplat.conformance.inputs import random_input
from omniplat.conformance.judge import assert_experts_right
from omniplat.conformance.model import Written
from omniplat.conformance.subject import Subject
from omniplat.conformance.tolerances import Float64, rounding
from omniplat.planner import PlannedLayer
from omniplat.runtime.kernel import load_kernel
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.load import load_layer
from omniplat.runtime.slicer import Rank

TP = 2


def _linear(subject: Subject, profile: str) -> Iterable[Named]:
    return held(subject, "linear", "quick")


def _moe(subject: Subject, profile: str) -> Iterable[Named]:
    return held(subject, "moe", "quick")


@check("split", _linear)
def test_tensor_parallel(subject: Subject, case: Named, tmp_path: Path) -> None:
    """Two ranks: outputs of column-parallel layers side by side, sums of row-parallel ones, are the whole's."""
    written = write_model(tmp_path / "checkpoint", case, ranks=TP)
    planned = plan_model(written, subject, case)
    reader = ShardReader(written.folder)
    tested = 0
    for item in planned.layers:
        if TP not in item.layer.legal_tp or item.packed.split.style == "replicated":
            continue
        tested += 1
        ranks = [_loaded(subject, item, reader, Rank(rank, TP)) for rank in range(TP)]
        if item.packed.split.style == "row":
            _assert_sum(subject, item, ranks, written)
        else:
            _assert_side_by_side(subject, item, ranks, written)
    assert tested, "no layer could be split"


def _loaded(subject: Subject, item: PlannedLayer, reader: ShardReader, rank: Rank) -> QuantLinear | QuantExperts:
    assert item.capability is not None
    kernel = load_kernel(item.capability.impl)
    return load_layer(item.packed, kernel, reader, rank=rank, device=subject.torch_device)


def _linear_of(layer: QuantLinear | QuantExperts) -> QuantLinear:
    assert isinstance(layer, QuantLinear)
    return layer


def _assert_sum(
    subject: Subject, item: PlannedLayer, ranks: Sequence[QuantLinear | QuantExperts], written: Written
) -> None:
    assert item.capability is not None
    dtype = item.packed.spec.dtype
    x = loaded_input(item, dtype, TP)
    cuts = np.split(x, TP, axis=1)
    pieces = [run_linear(_linear_of(layer), cut, dtype, subject) for layer, cut in zip(ranks, cuts, strict=True)]
    total = np.sum(pieces, axis=0)
    assert_module_right(item, item.packed.parts[0].module.name, x, total, written, rounding_of(pieces, dtype))


def rounding_of(pieces: Sequence[Float64], dtype: str) -> Float64:
    """Each rank rounds its own output to the dtype before they are added."""
    return np.asarray(np.sum([rounding(piece, dtype) for piece in pieces], axis=0), np.float64)


def _assert_side_by_side(
    subject: Subject, item: PlannedLayer, ranks: Sequence[QuantLinear | QuantExperts], written: Written
) -> None:
    assert item.capability is not None
    dtype = item.packed.spec.dtype
    x = loaded_input(item, dtype)
    outputs = [run_linear(_linear_of(layer), x, dtype, subject) for layer in ranks]
    starts = [0] * TP
    for part in item.packed.parts:
        weight = canonical_of(written.weights, part.module.name, item)
        rows = weight.out_features // TP
        pieces = []
        for rank, output in enumerate(outputs):
            pieces.append(output[:, starts[rank] : starts[rank] + rows])
            starts[rank] += rows
        assert_module_right(item, part.module.name, x, np.concatenate(pieces, axis=1), written)


@check("split", _moe)
def test_experts_over_ranks(subject: Subject, case: Named, tmp_path: Path) -> None:
    """Two ranks with half of the experts each, and two with half of every expert: their outputs add up."""
    written = write_model(tmp_path / "checkpoint", case, experts=4, ranks=TP)
    planned = plan_model(written, subject, case)
    reader = ShardReader(written.folder)
    (item,) = [item for item in planned.layers if item.layer.op == "moe"]
    spec, capability = item.packed.spec, item.capability
    assert capability is not None
    assert spec.moe is not None
    rng = np.random.default_rng(5)
    x = random_input(ROWS, spec.in_features, rng, spec.dtype)
    routing = make_routing(ROWS, spec.moe.experts, 2, rng)
    w13, w2 = stacked_of(written.weights, item)
    wanted = expected.experts(x, w13, w2, routing, capability, spec.dtype)
    layouts = {"ep": [Rank(ep_rank=r, ep_size=2) for r in range(2)]}
    if TP in item.layer.legal_tp:
        layouts["tp"] = [Rank(tp_rank=r, tp_size=2) for r in range(2)]
    for name, ranks in layouts.items():
        pieces = []
        for rank in ranks:
            layer = _loaded(subject, item, reader, rank)
            assert isinstance(layer, QuantExperts)
            pieces.append(run_experts(layer, x, routing, spec.dtype, subject, _map(spec.moe.experts, rank)))
        allowed = wanted.allowed + rounding_of(pieces, spec.dtype)
        summed = replace(wanted, allowed=allowed)
        assert_experts_right(replace(pseudo_case(item, capability), variant=name), np.sum(pieces, axis=0), summed)


def _map(experts: int, rank: Rank) -> Array | None:
    if rank.ep_size == 1:
        return None
    held = experts // rank.ep_size
    where = np.full(experts, -1, np.int32)
    where[rank.ep_rank * held : (rank.ep_rank + 1) * held] = np.arange(held)
    return where
