"""Group numerics, by tiers. Tolerances are derived (`omniplat.conformance.tolerances`), never chosen by backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from omniplat.canonical import Array
from omniplat.capability import unfollowed
from omniplat.conformance.build import expert_layer, make_routing
from omniplat.conformance.cases import Case, case_of, numeric_cases, schemes_of
from omniplat.conformance.catalog import rule_variants
from omniplat.conformance.checks import check
from omniplat.conformance.expected import executed_activation, rounded
from omniplat.conformance.inputs import (
    as_dtype,
    nudged,
    random_input,
    representable_input,
    spread_groups,
    spread_rows,
    tied_input,
)
from omniplat.conformance.judge import (
    ExpertTrial,
    LinearTrial,
    assert_experts_right,
    expert_trial,
    for_execution,
    linear_trial,
    make_weight,
)
from omniplat.conformance.subject import Subject
from omniplat.conformance.tolerances import (
    ROW_WINDOW,
    UNITS,
    Float64,
    excess,
    gamma,
    inside_window,
    noise_ratio,
    noise_ratios,
    rounding,
)
from omniplat.conformance.weights import (
    exact_weight,
    full_weight,
    gated_weight,
    has_exact,
    picking_weight,
    stack,
    zeroed_columns,
)

Record = Callable[[str, object], None]


def _exact(subject: Subject, profile: str) -> Iterable[Case]:
    for case in numeric_cases(subject, profile, "linear"):
        if has_exact(case.scheme):
            # A product that is rounded before the bias is added is not exact where the sum is.
            bias = case.bias and not case.capability.rounds_before_bias
            yield replace(case, k=case_of(case.capability, case.scheme, k=160).k, bias=bias, variant="exact")


def _one_rounding(subject: Subject, profile: str) -> Iterable[Case]:
    """Weight-only layers in the shortest dtype, of kernels that accumulate integers of this size exactly."""
    for case in numeric_cases(subject, profile, "linear"):
        plain = executed_activation(case.capability, case.scheme) is None
        if plain and has_exact(case.scheme) and UNITS[case.capability.accumulator] <= UNITS["f32"]:
            dtype = next(name for name in ("bf16", "f16", "f32") if name in case.capability.dtypes)
            bias = case.capability.bias and not case.capability.rounds_before_bias
            yield case_of(case.capability, case.scheme, k=256, dtype=dtype, bias=bias, variant="one-rounding")


def _bound(subject: Subject, profile: str) -> Iterable[Case]:
    return numeric_cases(subject, profile, "linear")


def _experts(subject: Subject, profile: str) -> Iterable[Case]:
    return numeric_cases(subject, profile, "moe")


def _plain_experts(subject: Subject, profile: str) -> Iterable[Case]:
    for case in numeric_cases(subject, profile, "moe"):
        if executed_activation(case.capability, case.scheme) is None:
            yield case


def _exact_experts(subject: Subject, profile: str) -> Iterable[Case]:
    for case in _plain_experts(subject, profile):
        if has_exact(case.scheme):
            yield replace(case, bias=False, variant="exact")


def _quantizing_experts(subject: Subject, profile: str) -> Iterable[Case]:
    for case in numeric_cases(subject, profile, "moe"):
        if executed_activation(case.capability, case.scheme) is not None:
            yield case


def _quantizing(subject: Subject, profile: str) -> Iterable[Case]:
    """One case per activation that a capability's kernel quantizes at run time."""
    for capability in subject.spec.capabilities:
        if capability.op != "linear":
            continue
        seen = set()
        for scheme in schemes_of(subject, capability, profile):
            executed = executed_activation(capability, scheme)
            if executed is None or executed in seen or executed.element == "int8_bnb":
                continue
            seen.add(executed)
            yield case_of(capability, scheme, rows=25, n=96, k=256, dtype=capability.dtypes[0])


