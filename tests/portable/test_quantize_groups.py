"""fp8 activations with a scale for every 128 columns: the oracle's byte for byte, in plain torch and in Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat import oracle
from omniplat.portable.quantize_groups import GROUP, quantize_groups, quantize_groups_torch, why_not
from omniplat.runtime.tensors import to_tensor
from omniplat.scheme import TensorQuant, parse_activation_id
from tests.support.triton import TRITON_DEVICE, needs_cuda, needs_triton

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
Form = Callable[..., tuple[torch.Tensor, torch.Tensor]]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def quant_of(rule: str) -> TensorQuant:
    quant = parse_activation_id("fp8-g128")
    assert quant is not None
    return replace(quant, scale_rule=rule, scale_format="e8m0" if rule == "ceil" else "f32")


RULES = ("absmax", "absmax-clamped", "absmax-reciprocal", "ceil")
each_rule = pytest.mark.parametrize("quant", [pytest.param(quant_of(rule), id=rule) for rule in RULES])


def in_triton(x: torch.Tensor, quant: TensorQuant, pre: torch.Tensor | None) -> object:
    from omniplat.portable.quantize_groups_triton import quantize_groups as form

    return form(x, quant, pre)


each_form = pytest.mark.parametrize(
    ("form", "device"),
    [
        pytest.param(quantize_groups_torch, "cpu", id="torch-cpu"),
        pytest.param(quantize_groups_torch, "cuda", marks=needs_cuda, id="torch-cuda"),
        pytest.param(in_triton, TRITON_DEVICE, marks=needs_triton, id="triton"),
    ],
)


def inputs(rows: int, columns: int, dtype: str) -> np.ndarray:
    """Rows over the whole range of the dtype, with ties, zeros of both signs and numbers that underflow."""
    rng = np.random.default_rng(rows * 1000 + columns)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    x *= np.exp2(rng.integers(-12, 4, (rows, columns))).astype(np.float32)
    x[0] = 0.0
    x[0, ::2] = -0.0
    # quotients half way between codes, where the scale is 1 or a power of two
    x[1] = (np.arange(columns) % 254 - 127 + 0.5).astype(np.float32)
    x[1, ::GROUP] = 448.0
    x[2] = x[1] / 1024
    x[2, ::GROUP] = -448.0
    # exactly on, and just above, the largest number of a power-of-two scale
    x[3, ::GROUP] = 448.0 * np.exp2(np.arange(len(x[3, ::GROUP])) % 4)
    x[4] = x[3]
    x[4, ::GROUP] *= 1.0078125
    if dtype == "f32":
        x[5] *= np.float32(2.0**-140)
        x[6] = np.float32(2.0**-149) * (np.arange(columns) % 7)
        x[7] *= np.float32(2.0**110)
        bits = rng.integers(0, 2**31, columns).astype(np.uint32).view(np.float32)
        x[8] = np.where(np.isfinite(bits), bits, 1.0)
    return x.astype(DTYPES[dtype])


def expected(x: np.ndarray, quant: TensorQuant) -> tuple[np.ndarray, np.ndarray]:
    """The oracle quantizes groups of a weight by the same rule as those of tokens."""
    columns = x.shape[1]
    whole = np.pad(x.astype(np.float32), ((0, 0), (0, -columns % GROUP)))
    weight = oracle.quantize_weight(whole, replace(quant, dynamic=False)).tensors
    scale = weight["scale"]
    if quant.scale_format == "e8m0":
        scale = np.ldexp(1.0, scale.astype(int) - 127)
    return weight["codes"].view(np.uint8)[:, :columns], scale.astype(np.float32).T


def equal(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[np.ndarray, np.ndarray]) -> None:
    np.testing.assert_array_equal(found[1].cpu().numpy(), wanted[1])
    # 0 * Inf, where a reciprocal overflows: processors differ in the sign of their NaN
    unsigned = [np.where(codes & 0x7F == 0x7F, 0x7F, codes) for codes in (found[0].cpu().numpy(), wanted[0])]
    np.testing.assert_array_equal(*unsigned)


@each_form
@each_rule
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(9, 256), (17, 2200), (12, 96)])
def test_codes_and_scales_are_the_oracles(
    form: Form, device: str, quant: TensorQuant, dtype: str, rows: int, columns: int
) -> None:
    x = inputs(rows, columns, dtype)
    equal(form(to_tensor(x).to(device), quant, None), expected(x, quant))


@each_form
@each_rule
def test_smoothing_comes_first(form: Form, device: str, quant: TensorQuant) -> None:
    x = inputs(9, 300, "bf16")
    pre = np.linspace(0.3, 3.0, 300, dtype=np.float32)
    found = form(to_tensor(x).to(device), quant, torch.from_numpy(pre).to(device))
    equal(found, expected(x.astype(np.float32) * pre, quant))


@each_form
@each_rule
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_spoils_its_group_alone(form: Form, device: str, quant: TensorQuant, bad: float) -> None:
    x = inputs(9, 384, "f32")
    x[5:] = 1.0
    x[5, 200] = bad
    codes, scale = form(torch.from_numpy(x).to(device), quant, None)
    assert not bool(torch.isfinite(scale[1, 5]))
    assert bool(torch.isfinite(scale[0]).all() & torch.isfinite(scale[2]).all())
    numbers = codes.view(torch.float8_e4m3fn).float() * scale.t().repeat_interleave(GROUP, 1)
    assert not bool(torch.isfinite(numbers[5, 128:256].sum()))
    assert bool((torch.cat((numbers[5, :128], numbers[5, 256:])) == 1).all())


@each_form
def test_views_of_any_strides(form: Form, device: str) -> None:
    quant = quant_of("absmax")
    x = torch.randn(7, 600, device=device).bfloat16()
    for view in (x[:, ::2], x[::2, :300], x.t()[:280]):
        found, plain = form(view, quant, None), form(view.contiguous(), quant, None)
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@needs_cuda
@each_rule
@pytest.mark.parametrize("rows", [1, 600])
def test_on_cuda_it_is_the_plain_form(quant: TensorQuant, rows: int) -> None:
    x = torch.randn(rows, 4096, device="cuda").bfloat16() * torch.exp2(torch.randint(-9, 9, (rows, 1), device="cuda"))
    for found, plain in zip(quantize_groups(x, quant, None), quantize_groups_torch(x, quant, None), strict=True):
        assert torch.equal(found, plain)


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
@each_rule
def test_the_gated_activation_is_quantized_in_the_same_pass(quant: TensorQuant, device: str) -> None:
    """Codes and scales of the activation's values: within what two ways to compute silu differ by."""
    from omniplat.portable.gated import quantize_gated

    both = torch.randn(9, 2 * 320, device=device)
    both[3] = 0
    gate, up = both.double().chunk(2, dim=1)
    codes, scale = quantize_gated(both, quant)
    plain = quantize_groups_torch((torch.nn.functional.silu(gate) * up).float(), quant, None)
    torch.testing.assert_close(scale, plain[1], rtol=1e-6, atol=0)
    assert (codes == plain[0]).float().mean() > 0.99


@pytest.mark.parametrize(
    "changed",
    [
        {"element": "int8"},
        {"granularity": "token"},
        {"group_size": 64},
        {"dynamic": False},
        {"scale_format": "bf16"},
        {"scale_format": "e8m0", "scale_rule": "floor"},
        {"scale_format": "e8m0"},
        {"scale_rule": "ceil"},
        {"rounding": "half-away"},
    ],
)
def test_what_it_cannot_quantize_is_said(changed: dict[str, object]) -> None:
    assert not why_not(quant_of("absmax"))
    assert why_not(replace(quant_of("absmax"), **changed))  # type: ignore[arg-type]
    assert why_not(None)
