"""Group declared: what a capability declares, it does, for every number of rows, dtype, bias and layout of input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import lcm

import numpy as np
import pytest
import torch

from omniplat.conformance.build import (
    assert_output,
    linear_layer,
    routing_tensors,
    run_experts,
    to_input,
    to_output,
)
from omniplat.conformance.cases import Case, Gating, case_of, representative, schemes_of, spread
from omniplat.conformance.checks import Named, check
from omniplat.conformance.inputs import as_dtype
from omniplat.conformance.judge import assert_experts_right, expert_trial, linear_trial, make_weight
from omniplat.conformance.subject import Subject, equipped
from omniplat.conformance.tolerances import excess
from omniplat.conformance.weights import columns_unit
from omniplat.errors import UnsupportedCombinationError

ROWS = (0, 1, 3, 17, 257)


def _schemes(subject: Subject, profile: str) -> Iterable[Case]:
    for capability in subject.spec.capabilities:
        for scheme in schemes_of(subject, capability, profile):
            yield case_of(capability, scheme)


def _rows(subject: Subject, profile: str) -> Iterable[Case]:
    for case in representative(subject):
        for rows in ROWS:
            yield replace(case, rows=rows)


def _dtypes(subject: Subject, profile: str) -> Iterable[Case]:
    for case in representative(subject):
        for dtype in case.capability.dtypes:
            for bias in (False, True) if case.capability.bias else (False,):
                yield replace(case, dtype=dtype, bias=bias)


def _linear(subject: Subject, profile: str) -> Iterable[Case]:
    return representative(subject, "linear")


def _moe(subject: Subject, profile: str) -> Iterable[Case]:
    return representative(subject, "moe")


def _gatings(subject: Subject, profile: str) -> Iterable[Case]:
    """Every activation that experts may have, as it is and with a limit that gates and ups exceed.

    In the longest dtype, which tells them best apart.
    """
    for case in representative(subject, "moe"):
        dtype = next(name for name in ("f32", "f16", "bf16") if name in case.capability.dtypes)
        for activation in case.capability.moe_activations:
            alpha = 1.702 if activation == "swiglu-oai" else 1.0
            yield replace(case, dtype=dtype, variant=activation, gating=Gating(activation, alpha=alpha))
            limited = Gating(activation, limit=0.5, alpha=alpha)
            yield replace(case, dtype=dtype, variant=f"{activation}-limit", gating=limited)


def _choices(subject: Subject, profile: str) -> Iterable[Named]:
    """Rows that choose one expert, three, and all of them; everywhere else they choose two."""
    for case in representative(subject, "moe"):
        for top in dict.fromkeys(min(top, case.experts) for top in (1, 3, case.experts)):
            yield Named(f"{case.id}-top{top}", case.capability, (case, top))


def _two_schemes(subject: Subject, profile: str) -> Iterable[Case]:
    """Experts whose w2 has another weight than their w13, of those that a capability declares, either way round."""
    for case in representative(subject, "moe"):
        schemes = {scheme.weight_id: scheme for scheme in reversed(schemes_of(subject, case.capability, "full"))}
        others = [scheme for weight, scheme in schemes.items() if weight != case.scheme.weight_id]
        for other in spread(others, 3):
            second = other.with_activation(case.scheme.activation)
            unit = lcm(columns_unit(case.scheme), columns_unit(second))
            k, inner = (-(-size // unit) * unit for size in (96, 64))
            sized = case_of(case.capability, case.scheme, k=k, inner=inner, bias=case.bias)
            for first, last in ((case.scheme, second), (second, case.scheme)):
                yield replace(sized, scheme=first, variant=f"w2-{last.weight_id}", w2_scheme=last)


def _roles(subject: Subject, profile: str) -> Iterable[Case]:
    """Weights with what a scheme does not say: smoothing, an order of columns, zero points between integers."""
    for case in representative(subject, "linear"):
        if case.scheme.weight.element != "bf16" and not case.scheme.weight.element.startswith("gguf_"):
            yield replace(case, scheme=replace(case.scheme, pre_scale=True), variant="pre_scale")
    for capability in subject.spec.capabilities:
        schemes = schemes_of(subject, capability, "full") if capability.op == "linear" else ()
        for scheme in schemes:
            quant = scheme.weight
            if quant.granularity == "group" and quant.is_integer and quant.scale_format == "f32":
                yield case_of(capability, scheme, k=4 * quant.group_size, variant="group_index")
                break
        for scheme in schemes:
            if scheme.weight.is_integer and not scheme.weight.symmetric:
                yield case_of(capability, scheme, variant="fractional zero points")
                break


@check("declared", _schemes, runs=False)
def test_is_accepted(subject: Subject, case: Case) -> None:
    """Planning accepts the layers of every scheme at sizes that the shape rules allow, on an architecture it names."""
    device, archs = subject.device, case.capability.archs
    arch = device.arch if not archs or device.arch in archs else archs[0]
    reason = replace(subject, device=equipped(device.kind, arch)).decide(case.capability, case.spec)
    assert not reason, f"{case.id}: {reason}"


@check("declared", _rows)
def test_any_number_of_rows(subject: Subject, case: Case) -> None:
    _assert_right(subject, case)


@check("declared", _dtypes)
def test_dtypes_and_bias(subject: Subject, case: Case) -> None:
    """Every declared dtype, and a bias that is added before the one rounding of the output."""
    _assert_right(subject, case)


def _assert_right(subject: Subject, case: Case) -> None:
    if case.experts:
        trial = expert_trial(subject, case)
        x, routing = trial.input(), trial.routing()
        if case.rows == 0:
            assert trial.run(x, routing).shape == (0, case.k)
        else:
            trial.assert_right(x, routing)
        return
    linear = linear_trial(subject, case)
    if case.rows == 0:
        assert linear.run(linear.input()).shape == (0, case.n)
    else:
        linear.assert_within_bound(linear.input())


@check("declared", _linear)
def test_three_dimensions(subject: Subject, case: Case) -> None:
    trial = linear_trial(subject, case)
    x = trial.input(6)
    flat, deep = trial.run(x), trial.run(x.reshape(2, 3, case.k))
    assert deep.shape == (2, 3, case.n)
    wanted = trial.expect(x)
    beyond = excess(deep.reshape(flat.shape), wanted.y, wanted.allowed)
    assert beyond is None, f"{case.id}: {beyond}"


@check("declared", _linear)
def test_strides(subject: Subject, case: Case) -> None:
    """Inputs that are not contiguous: transposed, every second row, every second column."""
    trial = linear_trial(subject, case)
    x = trial.input(6)
    given = to_input(x, case.dtype, subject)
    wanted = trial.expect(x)
    wide = torch.zeros((12, 2 * case.k), dtype=given.dtype, device=given.device)
    wide[::2, 1::2] = given
    for view in (given.t().contiguous().t(), wide[::2, 1::2]):
        assert not view.is_contiguous()
        y = trial.layer(view)
        assert_output(y, (6, case.n), given.dtype)
        beyond = excess(to_output(y), wanted.y, wanted.allowed)
        assert beyond is None, f"{case.id}: {beyond}"


@check("declared", _roles)
def test_an_optional_role_is_used_or_refused(subject: Subject, case: Case) -> None:
    """What a scheme does not say of a weight means something else without it: planning refuses it where the capability
    says so, and the kernel too; elsewhere it is used."""
    weight = make_weight(case)
    if case.variant == "group_index":
        groups = case.k // case.scheme.weight.group_size
        order = case.rng().permutation(np.arange(case.k) % groups).astype(np.int32)
        weight = replace(weight, tensors={**weight.tensors, "group_index": order})
    if case.variant == "fractional zero points":
        zero = weight.tensors["zero_point"].astype(np.float32) + np.float32(0.25)
        weight = replace(weight, tensors={**weight.tensors, "zero_point": zero})
    if case.variant in case.capability.refuses:
        spec = replace(case.spec, extras=(case.variant,))
        assert "tensors" in subject.decide(case.capability, spec), f"{case.id}: planning takes it"
        with pytest.raises(UnsupportedCombinationError):
            linear_layer(subject, case.capability, weight, case.dtype)
        return
    trial = linear_trial(subject, case, weight)
    x = trial.input()
    if "pre_scale" in weight.tensors:
        # What is multiplied by it is what the quantization represents exactly.
        x = as_dtype(x / weight.tensors["pre_scale"], case.dtype)
    trial.assert_within_bound(x)


@check("declared", _gatings)
def test_activations_of_experts(subject: Subject, case: Case) -> None:
    """What lies between the two products, with the limit and the alpha that a checkpoint may give."""
    trial = expert_trial(subject, case)
    trial.assert_right(trial.input(), trial.routing())


@check("declared", _two_schemes)
def test_experts_of_two_schemes(subject: Subject, case: Case) -> None:
    """Recipes give w2 more bits than w13: a kernel reads each by its own scheme, or planning refuses the layer."""
    if subject.decide(case.capability, case.spec):
        return
    trial = expert_trial(subject, case)
    trial.assert_right(trial.input(), trial.routing())


@check("declared", _choices)
def test_any_number_of_choices(subject: Subject, case: Named) -> None:
    """As many experts a row as a model's router chooses."""
    layer, top = case.value
    trial = expert_trial(subject, layer)
    trial.assert_right(trial.input(), trial.routing(top=top))


