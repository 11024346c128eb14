"""Element formats against other people's definitions of them (ml_dtypes) and against values worked out by hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omniplat.errors import InvalidSchemeError
from omniplat.oracle import (
    decode_codes,
    e8m0_from_exponent,
    e8m0_to_float64,
    element_max,
    element_values,
    encode,
    pack_nibbles,
    round_to_element,
    unpack_nibbles,
)

ML_DTYPES = {
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
BITS = {"fp4_e2m1": 4, "fp6_e2m3": 6, "fp6_e3m2": 6, "fp8_e4m3": 8, "fp8_e5m2": 8}


def test_fp4_is_e2m1() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert element_values("fp4_e2m1").tolist() == positive + [-v for v in positive]


@pytest.mark.parametrize("element", ML_DTYPES)
def test_tables_equal_ml_dtypes(element: str) -> None:
    codes = np.arange(2 ** BITS[element], dtype=np.uint8)
    theirs = codes.view(ML_DTYPES[element]).astype(np.float64)
    finite = np.isfinite(theirs)
    np.testing.assert_array_equal(element_values(element)[finite], theirs[finite])
    assert element_max(element) == np.abs(theirs[finite]).max()


@pytest.mark.parametrize("element", ML_DTYPES)
@given(values=hnp.arrays(np.float32, 16, elements=st.floats(-500, 500, width=32)))
def test_rounding_equals_ml_dtypes_in_range(element: str, values: np.ndarray) -> None:
    limit = np.float32(element_max(element))
    values = np.clip(values, -limit, limit)
    theirs = values.astype(ML_DTYPES[element])
    np.testing.assert_array_equal(round_to_element(values, element), theirs.astype(np.float64))
    codes = encode(values, element)
    if element == "fp4_e2m1":
        codes = unpack_nibbles(codes)
    np.testing.assert_array_equal(codes.view(np.uint8), theirs.view(np.uint8))


@pytest.mark.parametrize(
    ("rounding", "values", "expected"),
    [
        # between 0.5 and 1, 1 and 1.5, 2 and 3, 4 and 6: the even code is 0, 1, 2, 4
        ("", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]),
        ("nearest-even", [-0.75, -2.5], [-1.0, -2.0]),
        ("half-away", [0.25, 1.25, 2.5, -2.5, 5.0], [0.5, 1.5, 3.0, -3.0, 6.0]),
        ("half-to-zero", [0.75, 1.75, 3.5, -3.5, 5.1], [0.5, 1.5, 3.0, -3.0, 6.0]),
        ("floor", [0.9, 5.9, -0.1, -4.1], [0.5, 4.0, -0.5, -6.0]),
    ],
)
def test_rounding_of_ties(rounding: str, values: list[float], expected: list[float]) -> None:
    assert round_to_element(np.array(values), "fp4_e2m1", rounding).tolist() == expected


def test_conversions_saturate_and_keep_nan() -> None:
    assert round_to_element(np.array([1e9, -np.inf, 464.0]), "fp8_e4m3").tolist() == [448.0, -448.0, 448.0]
    assert round_to_element(np.array([1e9, -1e9]), "int4").tolist() == [7.0, -8.0]
    assert math.isnan(round_to_element(np.array([np.nan]), "fp8_e4m3")[0])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidSchemeError):
        round_to_element(np.ones(2), "fp4_e2m1", "stochastic")
    with pytest.raises(InvalidSchemeError):
        element_values("bf16")
    with pytest.raises(InvalidSchemeError):
        encode(np.ones(2), "gguf_q4_k")


@given(codes=hnp.arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 9).map(lambda n: 2 * n))))
def test_nibbles_round_trip(codes: np.ndarray) -> None:
    codes = codes & 15
    packed = pack_nibbles(codes)
    assert packed.shape == (codes.shape[0], codes.shape[1] // 2)
    np.testing.assert_array_equal(unpack_nibbles(packed), codes)


def test_the_even_index_is_in_the_low_nibble() -> None:
    assert pack_nibbles(np.array([[1, 2, 15, 0]], dtype=np.uint8)).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("element", ["int2", "int3", "int4", "int5", "int7", "int8", "uint3", "uint4", "uint8"])
def test_integers_round_trip_through_canonical_codes(element: str) -> None:
    low, high = (0, 2 ** int(element[4:]) - 1) if element[0] == "u" else (-(2 ** (int(element[3:]) - 1)),) * 2
    high = high if element[0] == "u" else -low - 1
    values = np.array([[low, high, 0, 1, low, high]], dtype=np.float64)
    np.testing.assert_array_equal(decode_codes(encode(values, element), element, 6), values)


def test_nf4_and_bitsandbytes_fp4() -> None:
    nf4 = element_values("nf4")
    assert (nf4[0], nf4[7], nf4[15]) == (-1.0, 0.0, 1.0)
    assert np.all(np.diff(nf4) > 0)
    assert encode(np.array([[-1.0, 1.0, 0.01, 0.43]]), "nf4").tolist() == [[0xF0, 0xC7]]
    half_way = (nf4[7] + nf4[8]) / 2
    assert encode(np.array([[half_way, np.nextafter(half_way, 1)]]), "nf4").tolist() == [[0x87]]
    fp4 = element_values("fp4_bnb")
    assert fp4[3] == 1.0
    assert fp4[11] == -1.0
    assert fp4[1] == pytest.approx(1 / 192)


def test_a_codebook_replaces_the_table() -> None:
    codebook = np.arange(16) * 10.0
    assert decode_codes(np.array([[0x21]], dtype=np.uint8), "nf4", 2, codebook).tolist() == [[10.0, 20.0]]


def test_e8m0() -> None:
    scale = np.array([120, 127, 130, 0, 254, 255], dtype=np.uint8)
    values = e8m0_to_float64(scale)
    assert values[:5].tolist() == [2.0**-7, 1.0, 8.0, 2.0**-127, 2.0**127]
    assert math.isnan(values[5])
    np.testing.assert_array_equal(e8m0_to_float64(scale.view(ml_dtypes.float8_e8m0fnu)), values)
    assert e8m0_from_exponent(np.array([-200, -127, 0, 127, 200])).tolist() == [0, 0, 127, 254, 254]


def test_codes_of_the_wrong_width_are_refused() -> None:
    with pytest.raises(ValueError, match="8 columns, expected 6"):
        decode_codes(np.zeros((2, 4), np.uint8), "fp4_e2m1", 6)


def test_the_fp8_without_negative_zero_is_its_librarys() -> None:
    """float8_e4m3fnuz: 240 is its largest number, and 2^-10 its smallest."""
    values = np.concatenate([np.arange(-250, 250, 0.375), np.arange(1, 64) * 2.0**-12])
    own = round_to_element(values, "fp8_e4m3fnuz")
    assert np.array_equal(own, np.clip(values, -240, 240).astype(ml_dtypes.float8_e4m3fnuz).astype(np.float64))
