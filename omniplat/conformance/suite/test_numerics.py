"""Group numerics: four tiers. Tolerances are derived (`omniplat.conformance.tolerances`), never chosen by backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from omniplat.canonical import Array
from omniplat.conformance.cases import Case, case_of, numeric_cases, schemes_of
from omniplat.conformance.checks import check
from omniplat.conformance.expected import executed_activation, rounded
from omniplat.conformance.inputs import random_input, representable_input, spread_groups, spread_rows
from omniplat.conformance.judge import LinearTrial, expert_trial, linear_trial, make_weight
from omniplat.conformance.subject import Subject
from omniplat.conformance.tolerances import UNITS, Float64, inside_window, noise_ratio, noise_ratios
from omniplat.conformance.weights import exact_weight, has_exact, zeroed_columns

Record = Callable[[str, object], None]


def _exact(subject: Subject, profile: str) -> Iterable[Case]:
    for case in numeric_cases(subject, profile, "linear"):
        if has_exact(case.scheme) and not case.capability.via:
            yield replace(case, k=case_of(case.capability, case.scheme, k=160).k, variant="exact")


def _bound(subject: Subject, profile: str) -> Iterable[Case]:
    return numeric_cases(subject, profile, "linear")


def _experts(subject: Subject, profile: str) -> Iterable[Case]:
    return numeric_cases(subject, profile, "moe")


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
    """Groups of sizes 2^-8 and 2^8 under a weight that reads only the small ones: a scale that groups share shows."""
    executed = executed_activation(case.capability, case.scheme)
    assert executed is not None
    size = executed.group_size if executed.granularity == "group" else 32
    x, small = spread_groups(case.rows, case.k, size, case.rng(), case.dtype)
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


@check("numerics", _experts)
def test_experts(subject: Subject, case: Case, record_property: Record) -> None:
    """Routing and both linears: within the bound for plain activations, else with the declared quantization's error."""
    trial = expert_trial(subject, case)
    measured = trial.assert_right(trial.input(), trial.routing())
    record_property("experts", measured)