def _by_rule(subject: Subject, profile: str) -> Iterable[Case]:
    """One case per activation and rule for its scales, and per rounding, of those that a kernel follows."""
    for capability in subject.spec.capabilities:
        if capability.op != "linear":
            continue
        schemes = schemes_of(subject, capability, "full")
        plain = next((scheme for scheme in schemes if has_exact(scheme)), None)
        seen = set()
        for scheme in schemes:
            if scheme.activation is None or plain is None or capability.executes not in ("", scheme.activation_id):
                continue
            # of a dual level's first division nobody says in which type its quotient is
            variants = rule_variants(scheme.activation) if scheme.activation.second_scale != "dual" else ()
            for quant in variants:
                used = plain.with_activation(quant)
                if quant in seen or (unfollowed(capability, quant) is not None and not capability.substitutes):
                    continue
                seen.add(quant)
                variant = f"{quant.scale_rule}-{quant.rounding}"
                yield case_of(capability, used, rows=9, k=256, dtype=capability.dtypes[-1], variant=variant)


@check("numerics", _by_rule)
def test_rules_for_activations(subject: Subject, case: Case) -> None:
    """Codes and scales of the input, read through a weight of ones that picks columns: those of the checkpoint's rule.

    Sizes of a trained model's activations, and of ones that are nearly nothing.
    """
    rng = case.rng()
    picked = rng.permutation(case.k)[np.arange(case.n) % case.k]
    weight = for_execution(
        picking_weight(case.scheme, picked, case.k), executed_activation(case.capability, case.scheme)
    )
    trial = linear_trial(subject, replace(case, n=len(picked)), weight)
    for scale in (1.0, 2.0**-12):
        x = as_dtype(random_input(case.rows, case.k, rng, case.dtype) * scale, case.dtype)
        # Values that a few roundings of float32 carry over the middle of two codes may have either.
        near = [trial.expect(values).y for values in (x, nudged(x, 1 + 2.0**-22), nudged(x, 1 - 2.0**-22))]
        y = np.clip(found := trial.run(x), np.min(near, axis=0), np.max(near, axis=0))
        # One product a sum, and scales on top of it: a handful of roundings.
        unit = max(UNITS[case.capability.accumulator], UNITS["f32"])
        beyond = excess(found, y, gamma(8, unit) * np.abs(y) + rounding(y, case.dtype))
        assert beyond is None, f"{case.id}: {beyond}; list the rules that the kernel follows in `scale_rules`"


@check("numerics", _by_rule)
def test_ties_of_activations(subject: Subject, case: Case) -> None:
    """Values half way between two codes, under scales that are powers of two: the declared rounding decides alone."""
    rng = case.rng()
    picked = rng.permutation(case.k)[np.arange(case.n) % case.k]
    executed = executed_activation(case.capability, case.scheme)
    assert executed is not None
    trial = linear_trial(subject, case, for_execution(picking_weight(case.scheme, picked, case.k), executed))
    x = as_dtype(tied_input(executed, case.rows, case.k, rng), case.dtype)
    wanted = rounded(trial.expect(x).y, case.dtype)
    np.testing.assert_array_equal(trial.run(x), wanted, f"{case.id}: list the kernel's rounding in `roundings`")


@check("numerics", _one_rounding)
def test_one_rounding(subject: Subject, case: Case) -> None:
    """Sums of integers that f32 holds and the output does not: rounded once, to nearest even, the bias in them.

    The bound tier cannot ask this of weight-only kernels, which may round weights to the output's dtype.
    """
    rng = case.rng()
    trial = linear_trial(subject, case, full_weight(case.scheme, case.n, case.k, rng, bias=case.bias))
    x = rng.integers(-64, 65, (case.rows, case.k)).astype(np.float32)
    wanted = rounded(trial.expect(x).y, case.dtype)
    np.testing.assert_array_equal(trial.run(x), wanted, f"{case.id}: see `rounds_before_bias`")


