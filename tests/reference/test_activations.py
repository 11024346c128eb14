"""Activation quantization in torch against the oracle: the same codes, for every rule and rounding."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat import oracle
from omniplat.errors import InvalidCheckpointError, InvalidSchemeError
from omniplat.reference.activations import quantize_activation
from omniplat.reference.rounding import round_to_element
from omniplat.scheme import TensorQuant, parse_activation_id

FLOAT_RULES = ("", "absmax", "half-range", "absmax-clamped", "absmax-reciprocal")
E8M0_RULES = ("", "floor", "even", "even-m1", "ceil", "rceil")
ROUNDINGS = ("", "nearest-even", "half-away", "half-to-zero", "floor")
IDS = (
    *("fp8-token", "fp8-tensor", "fp8-tensor-static", "fp8-g128", "fp8e5m2-token"),
    *("int8-token", "int8-token-asym", "int8-tensor", "int8-tensor-static", "int8-tensor-static-asym", "int8-g64"),
    *("int4-token", "mxfp8", "mxfp8e5m2", "mxfp6e2m3", "mxfp6e3m2", "mxfp4", "mxint8", "mxint4", "mxfp4-dual", "nvfp4"),
)
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
ELEMENTS = ("fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "uint8")


def inputs() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    spread = random.standard_normal((9, 512)).astype(np.float32)
    spread[2] *= 1e4
    spread[3] *= 1e-5
    spread[4] = 0
    spread[5, ::7] = 0
    spread[6] = np.round(spread[6] * 4) / 4  # ties
    spread[7, :32] *= 1000
    partial = random.standard_normal((3, 100)).astype(np.float32)
    return [spread, partial, random.standard_normal((2, 512)).astype(np.float32) * np.float32(1e30)]


def compare(x: np.ndarray, quant: TensorQuant) -> None:
    given = {}
    if not quant.dynamic:
        given["input_scale"] = np.array([0.031], np.float32)
        if not quant.symmetric:
            given["input_zero_point"] = np.array([-5], np.int32)
    expected = oracle.quantize_activation(x, quant, **given)
    found = quantize_activation(torch.from_numpy(x), quant, {k: torch.from_numpy(v) for k, v in given.items()})
    value = found.values.double().numpy()
    if found.scale is not None:
        value = value * found.scale.double().numpy()
    # The one difference allowed is the rounding of code * scale to float32: a wrong code is off by 2^-5 or more.
    np.testing.assert_allclose(value, expected, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("name", IDS)
def test_codes_agree_with_the_oracle_for_every_rule_and_rounding(name: str) -> None:
    quant = parse_activation_id(name)
    assert quant is not None
    rules = E8M0_RULES if quant.scale_format == "e8m0" else FLOAT_RULES
    for x in inputs():
        for rule in rules:
            for rounding in ROUNDINGS:
                compare(x, replace(quant, scale_rule=rule, rounding=rounding))


def as_auto_round(x: np.ndarray, divisor: np.float32) -> np.ndarray:
    """What auto-round's `ref_nvfp4_quant` leaves of groups of 16: float32 products with reciprocals, step by step."""
    one, groups = np.float32(1), x.reshape(len(x), -1, 16)
    amax = np.abs(groups).max(axis=-1, keepdims=True)
    local = np.clip(divisor * (amax * (one / np.float32(6))), -448, 448).astype(E4M3).astype(np.float32)
    product = local * (one / divisor)
    inverse = np.where(product == 0, np.float32(0), one / np.where(product == 0, one, product))
    scaled = np.clip(groups * inverse, -6, 6)
    codes = np.where(np.abs(scaled) < 2, np.rint(2 * scaled) / 2, np.rint(scaled))
    codes = np.where(np.abs(scaled) < 4, codes, 2 * np.rint(scaled / 2)).astype(np.float64)
    return (codes * product.astype(np.float64)).reshape(x.shape)


def test_nvfp4_by_reciprocals_is_auto_rounds_arithmetic() -> None:
    """Inputs in bf16 and a divisor of 448 * 6 / amax put many quotients on ties: every rounding on the way counts."""
    random = np.random.default_rng(11)
    quant = replace(parse_activation_id("nvfp4"), scale_rule="absmax-reciprocal", rounding="nearest-even")
    for _ in range(60):
        x = random.standard_normal((16, 128)).astype(BF16).astype(np.float32)
        divisor = np.float32(448 * 6) * (np.float32(1) / np.abs(x).max())
        scale = np.reciprocal(np.array([divisor]).astype(np.float64))
        expected = as_auto_round(x, divisor)
        found = oracle.quantize_activation(x, quant, input_global_scale=scale)
        np.testing.assert_allclose(found, expected, rtol=2.0**-22, atol=0)
        torch_found = quantize_activation(torch.from_numpy(x), quant, {"input_global_scale": torch.from_numpy(scale)})
        np.testing.assert_allclose(torch_found.values.double().numpy(), expected, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("name", ["fp8-token", "int8-token"])
@pytest.mark.parametrize("scale_format", ["bf16", "f16"])
def test_scales_are_rounded_to_their_declared_format(name: str, scale_format: str) -> None:
    quant = parse_activation_id(name)
    assert quant is not None
    compare(inputs()[1], replace(quant, scale_format=scale_format))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_rounding_is_the_oracles_on_ties_neighbours_and_extremes(element: str, rounding: str) -> None:
    table = oracle.element_values(element)
    codes = np.unique(table[np.isfinite(table)]).astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    centres = np.concatenate([codes, middles, np.float32([1e-40, -1e-30, 1e9, -1e9, np.inf, -np.inf])])
    values = np.concatenate(
        [centres, np.nextafter(centres, np.float32(np.inf)), np.nextafter(centres, -np.float32(np.inf))]
    )
    values = np.concatenate([values, np.random.default_rng(0).standard_normal(4000).astype(np.float32) * 3])
    found = round_to_element(torch.from_numpy(values), element, rounding).double().numpy()
    np.testing.assert_array_equal(found, oracle.round_to_element(values, element, rounding))


def test_nan_and_infinity_survive() -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1, 40] = np.nan, np.inf
    quant = parse_activation_id("mxfp8")
    found = quantize_activation(torch.from_numpy(x), quant, {}).dequantized().numpy()
    np.testing.assert_array_equal(np.isnan(found[0]), np.arange(64) < 32)
    np.testing.assert_array_equal(np.isnan(found[1]), np.arange(64) >= 32)


def test_a_static_scheme_without_its_scale_is_refused() -> None:
    with pytest.raises(InvalidCheckpointError, match="input_scale"):
        quantize_activation(torch.ones(1, 8), parse_activation_id("fp8-tensor-static"), {})


def test_unknown_rules_are_refused() -> None:
    quant = parse_activation_id("mxfp8")
    assert quant is not None
    with pytest.raises(InvalidSchemeError, match="nearest-odd"):
        quantize_activation(torch.ones(1, 32), replace(quant, rounding="nearest-odd"), {})
    with pytest.raises(InvalidSchemeError, match="absmax"):
        quantize_activation(torch.ones(1, 32), replace(quant, scale_rule="absmax"), {})
