"""MX activations on FP8 units: codes and scales byte for byte those of the oracle, in plain torch and in Triton."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat import oracle
from omniplat.oracle.reencode import regroup_activation
from omniplat.portable.mx_grid import regroup_rows_torch, why_not
from omniplat.runtime.tensors import to_array, to_tensor
from omniplat.scheme import TensorQuant, parse_activation_id
from tests.support.triton import TRITON_DEVICE, needs_cuda, needs_triton

Form = Callable[[torch.Tensor, TensorQuant, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
RULES = ("", "floor", "even", "even-m1", "ceil", "rceil")
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def in_triton(x: torch.Tensor, quant: TensorQuant, pre: torch.Tensor | None) -> object:
    from omniplat.portable.mx_grid_triton import regroup_rows as form

    return form(x, quant, pre)


each_form = pytest.mark.parametrize(
    ("form", "device"),
    [
        pytest.param(regroup_rows_torch, "cpu", id="torch-cpu"),
        pytest.param(regroup_rows_torch, "cuda", marks=needs_cuda, id="torch-cuda"),
        pytest.param(in_triton, TRITON_DEVICE, marks=needs_triton, id="triton"),
    ],
)


def mxfp4(rule: str = "") -> TensorQuant:
    return TensorQuant("fp4_e2m1", "group", 32, scale_format="e8m0", dynamic=True, scale_rule=rule)


def inputs(rows: int, columns: int, dtype: str) -> np.ndarray:
    """Groups of very different size, ties between codes, maxima at powers of two and just beside them, zeros."""
    rng = np.random.default_rng(rows * 1000 + columns)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    x *= np.exp2(rng.integers(-9, 4, (rows, columns // 32)).repeat(32, axis=1)).astype(np.float32)
    x[0] = 0.0
    x[0, ::2] = -0.0
    x[1] = rng.choice(np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, 0.125]), columns)
    x[2, :32] = 0.0
    x[2, 32:] *= 2.0**-6
    x[3] = np.float32(2.0) ** rng.integers(-6, 7, columns)
    x[4] = x[3] * np.float32(1.75)
    if dtype == "f32":
        x[5] *= np.float32(2.0**-140)
        x[6] *= np.float32(2.0**118)
        x[7] = np.nextafter(x[4], np.float32(0))
        x[8] = np.float32(2.0**-149) * (np.arange(columns) % 7)
    return x.astype(DTYPES[dtype])


def equal(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[np.ndarray, np.ndarray]) -> None:
    np.testing.assert_array_equal(to_array(found[1].cpu()), wanted[1])
    bytes_, codes = to_array(found[0].cpu()), wanted[0].view(np.uint8)
    wrong = np.argwhere(bytes_ != codes)
    assert len(wrong) == 0, f"{len(wrong)} codes differ, the first at {wrong[0]}"


@each_form
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "columns"), [("bf16", 96), ("f16", 320), ("f32", 1024), ("bf16", 3072)])
def test_tokens_are_the_oracles(form: Form, device: str, rule: str, dtype: str, columns: int) -> None:
    x = inputs(10, columns, dtype)
    equal(form(to_tensor(x).to(device), mxfp4(rule), None), regroup_activation(x.astype(np.float32), mxfp4(rule)))


@each_form
def test_smoothed_and_strided(form: Form, device: str) -> None:
    x, pre = inputs(9, 64, "bf16"), np.linspace(0.1, 3.0, 64, dtype=np.float32)
    wide = torch.zeros(9, 128, dtype=torch.bfloat16)
    wide[:, ::2] = to_tensor(x)
    found = form(wide.to(device)[:, ::2], mxfp4(), to_tensor(pre).to(device))
    assert found[0].is_contiguous()
    equal(found, regroup_activation(x.astype(np.float32) * pre, mxfp4()))


@each_form
@pytest.mark.parametrize("columns", [32, 160, 1056, 2048, 8224])
def test_rows_of_every_length(form: Form, device: str, columns: int) -> None:
    x = inputs(6, columns, "bf16")
    equal(form(to_tensor(x).to(device), mxfp4(), None), regroup_activation(x.astype(np.float32), mxfp4()))


@each_form
@pytest.mark.parametrize("rule", RULES)
def test_groups_of_every_size(form: Form, device: str, rule: str) -> None:
    """Tokens and their groups over all of f32: what is far below a token's largest group is 0, with its sign."""
    rng = np.random.default_rng(1)
    tops = np.arange(-149, 125, 5)[:, None]
    depths = np.where(rng.random((len(tops), 16)) < 0.5, rng.integers(0, 22, (len(tops), 16)), rng.integers(0, 250))
    depths[:, 0] = 0
    # all magnitudes of e2m1, half ways and their neighbours, and zeros of both signs
    grid = np.float32([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
    grid = np.concatenate([grid, np.nextafter(grid, np.float32(0)), np.nextafter(grid, np.float32(8))])
    values = rng.choice(np.concatenate([grid, -grid]), (len(tops), 16, 32)).astype(np.float64)
    x = np.ldexp(values, (tops - depths)[:, :, None]).astype(np.float32).reshape(len(tops), 512)
    # up to 2^-129, a quarter of the least scale, tokens are 0
    x[:6] = np.uint32([[1], [0xFFFFF], [0x100000], [0x100001], [0x180000], [0x200001]]).view(np.float32)
    x[:6, ::3] *= -1
    equal(form(to_tensor(x).to(device), mxfp4(rule), None), regroup_activation(x, mxfp4(rule)))


@each_form
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_token_is_bad_alone(form: Form, device: str, bad: float) -> None:
    x = to_tensor(inputs(9, 96, "bf16")).to(device)
    x[7, 40] = bad
    _, scale = form(x, mxfp4(), None)
    assert bool(scale[7].isnan())
    assert bool(torch.isfinite(scale[:7]).all())


@pytest.mark.parametrize("span", [0, 7, 14])
def test_nothing_is_lost_within_14_binades(span: int) -> None:
    rng = np.random.default_rng(span)
    x = rng.standard_normal((64, 256)).astype(np.float32)
    x[:, 64:] *= np.float32(2.0**-span)
    grid = oracle.quantize_activation(x, mxfp4())
    # the span of group exponents, not of the factors: a token whose groups happen to differ by more is left out
    tops = np.frexp(np.abs(x).reshape(64, 8, 32).max(axis=2))[1]
    kept = tops.max(axis=1) - tops.min(axis=1) <= 14
    assert kept.sum() > 10
    codes, scale = regroup_activation(x, mxfp4())
    np.testing.assert_array_equal((codes.astype(np.float64) * scale)[kept], grid[kept])


@pytest.mark.parametrize("factor", [10.0, 100.0, 5000.0])
def test_what_an_outlier_costs_is_bounded(factor: float) -> None:
    """A channel far above the others: no value of the MX grid moves by more than 2^-16 of the largest group's scale."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 1024)).astype(np.float32)
    x[:, 3] *= np.float32(factor)
    grid = oracle.quantize_activation(x, mxfp4())
    codes, scale = regroup_activation(x, mxfp4())
    assert (np.abs(codes.astype(np.float64) * scale - grid) <= scale * 2.0**-10).all()


def test_what_is_regrouped_here() -> None:
    assert why_not(parse_activation_id("mxfp4"), 96) == ""


@pytest.mark.parametrize("text", ["a16", "fp8-token", "mxfp8", "nvfp4", "mxfp4-dual", "int8-token"])
def test_what_is_not(text: str) -> None:
    assert why_not(parse_activation_id(text), 96)


def test_a_partial_group_and_another_rounding_are_refused() -> None:
    assert why_not(mxfp4(), 100) == "columns in multiples of 32"
    assert why_not(TensorQuant("fp4_e2m1", "group", 32, scale_format="e8m0", rounding="half-away"), 96)
