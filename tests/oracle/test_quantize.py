"""Quantizers: figures that are known for Gaussian values, and each rule against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omniplat.canonical import Array
from omniplat.errors import InvalidSchemeError, UsageError
from omniplat.oracle import dequantize, e8m0_exponent, linear, quantize_activation, quantize_weight
from omniplat.scheme import Scheme, TensorQuant, parse_activation_id, parse_weight_id

E4M3 = ml_dtypes.float8_e4m3fn


def activation(text: str, scale_rule: str = "", rounding: str = "") -> TensorQuant:
    quant = parse_activation_id(text)
    assert quant is not None
    return replace(quant, scale_rule=scale_rule, rounding=rounding)


def relative_l2(found: Array, wanted: Array) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.fixture(scope="module")
def gaussian() -> Array:
    return np.random.default_rng(7).standard_normal((128, 4096))


@pytest.mark.parametrize(
    ("scheme", "rule", "low", "high"),
    [
        # vendor measurements on N(0,1): floor .1149, even .1120, rceil .1154
        ("mxfp4", "floor", 0.1140, 0.1158),
        ("mxfp4", "even", 0.1112, 0.1128),
        ("mxfp4", "rceil", 0.1146, 0.1162),
        ("mxfp8", "rceil", 0.0260, 0.0270),
        ("mxfp8", "even-m1", 0.0260, 0.0270),
        # OCP's floor saturates what lies between 1.75 and 2
        ("mxfp8", "floor", 0.0285, 0.0300),
        ("nvfp4", "", 0.0940, 0.0985),
        ("mxfp4-dual", "floor", 0.1135, 0.1170),
        ("int8-channel", "", 0.0080, 0.0095),
        ("int4-g128", "half-range", 0.1090, 0.1125),
        ("int4-g128", "absmax", 0.1150, 0.1195),
        ("uint4-g128", "", 0.0985, 0.1025),
        ("int4-channel", "", 0.1500, 0.1650),
        ("fp8-channel", "", 0.0255, 0.0272),
        ("fp8-block128x128", "", 0.0255, 0.0272),
        ("fp8-tensor", "", 0.0255, 0.0272),
        ("fp8-g128", "", 0.0250, 0.0265),
        ("mxfp6e2m3", "", 0.0270, 0.0300),
        ("mxint8", "", 0.0075, 0.0090),
    ],
)
def test_known_errors_of_round_to_nearest(gaussian: Array, scheme: str, rule: str, low: float, high: float) -> None:
    weight = quantize_weight(gaussian, replace(parse_weight_id(scheme), scale_rule=rule))
    assert low < relative_l2(dequantize(weight), gaussian) < high
    assert weight.scheme.weight_id == scheme


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8", "nvfp4", "fp8-channel", "int8-channel", "mxfp4-dual", "mxint4"])
def test_weight_and_activation_paths_agree(gaussian: Array, scheme: str) -> None:
    quant = parse_weight_id(scheme)
    weight = dequantize(quantize_weight(gaussian, quant))
    per_row = replace(quant, dynamic=True, granularity="token" if quant.granularity == "channel" else quant.granularity)
    np.testing.assert_allclose(quantize_activation(gaussian, per_row), weight, rtol=1e-6)


@pytest.mark.parametrize(
    "scheme",
    ["mxfp4", "mxfp8", "mxfp6e3m2", "nvfp4", "int4-g32", "uint4-g32", "fp8-block3x5", "int8-tensor", "int3-g32"],
)
def test_stacked_experts_are_quantized_one_by_one(scheme: str) -> None:
    w = np.random.default_rng(1).standard_normal((2, 7, 64)) * np.array([1.0, 9.0])[:, None, None]
    quant = parse_weight_id(scheme)
    stacked = quantize_weight(w, quant)
    for e in range(2):
        single = quantize_weight(w[e], quant)
        for role, array in single.tensors.items():
            np.testing.assert_array_equal(stacked.tensors[role][e].view(np.uint8), array.view(np.uint8))
        np.testing.assert_array_equal(dequantize(stacked)[e], dequantize(single))


@given(w=hnp.arrays(np.float32, (2, 64), elements=st.floats(-(2.0**20), 2.0**20, width=32)))
def test_quantizing_again_changes_nothing(w: Array) -> None:
    for scheme in ("mxfp4", "mxfp8", "mxint4", "int8-channel"):
        # at most one power of two of slack is left where the largest value was rounded up or saturated
        quant = replace(parse_weight_id(scheme), scale_rule="rceil" if scheme.startswith("mx") else "")
        once = dequantize(quantize_weight(w, quant))
        np.testing.assert_allclose(dequantize(quantize_weight(once, quant)), once, rtol=1e-6, atol=1e-30)


# amax, exponent of the scale of fp4 (emax 2, max 6) and of fp8 (emax 8, max 448)
@pytest.mark.parametrize(
    ("rule", "amax", "fp4", "fp8"),
    [
        ("floor", 1.0, -2, -8),
        ("floor", 1.9999, -2, -8),
        ("", 448.0, 6, 0),
        ("even", 1.7499, -2, -8),
        ("even", 1.75, -1, -8),
        ("even", 1.9374, -1, -8),
        ("even", 1.9375, -1, -7),
        ("even-m1", 1.75, -1, -7),
        ("even-m1", 1.7499, -2, -8),
        ("rceil", 6.0, 0, -6),
        ("rceil", 448.0, 7, 0),
        ("ceil", 449.0, 7, 1),
        ("rceil", 3.0001, 0, -7),
    ],
)
def test_exponents_of_power_of_two_scales(rule: str, amax: float, fp4: int, fp8: int) -> None:
    for element, exponent in (("fp4_e2m1", fp4), ("fp8_e4m3", fp8)):
        found = e8m0_exponent(np.array([amax, amax * 2.0**-40, 0.0], np.float32), element, rule)
        assert found.tolist() == [exponent, exponent - 40, -127]


def test_exponents_are_clamped_to_the_byte() -> None:
    tiny_and_huge = np.array([2.0**-140, 3e38], np.float32)
    assert e8m0_exponent(tiny_and_huge, "fp4_e2m1", "floor").tolist() == [-127, 125]
    assert e8m0_exponent(tiny_and_huge, "int8", "ceil").tolist() == [-127, 127]


def test_unknown_rules_are_refused() -> None:
    x = np.ones((1, 32))
    for text in ("mxfp4", "fp8-token", "nvfp4"):
        with pytest.raises(InvalidSchemeError):
            quantize_activation(x, activation(text, scale_rule="magic"))
        with pytest.raises(InvalidSchemeError):
            quantize_activation(x, activation(text, rounding="magic"))


@pytest.mark.parametrize("text", ["int8-bnb"])
def test_schemes_without_a_definition_are_refused(text: str) -> None:
    with pytest.raises(InvalidSchemeError):
        quantize_activation(np.ones((1, 32)), activation(text))


def test_mxfp4_by_hand() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :4] = [7.0, 0.3, -2.6, 5.0]
    # floor: scale 1, 7 saturates; 0.3 -> 0.5, -2.6 -> -3, 5 is a tie between 4 and 6
    assert quantize_activation(x, activation("mxfp4"))[0, :4].tolist() == [6.0, 0.5, -3.0, 4.0]
    # even: 7 has the mantissa 1.75 and goes up, scale 2
    assert quantize_activation(x, activation("mxfp4", "even"))[0, :4].tolist() == [8.0, 0.0, -3.0, 4.0]
    assert quantize_activation(x, activation("mxfp4", "", "half-away"))[0, 3] == 6.0
    assert not quantize_activation(x, activation("mxfp4"))[0, 32:].any()


def test_mxint_counts_in_quarters_and_is_symmetric() -> None:
    w = np.zeros((1, 32))
    w[0, :4] = [1.9, -1.99, 0.3, -0.25]
    weight = quantize_weight(w, parse_weight_id("mxint4"))
    assert dequantize(weight)[0, :4].tolist() == [1.75, -1.75, 0.25, -0.25]
    assert weight.tensors["scale"].tolist() == [[127]]


def test_rules_of_float_scales() -> None:
    x = np.array([[1.0, -0.5, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0]])
    absmax = quantize_activation(x, activation("int8-token"))
    assert absmax[0, 0] == pytest.approx(1.0)
    assert absmax[0, 2] == pytest.approx(13 / 127)
    half = quantize_activation(x, activation("int8-token", "half-range"))
    assert half[0, 0] == pytest.approx(127 / 127.5)
    assert half[0, 1] == pytest.approx(-64 / 127.5)
    int4 = quantize_activation(x, activation("int4-token", "half-range"))
    assert int4[0, 0] == pytest.approx(7 / 7.5)
    assert not absmax[1].any()


def test_tensor_and_token_scales_differ() -> None:
    x = np.array([[448.0, 1.06], [1.06, 0.0]])
    tensor, token = (quantize_activation(x, activation(t)) for t in ("fp8-tensor", "fp8-token"))
    assert tensor[1, 0] == 1.0
    assert token[1, 0] == pytest.approx(1.06, rel=1e-6)


def test_the_smallest_fp8_scale_of_the_clamped_rule() -> None:
    x = np.full((1, 4), 2.0**-30)
    assert quantize_activation(x, activation("fp8-token"))[0, 0] == pytest.approx(2.0**-30, rel=1e-6)
    # with a scale of 1/(448*512), 2^-30 is 2.1e-4 codes: below half of e4m3's smallest, 2^-9
    assert quantize_activation(x, activation("fp8-token", "absmax-clamped"))[0, 0] == 0.0


def test_asymmetric_token_scales() -> None:
    quant = replace(activation("int8-token"), symmetric=False)
    x = np.array([[0.0, 1.0, 2.55, 0.5], [-1.0, 1.55, 0.0, 0.3]])
    found = quantize_activation(x, quant)
    np.testing.assert_allclose(found, [[0.0, 1.0, 2.55, 0.5], [-1.0, 1.55, 0.0, 0.3]], atol=1e-6)
    # all positive: the range still includes 0
    assert quantize_activation(np.array([[10.0, 10.1]]), quant)[0, 0] == pytest.approx(10.1 * 252 / 255, rel=1e-5)


def test_static_scales() -> None:
    x = np.array([[1.0, 0.26, 300.0, -300.0]])
    fp8 = quantize_activation(x, activation("fp8-tensor-static"), input_scale=np.array([0.5], np.float32))
    assert fp8.tolist() == [[1.0, 0.25, 224.0, -224.0]]
    int8 = quantize_activation(x, activation("int8-tensor-static"), input_scale=0.5)
    assert int8.tolist() == [[1.0, 0.5, 63.5, -64.0]]
    asym = quantize_activation(
        x, activation("int8-tensor-static-asym"), input_scale=0.5, input_zero_point=np.array([-28])
    )
    assert asym.tolist() == [[1.0, 0.5, 77.5, -50.0]]
    with pytest.raises(UsageError, match="fp8-tensor-static needs input_scale"):
        quantize_activation(x, activation("fp8-tensor-static"))
    with pytest.raises(UsageError, match="input_zero_point"):
        quantize_activation(x, activation("int8-tensor-static-asym"), input_scale=0.5)


def test_multiplying_by_the_reciprocal_changes_ties() -> None:
    # multiples of a scale whose float32 reciprocal is rounded: exact midpoints between codes
    scale = np.float32(0.0123)
    midpoints = (np.arange(17, 31, 2).astype(np.float32) * scale).reshape(1, -1)
    divided = quantize_activation(midpoints, activation("fp8-tensor-static"), input_scale=scale)
    by_reciprocal = quantize_activation(
        midpoints, activation("fp8-tensor-static", "absmax-reciprocal"), input_scale=scale
    )
    wanted = (midpoints * (np.float32(1) / scale)).astype(E4M3).astype(np.float64) * np.float64(scale)
    np.testing.assert_array_equal(by_reciprocal, wanted)
    np.testing.assert_array_equal(divided, (midpoints / scale).astype(E4M3).astype(np.float64) * np.float64(scale))
    assert (divided != by_reciprocal).any()


def test_nvfp4_by_hand() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = [12.0, -1.1, 6.0]
    x[0, 16] = 0.01
    # global 0.5: the first group's scale is 12 / 6 / 0.5 = 4, so codes count 2
    found = quantize_activation(x, activation("nvfp4"), input_global_scale=np.array([0.5], np.float32))
    assert found[0, :3].tolist() == [12.0, -1.0, 6.0]
    # the second's is 1.7 * 2^-9, a subnormal that rounds to 2^-8: codes count 2^-9, and 5.12 of them become 6
    assert found[0, 16] == 6 * 2.0**-9
    # the group scale saturates at 448
    big = quantize_activation(x * 1000, activation("nvfp4"), input_global_scale=0.5)
    assert big[0, 0] == 6 * 448 * 0.5


def test_underflowing_nvfp4_scales() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = 2688.0, 0.005
    # the second group needs a scale of 0.005 / 6 = 0.43 * 2^-9: zero for absmax, 2^-9 for the clamped rule
    assert quantize_activation(x, activation("nvfp4"))[0, 16] == 0.0
    assert quantize_activation(x, activation("nvfp4", "absmax-clamped"))[0, 16] == 3 * 2.0**-9

    # and where the scale is 0, so are the codes
    x[0, 0], x[0, 16] = 2688000.0, 5.0
    weight = quantize_weight(x, parse_weight_id("nvfp4"))
    assert weight.tensors["scale"].astype(np.float32).tolist() == [[448.0, 0.0]]
    assert not weight.tensors["codes"][0, 8:].any()


def test_dual_level() -> None:
    x = np.zeros((1, 1024), np.float32)
    x[0, 0], x[0, 40], x[0, 600] = 60.0, 5.0, 2.0**-130
    found = quantize_activation(x, activation("mxfp4-dual"))
    # level 0 is 10: 60 becomes the code 6 of a scale 1, and 5 becomes 0.5, which a scale of 2^-3 holds as 4
    assert found[0, 0] == pytest.approx(60.0, rel=1e-6)
    assert found[0, 40] == pytest.approx(5.0, rel=1e-6)
    # a level 0 that would be subnormal is 0
    assert found[0, 600] == 0.0
    weight = quantize_weight(x, parse_weight_id("mxfp4-dual"))
    assert weight.tensors["scale2"].shape == (1, 2)
    assert weight.tensors["scale2"][0, 0] == pytest.approx(10.0)
    np.testing.assert_allclose(dequantize(weight), found)


def test_a_partial_last_group_of_an_activation() -> None:
    x = np.arange(1, 41, dtype=np.float32).reshape(1, 40)
    found = quantize_activation(x, activation("mxfp8"))
    assert found.shape == (1, 40)
    np.testing.assert_allclose(found, x, rtol=2.0**-4)
    with pytest.raises(UsageError, match="40 columns are not a multiple of the group size 32"):
        quantize_weight(x, parse_weight_id("mxfp8"))


def test_any_leading_shape() -> None:
    x = np.random.default_rng(3).standard_normal((2, 3, 64))
    for text in ("mxfp4", "nvfp4", "fp8-token", "fp8-g128", "fp8-tensor"):
        whole = quantize_activation(x, activation(text))
        assert whole.shape == x.shape
        np.testing.assert_array_equal(whole.reshape(6, 64), quantize_activation(x.reshape(6, 64), activation(text)))
    np.testing.assert_array_equal(
        quantize_activation(x[0, 0], activation("mxfp4")), quantize_activation(x[:1, 0], activation("mxfp4"))[0]
    )


def test_nan_spoils_its_own_group_only() -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 3] = np.nan
    found = quantize_activation(x, activation("mxfp8"))
    assert np.isnan(found[0, :32]).all()
    assert (found[0, 32:] == 1).all()


def test_values_of_an_all_zero_weight() -> None:
    for scheme in ("mxfp4", "nvfp4", "int4-g32", "uint4-g32", "fp8-tensor", "fp8-block128x128", "mxfp4-dual"):
        assert not dequantize(quantize_weight(np.zeros((3, 64)), parse_weight_id(scheme))).any()


def test_linear_applies_pre_scale_quantization_and_bias_in_this_order() -> None:
    rng = np.random.default_rng(5)
    w, x, pre = rng.standard_normal((6, 64)), rng.standard_normal((4, 64)), rng.uniform(0.5, 2, 64).astype(np.float32)
    weight = quantize_weight(w, parse_weight_id("mxfp8"))
    weight = replace(
        weight,
        scheme=Scheme(weight.scheme.weight, activation("mxfp4"), pre_scale=True),
        tensors={**weight.tensors, "pre_scale": pre, "bias": np.arange(6, dtype=ml_dtypes.bfloat16)},
    )
    values = dequantize(weight)
    quantized = quantize_activation(x * pre, activation("mxfp4"))
    np.testing.assert_allclose(linear(x, weight), quantized @ values.T + np.arange(6))
    np.testing.assert_allclose(linear(x, weight, activation=False), (x * pre) @ values.T + np.arange(6))
    np.testing.assert_allclose(linear(x, weight, bias=np.zeros(6)), quantized @ values.T)
    np.testing.assert_allclose(linear(x[0], weight), linear(x, weight)[0])


def test_linear_of_stacked_experts_with_static_scales() -> None:
    rng = np.random.default_rng(6)
    w, x = rng.standard_normal((2, 6, 64)), rng.standard_normal((2, 4, 64))
    weight = quantize_weight(w, parse_weight_id("fp8-channel"))
    scales = np.array([[0.01], [0.03]], np.float32)
    bias = rng.standard_normal((2, 6))
    scheme = Scheme(weight.scheme.weight, activation("fp8-tensor-static"))
    weight = replace(weight, scheme=scheme, tensors={**weight.tensors, "input_scale": scales, "bias": bias})
    found = linear(x, weight)
    for e in range(2):
        quantized = quantize_activation(x[e], activation("fp8-tensor-static"), input_scale=float(scales[e, 0]))
        np.testing.assert_allclose(found[e], quantized @ dequantize(weight)[e].T + bias[e])


def test_group_index_and_zero_points_in_dequantize() -> None:
    weight = quantize_weight(np.random.default_rng(2).standard_normal((3, 8)), parse_weight_id("uint4-g4"))
    order = np.array([1, 0, 1, 0, 0, 0, 1, 1], np.int32)
    shuffled = replace(weight, tensors={**weight.tensors, "group_index": order})
    codes = np.stack([weight.tensors["codes"] & 15, weight.tensors["codes"] >> 4], axis=-1).reshape(3, 8)
    scale, zero = weight.tensors["scale"], weight.tensors["zero_point"]
    for n in range(3):
        for k in range(8):
            wanted = (float(codes[n, k]) - float(zero[n, order[k]])) * float(scale[n, order[k]])
            assert dequantize(shuffled)[n, k] == pytest.approx(wanted)
    stacked = replace(
        shuffled, tensors={r: np.stack([a, a]) for r, a in shuffled.tensors.items() if r != "group_index"}
    )
    stacked = replace(stacked, tensors={**stacked.tensors, "group_index": np.stack([order, order[::-1]])})
    np.testing.assert_array_equal(dequantize(stacked)[0], dequantize(shuffled))
    assert not np.array_equal(dequantize(stacked)[1], dequantize(shuffled))


def test_opaque_weights_are_refused() -> None:
    weight = quantize_weight(np.ones((2, 32)), parse_weight_id("mxfp4"))
    with pytest.raises(InvalidSchemeError, match="gguf-q4_k"):
        dequantize(replace(weight, scheme=Scheme(parse_weight_id("gguf-q4_k"))))
    assert math.isfinite(dequantize(weight).sum())


def test_svdquant_quantizes_its_input_without_a_second_level() -> None:
    """NVFP4 groups of 16 under e4m3 scales alone, int4 groups of 64; by hand."""
    x = np.zeros((1, 64), np.float32)
    x[0, 0], x[0, 1] = 6.0, 2.4
    assert quantize_activation(x, activation("svdq-nvfp4"))[0, :2].tolist() == [6.0, 2.0]
    x[0, 0], x[0, 1] = 7.0, 2.6
    assert quantize_activation(x, activation("svdq-int4"))[0, :2].tolist() == [7.0, 3.0]


@pytest.mark.parametrize("divisor", [384.0, 4016.0, 1000.0])
def test_a_global_scale_in_f64_is_the_divisor_that_it_came_from(divisor: float) -> None:
    quant = parse_activation_id("nvfp4")
    assert quant is not None
    random = np.random.default_rng(int(divisor))
    x = random.standard_normal((256, 64)).astype(np.float32)
    found = quantize_activation(x, quant, input_global_scale=np.array([1 / divisor]))
    groups = x.reshape(256, 4, 16)
    local = (np.abs(groups).max(2) / np.float32(6)) * np.float32(divisor)
    stored = np.minimum(local, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = (stored / np.float32(divisor))[..., None]
    expected = (groups / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    np.testing.assert_allclose(found.reshape(groups.shape), expected, rtol=2e-7)