@check("numerics", _exact)
def test_exact(subject: Subject, case: Case) -> None:
    """Small integers under scales of 1, few in a row: every sum is representable, so every bit has to be right.

    Finds nibble order, signs, rows and columns that are swapped, shifted or dropped.
    """
    executed = executed_activation(case.capability, case.scheme)
    rng = case.rng()
    weight = exact_weight(case.scheme, case.n, case.k, rng, bias=case.bias)
    trial = linear_trial(subject, case, weight)
    x = representable_input(executed, case.rows, case.k, rng)
    wanted = trial.expect(x)
    if executed is not None:
        # Few columns count, so that sums of codes fit the output too: it is rounded once, and that is compared.
        found = trial.run(x)
        np.testing.assert_array_equal(found, _once(wanted.y, case.dtype, found, wanted.allowed))
        return
    assert np.array_equal(rounded(wanted.y, case.dtype), wanted.y), "the data of this check is not exact"
    np.testing.assert_array_equal(trial.run(x), wanted.y)


def _once(y: Float64, dtype: str, found: Float64, allowed: Float64) -> Float64:
    """`y` rounded once; where it is no number of the dtype, whatever of its two neighbours was found."""
    nearest = rounded(y, dtype)
    is_exact = nearest == y
    close = np.abs(found - y) <= allowed
    return np.where(~is_exact & close, found, nearest)


@check("numerics", _bound)
def test_bound(subject: Subject, case: Case, record_property: Record) -> None:
    """Random codes of the whole range, on an input that has the same codes for everybody."""
    trial = linear_trial(subject, case)
    record_property("bound_use", trial.assert_within_bound(trial.input()))


@check("numerics", _quantizing)
def test_noise(subject: Subject, case: Case, record_property: Record) -> None:
    """The backend's quantization error over the oracle's own. Below the window: it does not quantize as declared."""
    trial = linear_trial(subject, case)
    x = random_input(case.rows, case.k, case.rng(), case.dtype)
    wanted, found = trial.expect(x), trial.run(x)
    ratio = noise_ratio(found, rounded(wanted.y, case.dtype), wanted.unquantized)
    record_property("noise", ratio)
    record_property("noise_min", ratio)
    assert inside_window(ratio), f"{case.id}: {ratio:.3g} times the error of the declared quantization" + (
        " (a silent computation in higher precision?)" if ratio < 1 else " (another granularity or rule?)"
    )


@check("numerics", _quantizing)
def test_range_of_rows(subject: Subject, case: Case, record_property: Record) -> None:
    """Rows of sizes from 2^-12 to 2^12, each judged by itself: a scale that rows share shows."""
    trial = linear_trial(subject, case)
    _judge_rows(trial, spread_rows(case.rows, case.k, case.rng(), case.dtype), record_property)


@check("numerics", _quantizing)
def test_range_of_groups(subject: Subject, case: Case, record_property: Record) -> None:
    """Groups of sizes 2^-8 and 2^8 under a weight that reads only the small ones: a scale that groups share shows.

    A re-encoded input holds groups exactly only while a token's span little: those are 2^-4 and 2^4.
    """
    executed = executed_activation(case.capability, case.scheme)
    assert executed is not None
    size = executed.group_size if executed.granularity == "group" else 32
    binades = 8 if case.capability.via and executed.scale_format == "e8m0" else 16
    x, small = spread_groups(case.rows, case.k, size, case.rng(), case.dtype, binades)
    weight = make_weight(case)
    if case.scheme.weight.symmetric and case.scheme.weight.element not in ("nf4", "fp4_bnb") and has_exact(case.scheme):
        weight = zeroed_columns(weight, small)
    trial = linear_trial(subject, case, weight)
    _judge_rows(trial, x, record_property)


def _judge_rows(trial: LinearTrial, x: Array, record: Record) -> None:
    case, wanted, found = trial.case, trial.expect(x), trial.run(x)
    reference = rounded(wanted.y, case.dtype)
    ratios = noise_ratios(found, reference, wanted.unquantized)
    # A row whose own error is no more than accumulation explains says nothing about quantization.
    own = np.linalg.norm(reference - wanted.unquantized, axis=-1)
    judged = own > 4 * np.linalg.norm(wanted.allowed, axis=-1) * _slack(case)
    if judged.any():
        record("range", float(ratios[judged].max()))
        record("range_min", float(ratios[judged].min()))
    wrong = [(int(i), float(ratios[i])) for i in np.nonzero(judged)[0] if not inside_window(float(ratios[i]))]
    assert not wrong, f"{case.id}: rows (and their ratio of errors) out of the window: {wrong[:8]}"


