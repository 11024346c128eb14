"""Codes and scales of activations, byte for byte those of the oracle, in plain torch and in Triton.

Triton's form runs on a CUDA device, or anywhere under its interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat import oracle
from omniplat.portable.quantize import MAX_COLUMNS, has_triton, quantize_rows, quantize_rows_torch, why_not
from omniplat.runtime.tensors import to_array, to_tensor
from omniplat.scheme import TensorQuant, parse_activation_id
from tests.support.triton import TRITON_DEVICE, needs_cuda, needs_triton

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
RULES = ("absmax", "half-range", "absmax-clamped", "absmax-reciprocal")
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
Form = Callable[..., tuple[torch.Tensor, torch.Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def in_triton(x: torch.Tensor, quant: TensorQuant, pre: torch.Tensor | None, given: torch.Tensor | None) -> object:
    from omniplat.portable.quantize_triton import quantize_rows as form

    return form(x, quant, pre, given)


FORMS = [
    pytest.param(quantize_rows_torch, "cpu", id="torch-cpu"),
    pytest.param(quantize_rows_torch, "cuda", marks=needs_cuda, id="torch-cuda"),
    pytest.param(in_triton, TRITON_DEVICE, marks=needs_triton, id="triton"),
]
each_form = pytest.mark.parametrize(("form", "device"), FORMS)


def inputs(rows: int, columns: int, dtype: str) -> np.ndarray:
    """Rows over the whole range of the dtype, with ties, zeros of both signs and numbers that underflow."""
    rng = np.random.default_rng(rows * 1000 + columns)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    x *= np.exp2(rng.integers(-12, 4, (rows, columns))).astype(np.float32)
    x[0] = 0.0
    x[0, ::2] = -0.0
    # quotients that lie half way between codes, in fp8's normal and subnormal range and between integers
    half_ways = (np.arange(columns) % 254 - 127 + 0.5).astype(np.float32)
    x[1] = half_ways
    x[1, 0] = 127.0
    x[2] = half_ways / 1024
    x[2, 0] = 448.0
    if dtype == "f32":
        x[3] *= np.float32(2.0**-140)
        x[4] = np.float32(2.0**-149) * (np.arange(columns) % 7)
        x[5] *= np.float32(2.0**110)
        x[6] = rng.integers(0, 2**31, columns).astype(np.uint32).view(np.float32)
        x[6] = np.where(np.isfinite(x[6]), x[6], 1.0)
    return x.astype(DTYPES[dtype])


def expected(x: np.ndarray, quant: TensorQuant) -> tuple[np.ndarray, np.ndarray]:
    """The oracle quantizes rows of a weight by the same rule as tokens."""
    weight = oracle.quantize_weight(x.astype(np.float32), replace(quant, granularity="channel", dynamic=False))
    codes = weight.tensors["codes"]
    return codes.view(np.uint8), weight.tensors["scale"].astype(np.float32)


def equal(found: tuple[torch.Tensor, torch.Tensor], codes: np.ndarray, scale: np.ndarray) -> None:
    np.testing.assert_array_equal(to_array(found[1].cpu()), scale)
    bytes_ = to_array(found[0].cpu()).view(np.uint8)
    # 0 * Inf, where a reciprocal overflows: processors differ in the sign of their NaN
    both_nan = (found[0].dtype == torch.uint8) & (bytes_ & 0x7F == 0x7F) & (codes & 0x7F == 0x7F)
    wrong = np.argwhere((bytes_ != codes) & ~both_nan)
    assert len(wrong) == 0, f"{len(wrong)} codes differ, the first at {wrong[0]}"


@each_form
@pytest.mark.parametrize("element", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "columns"), [("bf16", 96), ("f16", 33), ("f32", 1000), ("bf16", 3072)])
def test_tokens_are_the_oracles(form: Form, device: str, element: str, rule: str, dtype: str, columns: int) -> None:
    quant = TensorQuant(element, "token", dynamic=True, scale_rule=rule)
    x = inputs(9, columns, dtype)
    equal(form(to_tensor(x).to(device), quant, None, None), *expected(x, quant))


@each_form
@pytest.mark.parametrize("element", ["fp8_e4m3", "int8"])
def test_smoothed_and_strided(form: Form, device: str, element: str) -> None:
    quant = TensorQuant(element, "token", dynamic=True)
    x = inputs(8, 64, "bf16")
    pre = np.linspace(0.1, 3.0, 64, dtype=np.float32)
    wide = torch.zeros(8, 128, dtype=torch.bfloat16)
    wide[:, ::2] = to_tensor(x)
    found = form(wide.to(device)[:, ::2], quant, to_tensor(pre).to(device), None)
    assert found[0].is_contiguous()
    equal(found, *expected(x.astype(np.float32) * pre, quant))


@each_form
@pytest.mark.parametrize("element", ["fp8_e4m3", "int8"])
def test_codes_of_columns_are_rows(form: Form, device: str, element: str) -> None:
    x = inputs(8, 64, "bf16")
    columns = to_tensor(x).to(device).t().contiguous().t()
    quant = TensorQuant(element, "token", dynamic=True)
    found = form(columns, quant, None, None)
    assert found[0].is_contiguous()
    equal(found, *expected(x, quant))


@each_form
@pytest.mark.parametrize("element", ["fp8_e4m3", "int8"])
def test_a_static_scale(form: Form, device: str, element: str) -> None:
    quant = TensorQuant(element, "tensor")
    x, scale = inputs(9, 96, "bf16"), np.float32(0.013)
    codes, used = form(to_tensor(x).to(device), quant, None, torch.full((1, 1), float(scale), device=device))
    assert float(used) == float(scale)
    values = codes.cpu().view(torch.float8_e4m3fn).to(torch.float64) if element != "int8" else codes.cpu().double()
    np.testing.assert_array_equal(
        values.numpy() * np.float64(scale), oracle.quantize_activation(x, quant, input_scale=scale)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("element", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("rule", RULES)
def test_a_scale_of_the_whole_input(device: str, element: str, rule: str) -> None:
    quant = TensorQuant(element, "tensor", dynamic=True, scale_rule=rule)
    x = inputs(9, 96, "bf16")
    codes, scale = quantize_rows(to_tensor(x).to(device), quant, None, None)
    assert scale.shape == (1, 1)
    values = codes.cpu().view(torch.float8_e4m3fn).to(torch.float64) if element != "int8" else codes.cpu().double()
    np.testing.assert_array_equal(values.numpy() * float(scale), oracle.quantize_activation(x, quant))


@each_form
@pytest.mark.parametrize("element", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("columns", [1, 31, 128, 257, 1025, 2048, 8200, 16400])
def test_rows_of_every_length(form: Form, device: str, element: str, columns: int) -> None:
    quant = TensorQuant(element, "token", dynamic=True)
    x = inputs(4, columns, "bf16")
    equal(form(to_tensor(x).to(device), quant, None, None), *expected(x, quant))


@each_form
@pytest.mark.parametrize("element", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("rule", RULES)
def test_scales_of_every_size(form: Form, device: str, element: str, rule: str) -> None:
    """Codes of a row depend on its size only where f32 ends, and -0 is a code of its own throughout."""
    quant = TensorQuant(element, "token", dynamic=True, scale_rule=rule)
    x = np.ldexp(sized(128), np.arange(-146, 118, 4)[:, None]).astype(np.float32)
    equal(form(to_tensor(x).to(device), quant, None, None), *expected(x, quant))


@each_form
@pytest.mark.parametrize("element", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("exponent", [-149, -130, -100, -61, -60, -59, -10, 0, 59, 60, 61, 100, 126])
def test_static_scales_of_every_size(form: Form, device: str, element: str, exponent: int) -> None:
    """Against numbers far above and far below, and none at all."""
    quant = TensorQuant(element, "tensor")
    given = torch.full((1, 1), 1.25 * 2.0**exponent)
    x = np.ldexp(sized(128), np.clip(exponent + np.arange(-40, 41), -149, 117)[:, None]).astype(np.float32)
    x[0, :4] = [np.inf, -np.inf, np.finfo(np.float32).max, 2.0**-149]
    if element == "fp8_e4m3":
        x[0, 4] = np.nan
    wanted = quantize_rows_torch(to_tensor(x), quant, None, given)
    found = form(to_tensor(x).to(device), quant, None, given.to(device))
    equal(found, to_array(wanted[0]).view(np.uint8), to_array(wanted[1]))


def sized(columns: int) -> np.ndarray:
    """A row with magnitudes up to 448, halves of codes and zeros of both signs among them."""
    rng = np.random.default_rng(columns)
    row = rng.uniform(-448, 448, columns) * np.exp2(rng.integers(-12, 1, columns))
    row[::5] = np.round(row[::5]) + 0.5
    row[:4] = [448.0, -448.0, 0.0, -0.0]
    return row.astype(np.float32).astype(np.float64)


@each_form
@pytest.mark.parametrize("element", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_token_is_bad_alone(form: Form, device: str, element: str, bad: float) -> None:
    x = to_tensor(inputs(9, 96, "bf16")).to(device)
    x[7, 40] = bad
    codes, scale = form(x, TensorQuant(element, "token", dynamic=True), None, None)
    assert not bool(torch.isfinite(scale[7]).any())
    assert bool(torch.isfinite(scale[:7]).all())
    values = codes.view(torch.float8_e4m3fn).float() if element == "fp8_e4m3" else codes.float()
    assert bool((values[7] * scale[7]).isnan().all())
    if abs(bad) == float("inf"):
        assert bool((values[7, :40] == 0).all())


@pytest.mark.parametrize("text", ["fp8-token", "fp8-tensor", "fp8-tensor-static", "int8-token", "int8-tensor-static"])
def test_what_is_quantized_here(text: str) -> None:
    assert why_not(parse_activation_id(text)) == ""


@pytest.mark.parametrize(
    "text", ["a16", "fp8-g128", "mxfp8", "nvfp4", "int8-token-asym", "fp8e5m2-token", "int4-token"]
)  # fmt: skip
def test_what_is_not(text: str) -> None:
    assert why_not(parse_activation_id(text))


def test_rounding_of_another_kind_is_refused() -> None:
    assert (
        why_not(TensorQuant("int8", "token", dynamic=True, rounding="half-away"))
        == "activations rounded to nearest even"
    )


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_a_row_is_held_whole_and_in_few_chunks() -> None:
    from omniplat.portable.rows_triton import tile_of

    for columns in range(1, MAX_COLUMNS + 1):
        tile = tile_of(columns)
        assert tile.width & (tile.width - 1) == 0
        assert tile.width * (tile.chunks - 1) < columns <= tile.width * tile.chunks
        # four numbers of a thread are converted at once; what a thread holds is to fit its registers
        assert tile.width // (32 * tile.warps) >= 4
        assert tile.width * tile.chunks // (32 * tile.warps) <= 64
