"""Representable inputs are represented, weights have their forms, tolerances are tight and right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from omniplat import oracle
from omniplat.capability import Capability
from omniplat.conformance import catalog, expected, inputs, weights
from omniplat.conformance.tolerances import (
    UNITS,
    accumulation,
    excess,
    finite,
    gamma,
    inside_window,
    noise_ratio,
    usage,
)
from omniplat.scheme import Scheme, parse_activation_id

OWN = [text for text in catalog.ACTIVATIONS if text not in ("a16", "int8-bnb")]
RULES = ("", "floor", "even", "even-m1", "ceil", "rceil")
INT8 = Capability("i", "linear", ("int8-channel",), ("int8-token",), accumulator="int32")


@pytest.mark.parametrize("text", OWN)
def test_a_representable_input_is_its_own_quantization(text: str) -> None:
    quant = parse_activation_id(text)
    assert quant is not None
    for rule in RULES if quant.scale_format == "e8m0" else ("",):
        used = replace(quant, scale_rule=rule)
        x = inputs.representable_input(used, 5, 1024, np.random.default_rng(1))
        np.testing.assert_array_equal(oracle.quantize_activation(x, used, **weights.static_input(used)), x)
        for dtype in ("bf16", "f16"):
            np.testing.assert_array_equal(inputs.as_dtype(x, dtype), x)


@pytest.mark.parametrize("text", OWN)
def test_ties_are_decided_by_the_rounding_alone(text: str) -> None:
    """Every value lies half way between the codes that rounding down and rounding to nearest even choose, or on one."""
    quant = parse_activation_id(text)
    assert quant is not None
    x = inputs.tied_input(quant, 5, 1024, np.random.default_rng(1))
    np.testing.assert_array_equal(inputs.as_dtype(x, "f16"), x)
    static = weights.static_input(quant)
    even, away, zero = (
        oracle.quantize_activation(x, replace(quant, rounding=rounding), **static)
        for rounding in ("nearest-even", "half-away", "half-to-zero")
    )
    assert ((even == away) | (even == zero)).all()
    assert (away != zero).mean() > 0.5
    np.testing.assert_array_equal(x, (away + zero) / 2)


@pytest.mark.parametrize("text", [text for text in catalog.WEIGHTS if text not in ("svdq-int4", "gguf-q8_k")])
def test_random_weights_use_their_range(text: str) -> None:
    pytest.importorskip("gguf")
    scheme = catalog.scheme_of(text, "a16")
    columns = 2 * weights.columns_unit(scheme)
    weight = weights.random_weight(scheme, 40, columns, np.random.default_rng(2), bias=True)
    values = oracle.dequantize(weight)
    assert values.shape == (40, columns)
    assert np.isfinite(values).all()
    assert 2.0**-8 < np.abs(values).max() < 2.0**7


@pytest.mark.parametrize("text", [t for t in catalog.WEIGHTS if weights.has_exact(catalog.scheme_of(t, "a16"))])
def test_exact_weights_are_small_integers(text: str) -> None:
    scheme = catalog.scheme_of(text, "a16")
    weight = weights.exact_weight(scheme, 24, 2 * weights.columns_unit(scheme), np.random.default_rng(3))
    values = oracle.dequantize(weight)
    np.testing.assert_array_equal(values, np.rint(values))
    assert np.abs(values).max() <= 4
    assert (values[:, -4:] != 0).any(axis=1).all(), "the last columns of every row count"


@pytest.mark.parametrize("columns", [256, 7168])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_the_bound_is_tight_and_kept(columns: int, dtype: str) -> None:
    """Integer sums leave the output's own rounding: a correct kernel uses nearly all of its bound, and a row's scale
    that is off by one row exceeds it many times."""
    scheme = Scheme.parse("int8-channel/int8-token")
    rng = np.random.default_rng(4)
    weight = weights.random_weight(scheme, 64, columns, rng)
    x = inputs.representable_input(scheme.activation, 16, columns, rng)
    wanted = expected.linear(x, weight, INT8, dtype)
    found = expected.rounded(wanted.y.astype(np.float32), dtype)
    assert excess(found, wanted.y, wanted.allowed) is None
    if dtype != "f32":
        assert 0.9 < usage(found, wanted.y, wanted.allowed) <= 1
    rolled = replace(weight, tensors={**weight.tensors, "scale": np.roll(weight.tensors["scale"], 1, 0)})
    wrong = expected.rounded(oracle.linear(x, rolled), dtype)
    assert usage(wrong, wanted.y, wanted.allowed) > 50


def test_accumulators() -> None:
    scheme = Scheme.parse("int8-channel/int8-token")
    exact = accumulation("int32", 4096, scheme.weight, scheme.activation)
    assert exact == gamma(7, UNITS["f32"])
    assert accumulation("f32", 4096, scheme.weight, scheme.activation) > 100 * exact
    assert accumulation("fp22", 4096, scheme.weight, scheme.activation) > 0.1
    promoted = [accumulation("fp22-by-128", k, scheme.weight, scheme.activation) for k in (96, 128, 256, 16384)]
    assert promoted[0] == pytest.approx(accumulation("fp22", 96, scheme.weight, scheme.activation), rel=1e-4)
    assert promoted[1] < promoted[2] < promoted[3] < 1.01 * promoted[1]
    assert gamma(10, 0.1) == float("inf")


def test_windows() -> None:
    rng = np.random.default_rng(5)
    exact, noise = rng.standard_normal((8, 64)), rng.standard_normal((8, 64)) * 0.01
    assert inside_window(noise_ratio(exact + noise, exact - noise, exact))
    assert not inside_window(noise_ratio(exact, exact + noise, exact)), "no noise at all is a hidden fallback"
    assert not inside_window(noise_ratio(exact + 2 * noise, exact + noise, exact))


def test_nan_leaves_every_bound() -> None:
    found = excess(np.array([1.0, np.nan]), np.array([1.0, 1.0]), np.array([np.inf, np.inf]))
    assert found is not None
    assert found.index == (1,)


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_a_kernel_is_held_against_its_own_rule_for_scales(rule: str) -> None:
    """MXFP8 by the other rules saturates more or less often: their errors differ by more than the window allows."""
    scheme = Scheme.parse("mxfp8/mxfp8")
    rng = np.random.default_rng(8)
    weight = weights.random_weight(scheme, 32, 256, rng)
    x = inputs.random_input(64, 256, rng, "bf16")
    made = {
        name: expected.linear(x, weight, Capability("k", "linear", ("mxfp8",), ("mxfp8",), scale_rules=(name,)), "bf16")
        for name in ("floor", "even", "ceil")
    }
    found = made[rule]
    assert np.array_equal(found.y, oracle.linear(x, replace(weight, scheme=_by(scheme, rule))))
    for other in made.keys() - {rule}:
        assert not np.array_equal(found.y, made[other].y)


def _by(scheme: Scheme, rule: str) -> Scheme:
    assert scheme.activation is not None
    return scheme.with_activation(replace(scheme.activation, scale_rule=rule))


def test_an_output_beyond_its_dtype_may_be_infinite() -> None:
    """f16 ends at 65504: what the exact value rounds to is right, another sign or a value within range is not."""
    expected, allowed = np.array([68000.0, 65000.0, -68000.0, 100.0]), np.array([10.0, 600.0, 10.0, 1.0])
    right = np.array([np.inf, np.inf, -np.inf, 100.0])
    assert excess(finite(right, expected, allowed, "f16"), expected, allowed) is None
    for index, value in ((0, -np.inf), (3, np.inf), (2, np.nan)):
        wrong = right.copy()
        wrong[index] = value
        assert excess(finite(wrong, expected, allowed, "f16"), expected, allowed) is not None
    assert excess(finite(right, expected, allowed, "f32"), expected, allowed) is not None
