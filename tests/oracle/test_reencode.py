"""Re-encoding MX weights: exact within the stated span, refused beyond it, and the stated loss for mxfp8."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat.canonical import CanonicalWeight
from omniplat.errors import InvalidSchemeError
from omniplat.oracle import dequantize, pack_nibbles, quantize_weight
from omniplat.oracle.reencode import reencode, refused_rows, row_spans
from omniplat.reencoding import REENCODINGS
from omniplat.scheme import Scheme, parse_weight_id

GROUPS = 4


def mxfp4(codes: np.ndarray, scale: np.ndarray) -> CanonicalWeight:
    packed = pack_nibbles(codes.astype(np.uint8))
    scheme = Scheme.parse("mxfp4/mxfp4")
    return CanonicalWeight(scheme, codes.shape[0], codes.shape[1], {"codes": packed, "scale": scale.astype(np.uint8)})


def with_span(span: int, seed: int) -> CanonicalWeight:
    """Rows whose groups lie up to `span` binades below the largest, every code possible."""
    random = np.random.default_rng(seed)
    scale = 120 - random.integers(0, span + 1, (8, GROUPS))
    scale[:, 0], scale[:, -1] = 120, 120 - span
    codes = random.integers(0, 16, (8, 32 * GROUPS))
    codes[:, ::32] = 1
    return mxfp4(codes, scale)


@settings(max_examples=40, deadline=None)
@given(span=st.integers(0, 14), seed=st.integers(0, 2**32))
def test_mxfp4_in_e4m3_is_exact_up_to_14_binades(span: int, seed: int) -> None:
    weight = with_span(span, seed)
    assert refused_rows(weight, "fp8-channel").size == 0
    np.testing.assert_array_equal(dequantize(reencode(weight, "fp8-channel")), dequantize(weight))


@settings(max_examples=40, deadline=None)
@given(span=st.integers(0, 3), seed=st.integers(0, 2**32))
def test_mxfp4_in_int8_is_exact_up_to_3_binades(span: int, seed: int) -> None:
    weight = with_span(span, seed)
    np.testing.assert_array_equal(dequantize(reencode(weight, "int8-channel")), dequantize(weight))


@pytest.mark.parametrize(("target", "span"), [("fp8-channel", 15), ("int8-channel", 4)])
def test_one_binade_more_is_refused_and_would_lose(target: str, span: int) -> None:
    weight = with_span(span, 1)
    assert refused_rows(weight, target).tolist() == list(range(8))
    assert np.any(dequantize(reencode(weight, target)) != dequantize(weight))


def test_groups_of_zeros_are_never_counted() -> None:
    codes = np.zeros((2, 64))
    codes[0, :32] = 7
    codes[1, 40] = 8  # minus zero is a zero too
    weight = mxfp4(codes, np.array([[130, 0], [0, 0]]))
    assert row_spans(weight.tensors["codes"], weight.tensors["scale"], weight.scheme.weight, 64).tolist() == [0, 0]
    np.testing.assert_array_equal(dequantize(reencode(weight, "fp8-channel")), dequantize(weight))


@pytest.mark.parametrize(("distance", "bound"), [(0, 0.0), (8, 2.5e-4), (9, 6.5e-4)])
def test_mxfp8_loses_only_below_the_subnormals(distance: int, bound: float) -> None:
    random = np.random.default_rng(distance)
    quant = parse_weight_id("mxfp8")
    values = random.standard_normal((256, 256))
    values[:, 128:] *= 2.0**-distance
    weight = CanonicalWeight(Scheme(quant), 256, 256, quantize_weight(values, quant).tensors)
    moved, truth = dequantize(reencode(weight, "fp8-channel")), dequantize(weight)
    scale = weight.tensors["scale"].astype(int)
    chosen = (scale.max(axis=1, keepdims=True) - scale == distance).repeat(32, axis=1)
    assert chosen.any()
    assert np.linalg.norm((moved - truth)[chosen]) <= bound * np.linalg.norm(truth[chosen])
    assert np.linalg.norm(moved - truth) <= 3e-6 * np.linalg.norm(truth)


def test_there_is_no_rule_but_the_listed_ones() -> None:
    weight = with_span(0, 0)
    with pytest.raises(InvalidSchemeError, match="cannot be re-encoded"):
        reencode(weight, "fp8-tensor")
    assert {rule.exact for rule in REENCODINGS.values()} == {True, False}
