"""MXFP8, MXFP4 and NVFP4, codes and scales: byte for byte the oracle's, in plain torch and in Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat import oracle
from omniplat.oracle.codecs import decode_codes, e8m0_to_float64
from omniplat.oracle.scales import nvfp4_grid
from omniplat.portable.quantize_blocks import quantize_blocks, quantize_blocks_torch, why_not
from omniplat.runtime.tensors import to_array, to_tensor
from omniplat.scheme import TensorQuant, parse_activation_id
from tests.support.triton import TRITON_DEVICE, needs_cuda, needs_triton

Form = Callable[..., tuple[torch.Tensor, torch.Tensor]]
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
POWER_RULES = ("", "floor", "even", "even-m1", "ceil", "rceil")
FLOAT_RULES = ("", "absmax", "half-range", "absmax-clamped", "absmax-reciprocal")
#: Ways to quantize that differ from each other.
KINDS = [("mxfp8", rule) for rule in ("floor", "even", "even-m1", "ceil")]
KINDS += [("mxfp4", rule) for rule in ("floor", "even", "ceil")]
KINDS += [("nvfp4", rule) for rule in ("absmax", "absmax-clamped", "absmax-reciprocal")]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def quant_of(name: str, rule: str = "") -> TensorQuant:
    quant = parse_activation_id(name)
    assert quant is not None
    return replace(quant, scale_rule=rule)


def in_triton(x: torch.Tensor, quant: TensorQuant, *scales: torch.Tensor | None) -> object:
    from omniplat.portable.quantize_blocks_triton import quantize_blocks as form

    return form(x, quant, *scales)


each_form = pytest.mark.parametrize(
    ("form", "device"),
    [
        pytest.param(quantize_blocks_torch, "cpu", id="torch-cpu"),
        pytest.param(quantize_blocks_torch, "cuda", marks=needs_cuda, id="torch-cuda"),
        pytest.param(in_triton, TRITON_DEVICE, marks=needs_triton, id="triton"),
    ],
)
each_kind = pytest.mark.parametrize(("name", "rule"), KINDS)
each_name = pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])


def inputs(columns: int, dtype: str) -> np.ndarray:
    """[12, K]: groups of very different size, ties between codes, maxima at powers of two and just beside them, zeros
    of both signs, and the ends of f32."""
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((12, columns)).astype(np.float32)
    x *= np.exp2(rng.integers(-9, 4, (12, columns // 16)).repeat(16, axis=1)).astype(np.float32)
    x[0, ::2] = 0.0
    x[0, 1::2] = -0.0
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, 0.125])
    x[1] = rng.choice(np.concatenate([ties, -ties]), columns)
    x[2, :32] = 0.0
    # between codes of e4m3, under maxima with which scales are powers of two
    x[3] = rng.integers(-480, 481, columns) + 0.5
    x[3, ::16] = 448.0
    x[4] = np.float32(2.0) ** rng.integers(-6, 7, columns)
    x[5] = x[4] * np.float32(1.75)
    x[6] = x[4] * np.float32(1.875)
    x[7] = x[4] * np.float32(1.9375)
    if dtype == "f32":
        x[8] *= np.float32(2.0**-140)
        x[9] *= np.float32(2.0**118)
        for row in (5, 6, 7):
            x[row] = np.nextafter(x[row], np.float32(0 if columns % 64 else 99))
        x[10] = np.float32(2.0**-149) * (np.arange(columns) // 16 % 7)
    return x.astype(DTYPES[dtype])


def expected(x: np.ndarray, quant: TensorQuant, largest: float | None = None) -> dict[str, np.ndarray]:
    """The oracle quantizes groups of a weight by the same rule as those of tokens; `largest` is the whole tensor's."""
    extremes = None if largest is None else (-largest, largest)
    tensors = oracle.quantize_weight(x.astype(np.float32), replace(quant, dynamic=False), extremes=extremes).tensors
    if quant.second_scale:
        # 0 times a reciprocal that overflows; beside a scale of NaN codes say nothing, and are to be 0
        is_nan = np.isnan(tensors["scale"].astype(np.float32))
        tensors["codes"].reshape(*is_nan.shape, -1)[is_nan] = 0
    return tensors


