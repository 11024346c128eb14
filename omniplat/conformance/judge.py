"""Layers of a case against the oracle: what the groups share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from omniplat.canonical import Array, CanonicalWeight
from omniplat.conformance import expected
from omniplat.conformance.build import (
    expert_layer,
    linear_layer,
    make_routing,
    run_experts,
    run_linear,
)
from omniplat.conformance.cases import Case
from omniplat.conformance.expected import Expected, Routing, executed_activation
from omniplat.conformance.inputs import as_dtype, random_input, representable_input
from omniplat.conformance.subject import Subject
from omniplat.conformance.tolerances import Float64, excess, finite, inside_window, noise_ratio, usage
from omniplat.conformance.weights import random_weight, stack, static_input
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.scheme import Scheme, TensorQuant

Record = Callable[[str, object], None]


@dataclass(frozen=True, slots=True)
class LinearTrial:
    """A case's weight and layer."""

    subject: Subject
    case: Case
    weight: CanonicalWeight
    layer: QuantLinear

    def input(self, rows: int | None = None) -> Array:
        """Rows that the executed quantization represents exactly: where there is none, any numbers of the dtype."""
        executed = executed_activation(self.case.capability, self.case.scheme)
        count = self.case.rows if rows is None else rows
        if executed is None:
            return random_input(count, self.case.k, self.case.rng(), self.case.dtype)
        return as_dtype(representable_input(executed, count, self.case.k, self.case.rng()), self.case.dtype)

    def expect(self, x: Array) -> Expected:
        return expected.linear(x, self.weight, self.case.capability, self.case.dtype)

    def run(self, x: Array) -> Float64:
        return run_linear(self.layer, x, self.case.dtype, self.subject)

    def assert_within_bound(self, x: Array) -> float:
        """Run `x` and hold it against the oracle; returns how much of the bound was used."""
        wanted, found = self.expect(x), self.run(x)
        beyond = excess(found, wanted.y, wanted.allowed)
        assert beyond is None, f"{self.case.id}: {beyond}"
        return usage(found, wanted.y, wanted.allowed)


def linear_trial(subject: Subject, case: Case, weight: CanonicalWeight | None = None) -> LinearTrial:
    """A layer of the case with random codes, or with the given weight."""
    used = weight or make_weight(case)
    return LinearTrial(subject, case, used, linear_layer(subject, case.capability, used, case.dtype))


def make_weight(case: Case) -> CanonicalWeight:
    weight = random_weight(case.scheme, case.n, case.k, case.rng(), bias=case.bias, stored=_stored(case.dtype))
    return for_execution(weight, executed_activation(case.capability, case.scheme))


def _stored(dtype: str) -> str:
    return dtype


def for_execution(weight: CanonicalWeight, executed: TensorQuant | None) -> CanonicalWeight:
    """The weight with the static input scales that the executed activation reads."""
    return replace(weight, tensors={**weight.tensors, **static_input(executed)})


@dataclass(frozen=True, slots=True)
class ExpertTrial:
    """A case's stacked weights, layer and routing."""

    subject: Subject
    case: Case
    w13: CanonicalWeight
    w2: CanonicalWeight
    layer: QuantExperts

    def routing(self, rows: int | None = None, top: int = 2) -> Routing:
        count = self.case.rows if rows is None else rows
        return make_routing(count, self.case.experts, min(top, self.case.experts), self.case.rng())

    def input(self, rows: int | None = None) -> Array:
        count = self.case.rows if rows is None else rows
        return random_input(count, self.case.k, self.case.rng(), self.case.dtype)

    def expect(self, x: Array, routing: Routing, *, rounds_middle: bool = False) -> Expected:
        case = self.case
        return expected.experts(
            x, self.w13, self.w2, routing, case.capability, case.dtype, case.gating, rounds_middle=rounds_middle
        )

    def run(self, x: Array, routing: Routing, expert_map: Array | None = None) -> Float64:
        return run_experts(self.layer, x, routing, self.case.dtype, self.subject, expert_map)

    def assert_right(self, x: Array, routing: Routing) -> float:
        return assert_experts_right(self.case, self.run(x, routing), self.expect(x, routing))


def assert_experts_right(case: Case, found: Float64, wanted: Expected) -> float:
    """Weight-only experts stay within their bound; others make the error that their quantization makes.

    Returns how much of the bound was used, or the ratio of errors.
    """
    if np.isfinite(wanted.allowed).all():
        found = finite(found, wanted.y, wanted.allowed, case.dtype)
        beyond = excess(found, wanted.y, wanted.allowed)
        assert beyond is None, f"{case.id}: {beyond}"
        return usage(found, wanted.y, wanted.allowed)
    ratio = noise_ratio(found, expected.rounded(wanted.y, case.dtype), wanted.unquantized)
    assert inside_window(ratio), f"{case.id}: {ratio:.3g} times the error of the declared quantization" + (
        ": a more precise computation than declared" if ratio < 1 else ""
    )
    return ratio


def expert_trial(subject: Subject, case: Case) -> ExpertTrial:
    w13, w2 = expert_weights(case)
    layer = expert_layer(subject, case.capability, w13, w2, case.dtype, case.gating)
    return ExpertTrial(subject, case, w13, w2, layer)


def expert_weights(case: Case) -> tuple[CanonicalWeight, CanonicalWeight]:
    """Stacked random weights whose outputs keep the size of their inputs."""
    rng, stored = case.rng(), _stored(case.dtype)
    executed = executed_activation(case.capability, case.scheme)

    def made(scheme: Scheme, rows: int, columns: int) -> CanonicalWeight:
        parts = [random_weight(scheme, rows, columns, rng, bias=case.bias, stored=stored) for _ in range(case.experts)]
        return stack([for_execution(part, executed) for part in parts])

    return made(case.scheme, 2 * case.inner, case.k), made(case.w2_scheme or case.scheme, case.k, case.inner)