@check("declared", _moe)
def test_slots_that_choose_nothing(subject: Subject, case: Case) -> None:
    """An id of -1 contributes nothing; a row of such ids is zero."""
    trial = expert_trial(subject, case)
    x, routing = trial.input(), trial.routing()
    ids = routing.ids.copy()
    ids[0], ids[1, 0] = -1, -1
    routing = replace(routing, ids=ids)
    y = trial.run(x, routing)
    assert not y[0].any(), f"{case.id}: a row without experts is not zero"
    assert_experts_right(case, y, trial.expect(x, routing))


@check("declared", _moe)
def test_expert_map(subject: Subject, case: Case) -> None:
    """Global ids become local ones; experts of another rank contribute nothing."""
    trial = expert_trial(subject, case)
    x, local = trial.input(), trial.routing()
    count = case.experts
    # Twice as many experts exist; this rank holds the odd ones, in reverse order.
    where = np.full(2 * count, -1, np.int32)
    where[1::2] = np.arange(count - 1, -1, -1)
    ids = case.rng().permuted(np.tile(np.arange(2 * count), (case.rows, 1)), axis=1)[:, : local.ids.shape[1]]
    ids = ids.astype(np.int32)
    seen = replace(local, ids=where[ids])
    y = trial.run(x, replace(local, ids=np.ascontiguousarray(ids)), where)
    assert_experts_right(case, y, trial.expect(x, seen))


@check("declared", _moe)
def test_integer_types_of_ids(subject: Subject, case: Case) -> None:
    trial = expert_trial(subject, case)
    x, routing = trial.input(), trial.routing()
    first = run_experts(trial.layer, x, routing, case.dtype, subject)
    wide = replace(routing, ids=routing.ids.astype(np.int64))
    assert routing_tensors(wide, subject)[0].dtype == torch.int64
    second = run_experts(trial.layer, x, wide, case.dtype, subject)
    np.testing.assert_array_equal(first, second)
