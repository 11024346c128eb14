"""Every packing undone, against packers that are written here, value by value, from the formats' descriptions."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat.canonical import Array
from omniplat.errors import InvalidCheckpointError
from omniplat.formats.storage import Storage
from omniplat.formats.unpack import canonicalise
from omniplat.oracle import dequantize, unpack_nibbles
from omniplat.scheme import Scheme, TensorQuant, parse_activation_id, parse_weight_id

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(20240917)


def words_of(values: list[int], bits: int) -> list[int]:
    """Python integers, first value in the lowest bits of a long bit string, cut into signed 32-bit words."""
    long = sum(value << (i * bits) for i, value in enumerate(values))
    words = [(long >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(values) * bits // 32))]
    return [w - 2**32 if w >= 2**31 else w for w in words]


def pack_rows(unsigned: Array, bits: int) -> Array:
    return np.array([words_of([int(v) for v in row], bits) for row in unsigned], dtype=np.int32)


def pack_awq_rows(unsigned: Array) -> Array:
    """[R, N] to [R, N/8]: nibble i of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    words = [[sum(int(row[8 * w + c]) << (4 * i) for i, c in enumerate(order)) for w in range(len(row) // 8)]
             for row in unsigned]  # fmt: skip
    return np.array(words, dtype=np.uint32).view(np.int32)


def group_quant(element: str, group: int, scale_format: str = "f16") -> TensorQuant:
    return TensorQuant(element, "group", group, scale_format=scale_format, symmetric=not element.startswith("u"))


def scales(*shape: int) -> Array:
    return RNG.uniform(0.5, 2.0, shape).astype(np.float16)


def expected(values: Array, scale: Array, group: int, zero: Array | None = None) -> Array:
    out = np.empty(values.shape, dtype=np.float64)
    for k in range(values.shape[1]):
        offset = 0 if zero is None else zero[:, k // group].astype(np.float64)
        out[:, k] = (values[:, k] - offset) * scale[:, k // group].astype(np.float64)
    return out


sizes = st.tuples(st.sampled_from([8, 16, 32]), st.sampled_from([32, 64, 96]), st.integers(2, 8), st.integers(0, 2**31))


@settings(max_examples=25, deadline=None)
@given(sizes)
def test_int32_k_symmetric(size: tuple[int, int, int, int]) -> None:
    n, k, bits, seed = size
    rng = np.random.default_rng(seed)
    values = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k))
    scale = scales(n, k // 32)
    packed = pack_rows(values + 2 ** (bits - 1), bits)
    weight = canonicalise(
        {"codes": packed, "scale": scale, "weight_shape": np.array([n, k])},
        Storage("int32_k", "I32"), Scheme(group_quant(f"int{bits}", 32)), n, k,
    )  # fmt: skip
    assert weight.tensors["scale"].dtype == np.float16
    assert "zero_point" not in weight.tensors
    np.testing.assert_array_equal(dequantize(weight), expected(values, scale, 32))


def test_int32_k_with_columns_that_do_not_fill_the_last_word() -> None:
    values = RNG.integers(-4, 4, (3, 42))
    packed = pack_rows(values + 4, 3)
    assert packed.shape == (3, 4)
    scale = np.ones((3, 1), BF16)
    weight = canonicalise(
        {"codes": packed, "scale": scale}, Storage("int32_k", "I32"), Scheme(parse_weight_id("int3-channel")), 3, 42
    )
    np.testing.assert_array_equal(dequantize(weight), values)
    # canonical: a two's complement byte
    np.testing.assert_array_equal(weight.tensors["codes"].view(np.int8), values)


@settings(max_examples=25, deadline=None)
@given(sizes)
def test_int32_k_with_zero_points_packed_along_rows(size: tuple[int, int, int, int]) -> None:
    n, k, bits, seed = size
    rng = np.random.default_rng(seed)
    half = 2 ** (bits - 1)
    values, zero = rng.integers(-half, half, (n, k)), rng.integers(-half, half, (n, k // 32))
    scale = scales(n, k // 32)
    arrays = {"codes": pack_rows(values + half, bits), "scale": scale, "zero_point": pack_rows((zero + half).T, bits).T}
    weight = canonicalise(arrays, Storage("int32_k", "I32"), Scheme(group_quant(f"uint{bits}", 32)), n, k)
    np.testing.assert_array_equal(weight.tensors["zero_point"], zero + half)
    np.testing.assert_array_equal(dequantize(weight), expected(values, scale, 32, zero))


@settings(max_examples=25, deadline=None)
@given(sizes, st.booleans())
def test_gptq(size: tuple[int, int, int, int], version1: bool) -> None:
    n, k, bits, seed = size
    n = 32
    rng = np.random.default_rng(seed)
    codes, zero = rng.integers(0, 2**bits, (n, k)), rng.integers(0, 2**bits, (n, k // 32))
    scale = scales(n, k // 32)
    stored_zero = (zero - 1) % 2**bits if version1 else zero
    arrays = {"codes": pack_rows(codes, bits).T, "scale": scale.T, "zero_point": pack_rows(stored_zero.T, bits)}
    storage = Storage("gptq", "I32", zero_offset=int(version1))
    weight = canonicalise(arrays, storage, Scheme(group_quant(f"uint{bits}", 32)), n, k)
    np.testing.assert_array_equal(dequantize(weight), expected(codes, scale, 32, zero))
    assert weight.tensors["codes"].shape == ((n, k // 2) if bits == 4 else (n, k))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([8, 24]), st.sampled_from([64, 128]))
def test_awq(seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    codes, zero = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, k // 32))
    scale = scales(n, k // 32)
    arrays = {"codes": pack_awq_rows(codes.T), "scale": scale.T, "zero_point": pack_awq_rows(zero.T)}
    weight = canonicalise(arrays, Storage("awq", "I32"), Scheme(group_quant("uint4", 32)), n, k)
    np.testing.assert_array_equal(dequantize(weight), expected(codes, scale, 32, zero))


def symmetric_gptq(bits: int = 4, zero: int = 8) -> tuple[dict[str, Array], Array, Array]:
    values, scale = RNG.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (8, 64)), scales(8, 2)
    zeros = pack_rows(np.full((2, 8), zero - 1), bits)
    return {
        "codes": pack_rows(values + 2 ** (bits - 1), bits).T,
        "scale": scale.T,
        "zero_point": zeros,
    }, values, scale  # fmt: skip


def test_symmetric_gptq_becomes_twos_complement() -> None:
    arrays, values, scale = symmetric_gptq()
    weight = canonicalise(arrays, Storage("gptq", "I32", zero_offset=1), Scheme(group_quant("int4", 32)), 8, 64)
    assert set(weight.tensors) == {"codes", "scale"}
    signed = unpack_nibbles(weight.tensors["codes"]).astype(np.int8)
    np.testing.assert_array_equal(np.where(signed > 7, signed - 16, signed), values)
    np.testing.assert_array_equal(dequantize(weight), expected(values, scale, 32))


def test_symmetric_gptq_with_other_zero_points_is_refused() -> None:
    arrays, _, _ = symmetric_gptq(zero=7)
    with pytest.raises(InvalidCheckpointError, match="declares symmetric int4, but zero points differ from 8"):
        canonicalise(arrays, Storage("gptq", "I32", zero_offset=1), Scheme(group_quant("int4", 32)), 8, 64)


def test_group_order_is_kept_and_a_trivial_one_dropped() -> None:
    arrays, values, scale = symmetric_gptq()
    storage, scheme = Storage("gptq", "I32", zero_offset=1), Scheme(group_quant("int4", 32))
    trivial = canonicalise({**arrays, "group_index": np.arange(64) // 32}, storage, scheme, 8, 64)
    assert "group_index" not in trivial.tensors
    order = RNG.permutation(np.arange(64) // 32)
    weight = canonicalise({**arrays, "group_index": order}, storage, scheme, 8, 64)
    assert weight.tensors["group_index"].dtype == np.int32
    np.testing.assert_array_equal(dequantize(weight), values * scale.astype(np.float64)[:, order])
    with pytest.raises(InvalidCheckpointError, match="runs from 0 to 2, but there are 2 groups"):
        canonicalise({**arrays, "group_index": order + (order == 1)}, storage, scheme, 8, 64)


def test_channelwise_gptq() -> None:
    arrays, values, scale = symmetric_gptq()
    arrays = {"codes": arrays["codes"], "scale": scale.T[:1], "group_index": np.zeros(64, np.int32)}
    weight = canonicalise(arrays, Storage("gptq", "I32"), Scheme(parse_weight_id("int4-channel")), 8, 64)
    assert weight.tensors["scale"].dtype == np.float32
    np.testing.assert_array_equal(dequantize(weight), values * scale[:, :1].astype(np.float64))


def test_nibbles_n_holds_two_rows_in_a_byte() -> None:
    values, scale = RNG.integers(-8, 8, (6, 32)), scales(6, 2)
    packed = np.array(
        [[(int(values[2 * i, k]) & 15) | ((int(values[2 * i + 1, k]) & 15) << 4) for k in range(32)] for i in range(3)],
        dtype=np.uint8,
    )
    weight = canonicalise(
        {"codes": packed, "scale": scale}, Storage("nibbles_n", "U8"), Scheme(group_quant("int4", 16)), 6, 32
    )
    np.testing.assert_array_equal(dequantize(weight), expected(values, scale, 16))


def test_mxfp4_is_a_view() -> None:
    codes = RNG.integers(0, 256, (4, 32), dtype=np.uint8)
    scale = RNG.integers(120, 130, (4, 2), dtype=np.uint8)
    arrays = {"codes": codes, "scale": scale.view(ml_dtypes.float8_e8m0fnu)}
    weight = canonicalise(arrays, Storage("nibbles_k", "U8"), Scheme(parse_weight_id("mxfp4")), 4, 64)
    assert np.shares_memory(weight.tensors["codes"], codes)
    assert weight.tensors["scale"].dtype == np.uint8
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for n in range(4):
        for k in range(64):
            code = (int(codes[n, k // 2]) >> (4 * (k % 2))) & 15
            value = table[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(scale[n, k // 32]) - 127)
            assert dequantize(weight)[n, k] == value


def test_gpt_oss_keeps_the_groups_of_stacked_experts_apart() -> None:
    codes = RNG.integers(0, 256, (2, 4, 3, 16), dtype=np.uint8)
    scale = RNG.integers(120, 130, (2, 4, 3), dtype=np.uint8)
    arrays = {"codes": codes, "scale": scale, "bias": np.ones((2, 4), BF16)}
    weight = canonicalise(arrays, Storage("nibbles_k", "U8"), Scheme(parse_weight_id("mxfp4")), 4, 96)
    assert weight.tensors["codes"].shape == (2, 4, 48)
    one = canonicalise(
        {"codes": codes[1].reshape(4, 48), "scale": scale[1]},
        Storage("nibbles_k", "U8"), Scheme(parse_weight_id("mxfp4")), 4, 96,
    )  # fmt: skip
    np.testing.assert_array_equal(dequantize(weight)[1], dequantize(one))


def test_mxint4_is_sign_and_magnitude_on_disk() -> None:
    # codes 3 and -5, then -0 and 7: auto-round's magnitudes are quarters
    codes = np.zeros((1, 16), np.uint8)
    codes[0, :2] = [0xD3, 0x78]
    arrays = {"codes": codes, "scale": np.array([[128]], np.uint8)}
    weight = canonicalise(arrays, Storage("nibbles_k", "U8"), Scheme(parse_weight_id("mxint4")), 1, 32)
    assert dequantize(weight)[0, :4].tolist() == [1.5, -2.5, 0.0, 3.5]
    assert weight.tensors["codes"][0, :2].tolist() == [0xB3, 0x70]


@pytest.mark.parametrize("divisor", [True, False])
def test_nvfp4_global_scale_becomes_a_multiplier_per_row(divisor: bool) -> None:
    codes = np.full((2, 8), 0x22, np.uint8)
    stored = np.array([4.0] if divisor else 0.25, np.float32)
    arrays = {
        "codes": codes,
        "scale": np.array([[2.0], [8.0]], E4M3),
        "global_scale": stored,
        "input_global_scale": stored,
    }
    scheme = Scheme(parse_weight_id("nvfp4"), parse_activation_id("nvfp4"))
    weight = canonicalise(arrays, Storage("nibbles_k", "U8", global_is_divisor=divisor), scheme, 2, 16)
    assert weight.tensors["global_scale"].tolist() == [[0.25], [0.25]]
    assert weight.tensors["input_global_scale"].tolist() == [0.25]
    assert weight.tensors["scale"].dtype == E4M3
    assert dequantize(weight)[:, 0].tolist() == [0.5, 2.0]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_scale_is_repeated_per_row(shape: tuple[int, ...]) -> None:
    arrays = {"codes": np.ones((3, 4), E4M3), "scale": np.full(shape, 0.5, BF16), "input_scale": np.array(2.0, BF16)}
    scheme = Scheme(parse_weight_id("fp8-tensor"), parse_activation_id("fp8-tensor-static"))
    weight = canonicalise(arrays, Storage("plain", "F8_E4M3"), scheme, 3, 4)
    assert weight.tensors["scale"].tolist() == [[0.5]] * 3
    assert weight.tensors["scale"].dtype == weight.tensors["input_scale"].dtype == np.float32
    assert weight.tensors["input_scale"].tolist() == [2.0]


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_channel_scales(shape: tuple[int, ...]) -> None:
    scale = np.array([1, 2, 3], np.float32).reshape(shape)
    arrays = {"codes": np.ones((3, 4), np.int8), "scale": scale}
    weight = canonicalise(arrays, Storage("plain", "I8"), Scheme(parse_weight_id("int8-channel")), 3, 4)
    assert dequantize(weight)[:, 0].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(InvalidCheckpointError, match=r"scale has shape \[1\], needed \[3, 1\]"):
        canonicalise({**arrays, "scale": np.ones(1)}, Storage("plain", "I8"), weight.scheme, 3, 4)


@pytest.mark.parametrize("four_dimensions", [True, False])
def test_block_scales_with_partial_last_blocks(four_dimensions: bool) -> None:
    scale = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    stored = scale.reshape(2, 1, 3, 1) if four_dimensions else scale
    scheme = Scheme(parse_weight_id("fp8-block128x128"))
    weight = canonicalise(
        {"codes": np.ones((130, 300), E4M3), "scale": stored}, Storage("plain", "F8_E4M3"), scheme, 130, 300
    )
    values = dequantize(weight)
    assert (values[127, 127], values[128, 0], values[0, 256], values[129, 299]) == (1.0, 4.0, 3.0, 6.0)
    with pytest.raises(InvalidCheckpointError, match=r"needed \[2, 3\]"):
        canonicalise(
            {"codes": np.ones((130, 300), E4M3), "scale": scale[:, :2]}, Storage("plain", "F8_E4M3"), scheme, 130, 300
        )


def test_int4_values_in_an_int8_container() -> None:
    values, scale = RNG.integers(-8, 8, (4, 32)), scales(4, 2)
    arrays = {"codes": values.astype(np.int8), "scale": scale}
    scheme = Scheme(group_quant("int4", 16))
    weight = canonicalise(arrays, Storage("plain", "I8"), scheme, 4, 32)
    assert weight.tensors["codes"].shape == (4, 16)
    np.testing.assert_array_equal(dequantize(weight), expected(values, scale, 16))
    arrays["codes"][2, 3] = 8
    with pytest.raises(InvalidCheckpointError, match="outside int4"):
        canonicalise(arrays, Storage("plain", "I8"), scheme, 4, 32)


@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_codes_in_a_signed_container(bits: int) -> None:
    half = 2 ** (bits - 1)
    values, zero = RNG.integers(-half, half, (4, 32)), RNG.integers(-half, half, (4, 1))
    scale = np.full((4, 1), 0.5, np.float32)
    arrays = {"codes": values.astype(np.int8), "scale": scale, "zero_point": zero.astype(np.int8)}
    weight = canonicalise(arrays, Storage("plain", "I8"), Scheme(parse_weight_id(f"uint{bits}-channel")), 4, 32)
    np.testing.assert_array_equal(weight.tensors["zero_point"], zero + half)
    np.testing.assert_array_equal(dequantize(weight), (values - zero) * 0.5)


def test_fp4_numbers_in_an_fp8_container() -> None:
    values = RNG.choice([0, 0.5, -1.5, 6, -4, 3], (2, 512)).astype(np.float64)
    arrays = {
        "codes": values.astype(E4M3),
        "scale": np.full((2, 16), 128, np.uint8),
        "scale2": np.full((2, 1, 1), 0.25, np.float32),
    }
    scheme = Scheme(parse_weight_id("mxfp4-dual"))
    weight = canonicalise(arrays, Storage("plain", "F8_E4M3"), scheme, 2, 512)
    assert weight.tensors["codes"].shape == (2, 256)
    np.testing.assert_array_equal(dequantize(weight), values * 0.5)
    arrays["codes"] = np.full((2, 512), 5.0, E4M3)
    with pytest.raises(InvalidCheckpointError, match="numbers that are not fp4"):
        canonicalise(arrays, Storage("plain", "F8_E4M3"), scheme, 2, 512)


def test_fp8_numbers_in_a_bf16_container() -> None:
    values = RNG.choice([0.0, 448.0, -1.75], (2, 32))
    arrays = {"codes": values.astype(BF16), "scale": np.full((2, 1), 127, np.uint8)}
    scheme = Scheme(parse_weight_id("mxfp8"))
    weight = canonicalise(arrays, Storage("plain", "BF16"), scheme, 2, 32)
    assert weight.tensors["codes"].dtype == E4M3
    np.testing.assert_array_equal(dequantize(weight), values)
    with pytest.raises(InvalidCheckpointError, match="holds other numbers"):
        canonicalise({**arrays, "codes": np.full((2, 32), 450, BF16)}, Storage("plain", "BF16"), scheme, 2, 32)


def test_an_unquantized_weight_passes_through() -> None:
    codes, bias = RNG.standard_normal((3, 5)).astype(BF16), np.ones(3, BF16)
    weight = canonicalise(
        {"codes": codes, "bias": bias}, Storage("plain", "BF16"), Scheme(parse_weight_id("bf16")), 3, 5
    )
    assert weight.tensors["codes"] is codes
    assert weight.tensors["bias"] is bias
    np.testing.assert_array_equal(dequantize(weight), codes.astype(np.float64))


def test_stacked_experts() -> None:
    arrays = {
        "codes": np.ones((2, 3, 4), E4M3),
        "scale": np.array([1.0, 3.0], np.float32),
        "input_scale": np.array([5.0, 6.0], np.float32),
    }
    scheme = Scheme(parse_weight_id("fp8-tensor"), parse_activation_id("fp8-tensor-static"))
    weight = canonicalise(arrays, Storage("plain", "F8_E4M3"), scheme, 3, 4)
    assert weight.tensors["scale"].shape == (2, 3, 1)
    assert weight.tensors["input_scale"].tolist() == [[5.0], [6.0]]
    assert dequantize(weight)[:, 0, 0].tolist() == [1.0, 3.0]


def test_static_input_roles_are_kept_only_where_the_activation_uses_them() -> None:
    arrays = {
        "codes": np.ones((3, 4), np.int8),
        "scale": np.ones((3, 1), np.float32),
        "input_scale": np.array([0.5], np.float32),
        "input_zero_point": np.array([3], np.int8),
    }
    weight = parse_weight_id("int8-channel")

    def kept(activation: str) -> set[str]:
        scheme = Scheme(weight, parse_activation_id(activation))
        return set(canonicalise(arrays, Storage("plain", "I8"), scheme, 3, 4).tensors) - {"codes", "scale"}

    assert kept("int8-tensor-static-asym") == {"input_scale", "input_zero_point"}
    assert kept("int8-token") == kept("a16") == set()
    with pytest.raises(InvalidCheckpointError, match="symmetric input, but its zero point is not 0"):
        kept("int8-tensor-static")
    arrays["input_zero_point"] = np.array([0], np.int8)
    assert kept("int8-tensor-static") == {"input_scale"}


def mxfp4(codes: Array | None = None, scale: Array | None = None) -> dict[str, Array]:
    return {
        "codes": np.full((4, 32), 0x11, np.uint8) if codes is None else codes,
        "scale": np.full((4, 2), 127, np.uint8) if scale is None else scale,
    }


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"codes": np.zeros((4, 32), np.uint8)}, "tensor for scale is missing"),
        ({"scale": np.zeros((4, 2), np.uint8)}, "tensor for codes is missing"),
        (mxfp4(codes=np.zeros((4, 31), np.uint8)), r"codes has shape \[4, 31\], needed \[4, 32\]"),
        (mxfp4(codes=np.zeros((4, 32), np.int8)), "codes are stored as int8, needed uint8"),
        (mxfp4(scale=np.zeros((4, 4), np.uint8)), r"scale has shape \[4, 4\], needed \[4, 2\]"),
        (mxfp4(scale=np.zeros((4, 2), np.float32)), "scale is stored as float32, needed e8m0"),
        ({**mxfp4(), "bias": np.zeros(5)}, r"bias has shape \[5\], needed \[4\]"),
        ({**mxfp4(), "global_scale": np.ones(1)}, "there is a global_scale, which mxfp4 does not have"),
        ({**mxfp4(), "pre_scale": np.ones(64)}, "there is a pre_scale"),
        ({**mxfp4(), "g_idx": np.ones(64)}, "no tensor of a weight is called 'g_idx'"),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_module(arrays: dict[str, Array], message: str) -> None:
    with pytest.raises(InvalidCheckpointError, match=message) as caught:
        canonicalise(
            arrays, Storage("nibbles_k", "U8"), Scheme(parse_weight_id("mxfp4")), 4, 64, file="a.st", module="m.q"
        )
    assert (caught.value.file, caught.value.key) == ("a.st", "m.q")


def test_columns_must_be_whole_groups() -> None:
    with pytest.raises(InvalidCheckpointError, match="48 columns are not a multiple of the group size 32"):
        canonicalise(mxfp4(), Storage("nibbles_k", "U8"), Scheme(parse_weight_id("mxfp4")), 4, 48)


def test_pre_scale_becomes_f32() -> None:
    scheme = replace(Scheme(parse_weight_id("mxfp4")), pre_scale=True)
    with pytest.raises(InvalidCheckpointError, match="tensor for pre_scale is missing"):
        canonicalise(mxfp4(), Storage("nibbles_k", "U8"), scheme, 4, 64)
    weight = canonicalise({**mxfp4(), "pre_scale": np.ones(64, BF16)}, Storage("nibbles_k", "U8"), scheme, 4, 64)
    assert weight.tensors["pre_scale"].dtype == np.float32


def bad_scale(value: float) -> Array:
    scale = np.ones((4, 2), np.float16)
    scale[2, 1] = value
    return scale


def int4_arrays(scale: Array, codes: Array | None = None) -> dict[str, Array]:
    return {"codes": np.full((4, 32), 0x11, np.uint8) if codes is None else codes, "scale": scale}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_scales_that_are_not_finite_are_found(value: float) -> None:
    with pytest.raises(InvalidCheckpointError) as caught:
        canonicalise(int4_arrays(bad_scale(value)), Storage("nibbles_k", "U8"), Scheme(group_quant("int4", 32)), 4, 64)
    assert caught.value.problem.startswith("scale not finite")
    assert "2" in caught.value.problem


def test_a_zero_scale_is_legal_for_a_group_of_zeros() -> None:
    codes = np.full((4, 32), 0x11, np.uint8)
    codes[2, 16:] = 0
    arrays = int4_arrays(bad_scale(0.0), codes)
    canonicalise(arrays, Storage("nibbles_k", "U8"), Scheme(group_quant("int4", 32)), 4, 64)
    codes[2, 31] = 0x10
    with pytest.raises(InvalidCheckpointError, match=r"^scale not finite"):
        canonicalise(arrays, Storage("nibbles_k", "U8"), Scheme(group_quant("int4", 32)), 4, 64)


def test_zero_scales_of_rows_blocks_and_with_zero_points() -> None:
    fp8 = np.zeros((4, 8), E4M3)
    fp8[1] = -0.0
    plain = Storage("plain", "F8_E4M3")
    rows = {"codes": fp8, "scale": np.array([1, 0, 1, 1], np.float32)}
    canonicalise(rows, plain, Scheme(parse_weight_id("fp8-channel")), 4, 8)
    blocks = {"codes": fp8, "scale": np.zeros((2, 2), np.float32)}
    scheme = Scheme(parse_weight_id("fp8-block2x4"))
    canonicalise(blocks, plain, scheme, 4, 8)
    fp8[3, 5] = 1.0
    with pytest.raises(InvalidCheckpointError, match=r"^scale not finite: the scale of row \[3\], column 5 is 0"):
        canonicalise(blocks, plain, scheme, 4, 8)
    blocks["scale"] = np.array([[0, 0], [0, 1]], np.float32)
    canonicalise(blocks, plain, scheme, 4, 8)
    blocks["scale"] = np.array([[1, 1], [1, 0]], np.float32)
    with pytest.raises(InvalidCheckpointError, match=r"^scale not finite: the scale of row \[3\], column 5 is 0"):
        canonicalise(blocks, plain, scheme, 4, 8)
    unsigned = {"codes": np.full((2, 4), 9, np.uint8), "scale": np.zeros((2, 1), np.float32)}
    unsigned["zero_point"] = np.full((2, 1), 9, np.uint8)
    canonicalise(unsigned, Storage("plain", "U8"), Scheme(parse_weight_id("uint8-channel")), 2, 4)
    unsigned["zero_point"] = np.array([[9], [8]], np.uint8)
    with pytest.raises(InvalidCheckpointError, match=r"^scale not finite"):
        canonicalise(unsigned, Storage("plain", "U8"), Scheme(parse_weight_id("uint8-channel")), 2, 4)


def test_the_nan_byte_of_e8m0_is_found_and_byte_0_is_a_number() -> None:
    scale = np.full((4, 2), 127, np.uint8)
    scale[0, 0] = 0
    storage, scheme = Storage("nibbles_k", "U8"), Scheme(parse_weight_id("mxfp4"))
    canonicalise(mxfp4(scale=scale), storage, scheme, 4, 64)
    scale[3, 1] = 255
    with pytest.raises(InvalidCheckpointError, match=r"^scale not finite: scale\[3, 1\] is the byte 255"):
        canonicalise(mxfp4(scale=scale), storage, scheme, 4, 64)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_global_scales_that_are_not_finite_are_found(value: float) -> None:
    arrays = {
        "codes": np.zeros((2, 8), np.uint8),
        "scale": np.ones((2, 1), E4M3),
        "global_scale": np.array([value], np.float32),
    }
    with pytest.raises(InvalidCheckpointError) as caught:
        canonicalise(arrays, Storage("nibbles_k", "U8"), Scheme(parse_weight_id("nvfp4")), 2, 16)
    assert caught.value.problem.startswith("scale not finite: global_scale")


def test_symmetric_zero_points_of_plain_files_must_be_zero() -> None:
    arrays = {
        "codes": np.ones((2, 4), np.int8),
        "scale": np.ones((2, 1), np.float32),
        "zero_point": np.zeros((2, 1), np.int8),
    }
    scheme = Scheme(parse_weight_id("int8-channel"))
    assert "zero_point" not in canonicalise(arrays, Storage("plain", "I8"), scheme, 2, 4).tensors
    arrays["zero_point"] = np.array([[0], [1]], np.int8)
    with pytest.raises(InvalidCheckpointError, match="zero points differ from 0"):
        canonicalise(arrays, Storage("plain", "I8"), scheme, 2, 4)


def test_fractional_zero_points_stay_f32() -> None:
    arrays = {
        "codes": np.array([[3, 4]], np.uint8),
        "scale": np.ones((1, 1), np.float32),
        "zero_point": np.array([[2.5]], np.float16),
    }
    weight = canonicalise(arrays, Storage("plain", "U8"), Scheme(parse_weight_id("uint8-channel")), 1, 2)
    assert weight.tensors["zero_point"].dtype == np.float32
    assert dequantize(weight).tolist() == [[0.5, 1.5]]
