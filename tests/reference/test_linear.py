"""The cpu backend's linear kernels against the oracle, in every scheme that its spec declares."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat import oracle
from omniplat.capability import matches
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.reference import linear as linear_module
from omniplat.reference.decode import RowDecoder
from omniplat.reference.kernels import DequantLinear, Int8Linear
from omniplat.reference.linear import int_mm_is_exact, matmul_int8, splits_for
from omniplat.reference.spec import SPEC
from omniplat.runtime.kernel import load_kernel
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme, parse_weight_id
from tests.reference.build import Weights, assert_within_f32, layer_of

WEIGHTS = (
    *("fp8-tensor", "fp8-channel", "fp8-g128", "fp8-block128x128", "fp8-block100x96", "fp8e5m2-channel"),
    *("fp8e5m2-block128x128", "int8-tensor", "int8-channel", "int8-g128", "uint8-channel", "uint8-g64"),
    *("int2-g32", "int3-g64", "int5-channel", "int6-g32", "int7-g128", "uint2-g32", "uint3-g64", "uint5-g128"),
    *("uint6-channel", "uint7-g32", "int4-g128", "int4-channel", "uint4-g128", "uint4-channel", "uint4-g32"),
    *("mxfp8", "mxfp8e5m2", "mxfp6e2m3", "mxfp6e3m2", "mxfp4", "mxint4", "mxint8", "nvfp4", "mxfp4-dual"),
)
PAIRS = (
    *("fp8-channel/fp8-token", "fp8-tensor/fp8-tensor", "fp8-tensor/fp8-tensor-static", "fp8-block128x128/fp8-g128"),
    *("int8-channel/int8-token", "int8-channel/int8-token-asym", "int8-tensor/int8-tensor-static"),
    *(
        "int8-channel/int8-tensor-static-asym",
        "int4-channel/int8-token",
        "int4-g128/fp8-token",
        "int4-channel/int4-token",
    ),
    *("mxfp8/mxfp8", "mxfp6e2m3/mxfp6e2m3", "mxfp4/mxfp4", "mxfp4/mxfp8", "mxfp4-dual/mxfp4-dual", "nvfp4/nvfp4"),
    *("bf16/fp8-token",),
)


@pytest.mark.parametrize("weight_id", WEIGHTS)
def test_weight_only_products_are_those_of_the_oracle(weight_id: str) -> None:
    made = Weights()
    weight = made.canonical(Scheme(parse_weight_id(weight_id)), 300, 512)
    x = made.values(5, 512)
    assert_within_f32(layer_of(weight)(torch.from_numpy(x)), x, weight)


@pytest.mark.parametrize("scheme_id", PAIRS)
def test_activations_are_quantized_as_declared(scheme_id: str) -> None:
    made = Weights(1)
    weight = made.canonical(Scheme.parse(scheme_id), 130, 512)
    x = made.values(6, 512)
    x[2] *= 200
    assert_within_f32(layer_of(weight)(torch.from_numpy(x)), x, weight)


@pytest.mark.parametrize("stored", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unquantized_weights_round_once_to_the_input_dtype(stored: str, dtype: torch.dtype) -> None:
    made = Weights(2)
    weight = made.canonical(Scheme.parse("bf16/a16"), 70, 96, stored=stored)
    x = made.values(4, 96)
    y = layer_of(weight)(torch.from_numpy(x).to(dtype))
    assert y.dtype == dtype
    expected = torch.from_numpy(oracle.linear(x, weight))
    # Half a unit of the output dtype, and the float32 accumulation that may tip a tie.
    unit = torch.finfo(dtype).eps / 2
    assert ((y.double() - expected).abs() <= unit * expected.abs() + 1e-5).all()


def test_every_declared_pattern_is_tested() -> None:
    tested = (*WEIGHTS, "bf16", "fp8e5m2-tensor", "fp8e5m2-g128", "nf4-b64", "fp4bnb-b64", "int8-bnb")
    unprobed = ("nf4-b*", "fp4bnb-b*", "int[2-8]-tensor", "uint[2-8]-tensor")
    decoded = [
        c for c in SPEC.capabilities if c.name in ("int8_linear", "dequant_linear", "float_linear", "expert_loop")
    ]
    assert len(decoded) == 4
    for capability in decoded:
        for pattern in capability.weights:
            is_block = pattern.startswith(("int[2-8]-block", "uint[2-8]-block"))
            assert is_block or pattern in unprobed or any(matches((pattern,), name) for name in tested), pattern


def test_kernels_carry_the_names_that_the_plan_shows() -> None:
    for capability in SPEC.capabilities:
        assert load_kernel(capability.impl).name == capability.name


@pytest.mark.parametrize("weight_id", ["uint4-g32", "int8-g32", "mxfp8"])
def test_group_index_orders_columns(weight_id: str) -> None:
    made = Weights(3)
    weight = made.canonical(Scheme(parse_weight_id(weight_id)), 40, 128)
    order = np.repeat(np.arange(4, dtype=np.int32), 32)
    made.random.shuffle(order)
    weight = replace(weight, tensors={**weight.tensors, "group_index": order})
    x = made.values(3, 128)
    assert_within_f32(layer_of(weight)(torch.from_numpy(x)), x, weight)


def test_fractional_zero_points_pre_scale_and_bias() -> None:
    made = Weights(4)
    weight = made.canonical(Scheme.parse("uint4-g32/a16"), 24, 64)
    tensors = dict(weight.tensors)
    tensors["zero_point"] = tensors["zero_point"].astype(np.float32) + np.float32(0.375)
    tensors["pre_scale"] = np.exp2(made.random.integers(-2, 3, 64)).astype(np.float32)
    tensors["bias"] = made.values(24) * 10
    weight = replace(weight, scheme=replace(weight.scheme, pre_scale=True), tensors=tensors)
    x = made.values(3, 64)
    assert_within_f32(layer_of(weight)(torch.from_numpy(x)), x, weight)


def test_two_row_tiles_are_joined() -> None:
    made = Weights(5)
    weight = made.canonical(Scheme.parse("mxfp4/a16"), 1100, 1024)
    assert RowDecoder(weight.scheme.weight, to_torch(weight).tensors, 1024).tile < 1100
    x = made.values(2, 1024)
    assert_within_f32(layer_of(weight)(torch.from_numpy(x)), x, weight)


# --- bf16 products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "scheme_id",
    [
        "mxfp8/a16",
        "mxfp8/mxfp8",
        "mxfp8e5m2/a16",
        "mxfp4/mxfp4",
        "mxfp6e2m3/a16",
        "mxint8/a16",
        "mxint4/a16",
    ],
)
def test_bf16_tiles_round_once(scheme_id: str, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced on, also where the CPU has no bf16 units. Two roundings would move a third of these results."""
    monkeypatch.setattr(linear_module, "has_bf16_units", lambda: True)
    used: list[torch.dtype] = []
    plain = linear_module.matmul_bf16
    monkeypatch.setattr(linear_module, "matmul_bf16", lambda x, d, b: (used.append(x.dtype), plain(x, d, b))[1])
    made = Weights(8)
    weight = made.canonical(Scheme.parse(scheme_id), 4200, 512)
    if biased:
        bias = (made.values(4200) * 30).astype(ml_dtypes.bfloat16)
        weight = replace(weight, tensors={**weight.tensors, "bias": bias})
    x = made.values(9, 512)
    y = layer_of(weight)(torch.from_numpy(x).to(torch.bfloat16))
    assert used == [torch.bfloat16]
    once = torch.from_numpy(oracle.linear(x, weight)).to(torch.float32).to(torch.bfloat16)
    assert (y != once).double().mean() < 0.01
    torch.testing.assert_close(y, once, rtol=2.0**-7, atol=0.05)