def _slack(case: Case) -> float:
    """The part of the bound that is reached in practice; sums of random signs stay far below gamma_n."""
    return 0.0 if UNITS[case.capability.accumulator] <= UNITS["f32"] else 0.1


# --- experts ---------------------------------------------------------------------------------------------------------

#: Columns whose inputs are 4 and whose weights in every gate are 1: a gate of 32, for which silu is the identity.
_GATE = np.arange(32, 40)


@check("numerics", _exact_experts)
def test_exact_of_experts(subject: Subject, case: Case) -> None:
    """Small integers through gates of 32, picked by ones: every bit of the routed sum has to be right.

    Finds experts, rows and columns that are swapped, shifted or dropped, gate in the place of up, and weights of
    routing that are those of another choice.
    """
    rng = case.rng()
    w13, w2 = [], []
    for _ in range(case.experts):
        ups = rng.permutation(case.k)[np.arange(case.inner) % case.k]
        downs = rng.permutation(case.inner)[np.arange(case.k) % case.inner]
        w13.append(gated_weight(case.scheme, _GATE, ups, case.k))
        w2.append(picking_weight(case.scheme, downs, case.inner))
    first, second = stack(w13), stack(w2)
    layer = expert_layer(subject, case.capability, first, second, case.dtype)
    x = rng.integers(-4, 5, (case.rows, case.k)).astype(np.float32)
    x[:, _GATE] = 4.0
    routing = make_routing(case.rows, case.experts, min(2, case.experts), rng)
    routing = replace(routing, weights=np.exp2(rng.integers(-3, 1, routing.weights.shape)).astype(np.float32))
    trial = ExpertTrial(subject, case, first, second, layer)
    wanted = rounded(trial.expect(x, routing).y, case.dtype)
    np.testing.assert_array_equal(trial.run(x, routing), wanted)


@check("numerics", _plain_experts)
def test_bound_of_experts(subject: Subject, case: Case, record_property: Record) -> None:
    """Routing and both linears within the propagated bound."""
    trial = expert_trial(subject, case)
    record_property("bound_use_experts", trial.assert_right(trial.input(), trial.routing()))


@check("numerics", _quantizing_experts)
def test_noise_of_experts(subject: Subject, case: Case, record_property: Record) -> None:
    """Routing and both linears with the error of the declared quantization."""
    trial = expert_trial(subject, case)
    ratio = trial.assert_right(trial.input(), trial.routing())
    record_property("noise_experts", ratio)
    record_property("noise_experts_min", ratio)


@check("numerics", _experts)
def test_range_of_experts(subject: Subject, case: Case, record_property: Record) -> None:
    """Rows of sizes that lie 2^8 apart, each judged by itself, whether the middle was rounded to the dtype or not."""
    trial = expert_trial(subject, case)
    x = spread_rows(case.rows, case.k, case.rng(), case.dtype, binades=8)
    routing = trial.routing()
    wanted, found = trial.expect(x, routing), trial.run(x, routing)
    if np.isfinite(wanted.allowed).all():
        assert_experts_right(case, found, wanted)
        return
    reference = rounded(wanted.y, case.dtype)
    other = rounded(trial.expect(x, routing, rounds_middle=True).y, case.dtype)
    both = np.stack([noise_ratios(found, item, wanted.unquantized) for item in (reference, other)])
    ratios = np.take_along_axis(both, np.abs(np.log(np.maximum(both, 1e-9))).argmin(0)[None], 0)[0]
    own = np.linalg.norm(reference - wanted.unquantized, axis=-1)
    judged = own > 4 * np.linalg.norm(rounding(wanted.y, case.dtype), axis=-1)
    if judged.any():
        record_property("range_experts", float(ratios[judged].max()))
        record_property("range_experts_min", float(ratios[judged].min()))
    wrong = [
        (int(i), float(ratios[i])) for i in np.nonzero(judged)[0] if not inside_window(float(ratios[i]), ROW_WINDOW)
    ]
    assert not wrong, f"{case.id}: rows (and their ratio of errors) out of the window: {wrong[:8]}"