def on(device: str, array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else to_tensor(array).to(device)


def equal(found: tuple[torch.Tensor, torch.Tensor], wanted: dict[str, np.ndarray]) -> None:
    for what, tensor, role in zip(("scales", "codes"), reversed(found), ("scale", "codes"), strict=True):
        assert tensor.dtype == torch.uint8
        assert tensor.is_contiguous()
        bytes_, right = to_array(tensor.cpu()), wanted[role].view(np.uint8)
        assert bytes_.shape == right.shape
        wrong = np.argwhere(bytes_ != right)
        assert len(wrong) == 0, f"{len(wrong)} {what} differ, the first at {wrong[0]}"


def numbers(found: tuple[torch.Tensor, torch.Tensor], quant: TensorQuant, above: np.ndarray | float) -> np.ndarray:
    """What codes and scales stand for, as f64; `above` is the multiplier of NVFP4's scales."""
    codes, scales = (to_array(tensor.cpu()) for tensor in found)
    if quant.scale_format == "e8m0":
        scale = e8m0_to_float64(scales)
    else:
        multiplier = np.float32(above) if quant.scale_rule == "absmax-reciprocal" else above
        scale = (scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * multiplier).astype(np.float32)
    columns = scale.shape[1] * quant.group_size
    return decode_codes(codes, quant.element, columns) * scale.astype(np.float64).repeat(quant.group_size, 1)


@each_form
@each_kind
@pytest.mark.parametrize(("dtype", "columns"), [("bf16", 1056), ("f16", 32), ("f32", 96)])
def test_codes_and_scales_are_the_oracles(
    form: Form, device: str, name: str, rule: str, dtype: str, columns: int
) -> None:
    x, quant = inputs(columns, dtype), quant_of(name, rule)
    wanted = expected(x, quant)
    found = form(on(device, x), quant, None, on(device, wanted.get("global_scale")))
    equal(found, wanted)


@st.composite
def blocks(draw: st.DrawFn) -> np.ndarray:
    """f32 [M, K]: groups anywhere in f32, of any numbers or of those that codes and what lies half way stand for."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, groups = draw(st.integers(1, 3)), draw(st.integers(1, 11)) * 2
    low = draw(st.integers(-149, 120))
    powers = rng.integers(low, draw(st.integers(low, min(low + draw(st.sampled_from((0, 12, 280))), 120))) + 1, groups)
    marks = draw(st.sampled_from(((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0), (7.0, 1.75, 1.875, 1.9375, 448.0))))
    marked = rng.choice(np.float32([0.0, *marks, *(-mark for mark in marks)]), (rows, groups, 16))
    if draw(st.booleans()):
        marked = np.nextafter(marked, np.float32(draw(st.sampled_from((-500.0, 0.0, 500.0)))))
    values = np.where(rng.random((rows, groups, 1)) < 0.5, marked, rng.standard_normal((rows, groups, 16)))
    values[rng.random(values.shape) < 0.2] *= draw(st.sampled_from((0.0, -0.0, 2.0**-12, 2.0**-3)))
    top = float(np.finfo(np.float32).max)
    x = np.clip(np.ldexp(values, powers[:, None]), -top, top)
    if low < -100:
        x[rng.random((rows, groups)) < 0.2] *= 0.0
    return x.astype(np.float32).reshape(rows, groups * 16)


def holds_for_any_numbers(form: Form, device: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(x=blocks(), kind=st.sampled_from(KINDS), binades=st.sampled_from((None, -40, -3, -1, 0, 1, 12, 60)))
    def holds(x: np.ndarray, kind: tuple[str, str], binades: int | None) -> None:
        quant = quant_of(*kind)
        largest = None
        if kind[0] == "nvfp4" and binades is not None:
            # a global scale that is a power of two, or as far from the tensor's as values far above or below it make it
            largest = float(np.ldexp(2688.0, np.clip(np.frexp(np.abs(x).max())[1] + binades - 12, -149, 115)))
        wanted = expected(x, quant, largest)
        equal(form(on(device, x), quant, None, on(device, wanted.get("global_scale"))), wanted)

    holds()


def test_any_numbers_in_torch() -> None:
    holds_for_any_numbers(quantize_blocks_torch, "cpu", 300)


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
def test_any_numbers_in_triton(device: str) -> None:
    holds_for_any_numbers(in_triton, device, 50)


@each_form
@pytest.mark.parametrize(
    ("name", "rule", "same"),
    [
        *[("mxfp8", rule, same) for rule, same in (("", "floor"), ("rceil", "ceil"))],
        *[("mxfp4", rule, same) for rule, same in (("", "floor"), ("rceil", "ceil"), ("even-m1", "even"))],
        *[("nvfp4", rule, "absmax") for rule in ("", "half-range")],
    ],
)
def test_rules_of_one_meaning(form: Form, device: str, name: str, rule: str, same: str) -> None:
    x = inputs(64, "f32")
    wanted = expected(x, quant_of(name, same))
    quant = replace(quant_of(name, rule), rounding="nearest-even")
    equal(form(on(device, x), quant, None, on(device, wanted.get("global_scale"))), wanted)


@each_form
@each_kind
def test_activations_are_the_oracles(form: Form, device: str, name: str, rule: str) -> None:
    """Smoothed, in a view of other strides, under the multiplier of a checkpoint, f32 or the inverse of a divisor."""
    x, pre = inputs(96, "bf16"), np.linspace(0.1, 3.0, 96, dtype=np.float32)
    quant = quant_of(name, rule)
    wide = torch.zeros(12, 192, dtype=torch.bfloat16)
    wide[:, ::2] = to_tensor(x)
    multipliers = (np.float32(0.0123), 1.0 / np.float64(np.float32(217.3))) if quant.second_scale else (None,)
    for multiplier in multipliers:
        given_scale = None if multiplier is None else np.full((1, 1), multiplier)
        found = form(wide.to(device)[:, ::2], quant, on(device, pre), on(device, given_scale))
        wanted = oracle.quantize_activation(x.astype(np.float32) * pre, quant, input_global_scale=multiplier)
        np.testing.assert_array_equal(numbers(found, quant, 1.0 if multiplier is None else multiplier), wanted)


@each_form
@pytest.mark.parametrize("rule", FLOAT_RULES)
def test_every_row_may_have_its_own_multiplier(form: Form, device: str, rule: str) -> None:
    x, quant = inputs(64, "f32"), quant_of("nvfp4", rule)
    wanted = {role: array[:, 0] for role, array in expected(x[:, None], quant).items()}
    assert len(np.unique(wanted["global_scale"])) > 8
    equal(form(on(device, x), quant, None, on(device, wanted["global_scale"])), wanted)


@each_form
@pytest.mark.parametrize("rule", ["absmax", "absmax-clamped", "absmax-reciprocal"])
@pytest.mark.parametrize("power", [-149, -128, -90])
def test_multipliers_at_the_low_end_of_f32(form: Form, device: str, rule: str, power: int) -> None:
    """Scales that are subnormal or 0 and whose reciprocals are Inf, over numbers of their size and zeros."""
    x, quant = inputs(32, "f32")[3:7] * np.float32(2.0**-135), quant_of("nvfp4", rule)
    x[:, ::5], x[:, 5::10] = 0.0, -0.0
    wanted = expected(x, quant, 2688 * 2.0**power)
    assert (wanted["global_scale"] == 2.0**power).all()
    equal(form(on(device, x), quant, None, on(device, wanted["global_scale"])), wanted)


@each_form
@pytest.mark.parametrize("rule", FLOAT_RULES)
def test_scales_half_way_between_codes(form: Form, device: str, rule: str) -> None:
    """Quotients next to where e4m3 rounds up: what they are rounded to on their way there decides the scale."""
    rng = np.random.default_rng(7)
    scales = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    above = np.exp2(rng.uniform(-20, 20, (8, 1))).astype(np.float32)
    amax = ((scales[1:] + scales[:-1]) / 2 * 6 * above).astype(np.float32)
    amax = (amax.view(np.int32) + rng.integers(-2, 3, amax.shape, dtype=np.int32)).view(np.float32)
    x = np.zeros((*amax.shape, 16), dtype=np.float32)
    x[..., 3] = amax
    quant = quant_of("nvfp4", rule)
    found = form(on(device, x.reshape(8, -1)), quant, None, on(device, above))
    wanted = nvfp4_grid(amax, quant, above).stored
    np.testing.assert_array_equal(to_array(found[1].cpu()), wanted.view(np.uint8))


@each_kind
@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
def test_the_gated_activation_is_quantized_in_the_same_pass(name: str, rule: str, device: str) -> None:
    """What codes and scales stand for is the activation's, within what two ways to compute silu differ by."""
    from omniplat.portable.quantize_blocks_triton import quantize_blocks as form

    quant = quant_of(name, rule)
    both = torch.randn(3, 2 * 96, device=device)
    gate, up = both.double().chunk(2, dim=1)
    values = (torch.nn.functional.silu(gate) * up).float()
    above = torch.full((1, 1), 1 / 300, device=device) if quant.second_scale else None
    codes, scales = form(both, quant, None, above, gated=True)
    plain = quantize_blocks_torch(values, quant, None, above)
    assert (codes == plain[0]).float().mean() > 0.98
    assert (scales == plain[1]).float().mean() > 0.9


@needs_cuda
@each_kind
@pytest.mark.parametrize("rows", [1, 600])
def test_on_cuda_it_is_the_plain_form(name: str, rule: str, rows: int) -> None:
    quant = quant_of(name, rule)
    x = torch.randn(rows, 4096, device="cuda").bfloat16() * torch.exp2(torch.randint(-9, 9, (rows, 1), device="cuda"))
    above = torch.full((1, 1), 1 / 300, device="cuda") if quant.second_scale else None
    for found, plain in zip(
        quantize_blocks(x, quant, None, above), quantize_blocks_torch(x, quant, None, above), strict=True
    ):
        assert torch.equal(found, plain)


@each_form
@each_kind
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_bad_number_spoils_its_group_alone(form: Form, device: str, name: str, rule: str, bad: float) -> None:
    x, quant = inputs(96, "f32")[4:7], quant_of(name, rule)
    wanted = expected(x, quant)
    x[1, 40] = bad
    # what the group has instead
    group = 40 // quant.group_size
    wanted["scale"].view(np.uint8)[1, group] = 255 if quant.scale_format == "e8m0" else 0x7F
    wanted["codes"].view(np.uint8).reshape(3, 96 // quant.group_size, -1)[1, group] = 0
    equal(form(on(device, x), quant, None, on(device, wanted.get("global_scale"))), wanted)


@each_name
def test_what_is_quantized_here(name: str) -> None:
    for rule in FLOAT_RULES if name == "nvfp4" else POWER_RULES:
        for rounding in ("", "nearest-even"):
            assert why_not(replace(quant_of(name, rule), rounding=rounding)) == ""
            assert why_not(replace(quant_of(name, rule), rounding=rounding, dynamic=False)) == ""


@pytest.mark.parametrize(
    "text", ["a16", "fp8-token", "fp8-g128", "mxfp8e5m2", "mxfp6e2m3", "mxint8", "mxint4", "mxfp4-dual", "nvfp4-g32"]
)
def test_other_formats_are_not(text: str) -> None:
    assert why_not(parse_activation_id(text)) == "mxfp8, mxfp4 or nvfp4"


@each_name
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rounding": "half-away"}, "codes rounded to nearest even"),
        ({"scale_rule": "another"}, "scales by one of "),
        ({"group_size": 64}, "mxfp8, mxfp4 or nvfp4"),
        ({"scale_format": "f32"}, "mxfp8, mxfp4 or nvfp4"),
        ({"symmetric": False}, "mxfp8, mxfp4 or nvfp4"),
    ],
)
def test_what_it_cannot_quantize_is_said(name: str, changed: dict[str, object], reason: str) -> None:
    assert why_not(replace(quant_of(name), **changed)).startswith(reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "rule"), [("mxfp8", "absmax"), ("mxfp4", "absmax"), ("nvfp4", "floor")])
def test_rules_of_the_other_scales_are_refused(name: str, rule: str) -> None:
    assert why_not(quant_of(name, rule)).startswith("scales by one of ")