@pytest.mark.parametrize(
    "scheme_id", ["nvfp4/a16", "fp8-channel/a16", "mxfp8/fp8-token", "mxfp4-dual/a16", "int4-g32/a16"]
)
def test_bf16_tiles_are_only_for_what_bf16_can_hold(scheme_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "has_bf16_units", lambda: True)
    monkeypatch.setattr(linear_module, "matmul_bf16", None)
    weight = Weights().canonical(Scheme.parse(scheme_id), 16, 512)
    layer_of(weight)(torch.ones(9, 512, dtype=torch.bfloat16))


# --- exact integers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_int_mm", [False, True])
@pytest.mark.parametrize("columns", [48, 4096, 37])
def test_integer_products_are_exact_where_they_would_saturate(
    use_int_mm: bool, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if use_int_mm and not int_mm_is_exact():
        pytest.skip("this CPU's int8 products saturate")
    monkeypatch.setattr(linear_module, "int_mm_is_exact", lambda: use_int_mm)
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (33, columns), dtype=torch.int8, generator=random)
    codes[:5], codes[5:9] = 127, -128
    x = torch.randint(-128, 128, (7, columns), generator=random)
    x[0], x[1] = 127, -128
    expected = x.double() @ codes.double().t()
    splits = splits_for(codes, 128)
    found = matmul_int8(linear_module.Quantized(x.float()), codes, splits)
    assert torch.equal(found, expected.to(torch.float32))


def test_splits_keep_every_sum_below_two_to_the_24() -> None:
    codes = torch.full((3, 8192), 127, dtype=torch.int8)
    splits = splits_for(codes, 128)
    assert -(-8192 // splits) * 127 * 128 < 1 << 24
    assert -(-8192 // (splits - 1)) * 127 * 128 >= 1 << 24
    assert splits_for(torch.ones(3, 8192, dtype=torch.int8), 128) == 1


def test_int8_linear_equals_exact_integers_times_scales() -> None:
    made = Weights(6)
    weight = made.canonical(Scheme.parse("int8-channel/int8-token"), 65, 320)
    x = made.values(9, 320)
    assert_within_f32(layer_of(weight, Int8Linear())(torch.from_numpy(x)), x, weight)


@pytest.mark.parametrize("scheme_id", ["int8-channel/a16", "int8-channel/int8-token-asym", "int8-g128/int8-token"])
def test_int8_linear_refuses_what_is_not_integer_on_both_sides(scheme_id: str) -> None:
    weight = Weights().canonical(Scheme.parse(scheme_id), 16, 128)
    with pytest.raises(UnsupportedCombinationError):
        layer_of(weight, Int8Linear())


# --- refusals ----------------------------------------------------------------------------------------------------


def test_nan_codes_are_refused() -> None:
    weight = Weights().canonical(Scheme.parse("fp8-channel/a16"), 8, 16)
    codes = np.array(weight.tensors["codes"])
    codes.view(np.uint8)[3, 5] = 0xFF
    with pytest.raises(InvalidCheckpointError, match="NaN"):
        layer_of(replace(weight, tensors={**weight.tensors, "codes": codes}), DequantLinear())


def test_opaque_elements_are_refused() -> None:
    weight = Weights().canonical(Scheme.parse("int4-g128/a16"), 8, 128)
    with pytest.raises(UnsupportedCombinationError):
        layer_of(replace(weight, scheme=Scheme.parse("gguf-q4_k/a16")))
