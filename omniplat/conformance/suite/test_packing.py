"""Group packing: what is fused computes what its parts compute, and what cannot be fused is not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omniplat.api import load_layers
from omniplat.canonical import Array, CanonicalWeight
from omniplat.conformance import expected
from omniplat.conformance.build import expert_layer, linear_layer, run_experts, run_linear
from omniplat.conformance.cases import Case, numeric_cases
from omniplat.conformance.checks import Named, check
from omniplat.conformance.expected import executed_activation
from omniplat.conformance.files import assert_linear_right, held, plan_model, write_model
from omniplat.conformance.inputs import as_dtype, representable_input
from omniplat.conformance.judge import assert_experts_right, expert_trial, make_weight
from omniplat.conformance.subject import Subject
from omniplat.conformance.tolerances import excess
from omniplat.conformance.untouched import nothing_is_read
from omniplat.errors import InvalidCheckpointError
from omniplat.runtime.assemble import Assembly
from omniplat.scheme import low_rank_base


def _fusable(subject: Subject, profile: str) -> Iterable[Case]:
    for case in numeric_cases(subject, "quick", "linear"):
        # SVDQuant's parts share no low-rank pair: they are never fused.
        if low_rank_base(case.scheme.weight) is None:
            height = case.scheme.weight.block[0] if case.scheme.weight.granularity == "block" else 0
            yield replace(case, n=height or case.n, bias=False)


def _moe(subject: Subject, profile: str) -> Iterable[Case]:
    return numeric_cases(subject, "quick", "moe")


@check("packing", _fusable)
def test_fused_is_its_parts(subject: Subject, case: Case) -> None:
    """Three parts with scales of their own, fused as q, k and v are: the rows of each part as if it were alone."""
    heights = [case.n, case.n, 2 * case.n]
    executed = executed_activation(case.capability, case.scheme)
    parts = [replace(case, n=rows, variant=f"part{i}") for i, rows in enumerate(heights)]
    weights = [make_weight(part) for part in parts]
    starts = [0, heights[0], heights[0] + heights[1]]
    assembly = Assembly("fused", case.scheme, sum(heights), case.k, starts=starts)
    for start, weight in zip(starts, weights, strict=True):
        assembly.put(replace(weight, scheme=case.scheme), start, module=f"part at {start}")
    fused = linear_layer(subject, case.capability, assembly.finish(), case.dtype)
    x = as_dtype(representable_input(executed, case.rows, case.k, case.rng()), case.dtype)
    found = run_linear(fused, x, case.dtype, subject)
    for start, weight in zip(starts, weights, strict=True):
        rows = slice(start, start + weight.out_features)
        alone = expected.linear(x, weight, case.capability, case.dtype)
        beyond = excess(found[:, rows], alone.y, alone.allowed)
        assert beyond is None, f"{case.id}, rows {start} on: {beyond}"


@check("packing", _moe)
def test_order_of_experts(subject: Subject, case: Case) -> None:
    """Experts in another order, with ids that follow it, are the same layer."""
    trial = expert_trial(subject, case)
    x, routing = trial.input(), trial.routing()
    order = np.roll(np.arange(case.experts), 1)
    position = np.argsort(order).astype(routing.ids.dtype)
    w13, w2 = (_permuted(weight, order) for weight in (trial.w13, trial.w2))
    moved = expert_layer(subject, case.capability, w13, w2, case.dtype)
    found = run_experts(moved, x, replace(routing, ids=position[routing.ids]), case.dtype, subject)
    assert_experts_right(case, found, trial.expect(x, routing))


def _permuted(weight: CanonicalWeight, order: Array) -> CanonicalWeight:
    return replace(weight, tensors={role: array[order] for role, array in weight.tensors.items()})


@check("packing", _moe)
def test_gate_before_up(subject: Subject, case: Case) -> None:
    """The first half of w13 goes through the activation, the second does not: swapped, it is another layer."""
    trial = expert_trial(subject, case)
    x, routing = trial.input(), trial.routing()
    halves = {}
    for role, array in trial.w13.tensors.items():
        shared = role in ("pre_scale", "group_index") or role.startswith("input_")
        whole = shared or array.ndim < 2 or array.shape[1] % 2
        halves[role] = array if whole else np.concatenate(np.split(array, 2, axis=1)[::-1], axis=1)
    if case.scheme.weight.granularity == "block" and case.inner % case.scheme.weight.block[0]:
        halves = dict(trial.w13.tensors)
    swapped = replace(trial, w13=replace(trial.w13, tensors=halves))
    layer = expert_layer(subject, case.capability, swapped.w13, swapped.w2, case.dtype)
    replace(swapped, layer=layer).assert_right(x, routing)


def _mixable(subject: Subject, profile: str) -> Iterable[Named]:
    return held(subject, "linear", "quick")


def _mixable_experts(subject: Subject, profile: str) -> Iterable[Named]:
    return held(subject, "moe", "quick")


@check("packing", _mixable)
def test_mixed_parts_run_unfused(subject: Subject, case: Named, tmp_path: Path) -> None:
    """v left in 16 bits, and up: q, k and gate are planned and loaded by themselves, with their own values."""
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    written = write_model(tmp_path / "checkpoint", case, mixed=(f"{attention}.v_proj", f"{mlp}.up_proj"))
    planned = plan_model(written, subject, case)
    names = {item.layer.name: item.layer.status for item in planned.layers}
    assert names[f"{attention}.v_proj"] == "unquantized"
    assert names[f"{attention}.q_proj"] == names[f"{attention}.k_proj"] == names[f"{mlp}.gate_proj"] == "ok"
    assert "mixed-fused-shards" in {item.code for item in planned.plan.findings}
    for _, item, layer in load_layers(planned):
        if item.layer.name in (f"{attention}.q_proj", f"{mlp}.gate_proj"):
            assert_linear_right(subject, item, layer, written)


@check("packing", _mixable_experts, runs=False)
def test_mixed_experts_are_refused(subject: Subject, case: Named, tmp_path: Path) -> None:
    """One expert left in 16 bits: the layer is invalid, and loading raises before any tensor."""
    prefix = "model.layers.0.mlp.experts.1"
    mixed = [f"{prefix}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    written = write_model(tmp_path / "checkpoint", case, experts=3, mixed=mixed)
    planned = plan_model(written, subject, case)
    (status,) = [item.layer.status for item in planned.layers if item.layer.op == "moe"]
    assert status == "invalid"
    with nothing_is_read(), pytest.raises(InvalidCheckpointError):
        list(load_layers(planned))
