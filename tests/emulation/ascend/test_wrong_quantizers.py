"""Calls of quantizers, and of what goes with them, that are wrong in one way each; and that every operator has some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omniplat.emulation import VendorError, emulate
from omniplat.emulation.ascend import OPERATORS
from tests.emulation.ascend.calls import CALLS
from tests.emulation.ascend.test_calls import WRONG

BF16 = torch.bfloat16
Arguments = dict[str, Any]


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=BF16)


def npu_dynamic_mx_quant() -> Arguments:
    return {"input": half(2, 128)}


def npu_dynamic_dual_level_mx_quant() -> Arguments:
    return {"input": half(2, 1024)}


def npu_dynamic_quant() -> Arguments:
    return {"input": half(2, 128)}


def npu_quantize() -> Arguments:
    return {"input": half(2, 128), "scales": torch.ones(1), "zero_points": None, "dtype": 1, "axis": -1}


def npu_trans_quant_param() -> Arguments:
    return {"scale": torch.ones(8)}


RIGHT: tuple[Callable[[], Arguments], ...] = (
    npu_dynamic_mx_quant, npu_dynamic_dual_level_mx_quant, npu_dynamic_quant, npu_quantize, npu_trans_quant_param,
)  # fmt: skip

#: operator, architecture, what is wrong, the changed arguments, part of the refusal
REFUSED: tuple[tuple[Callable[[], Arguments], str, str, Arguments, str], ...] = (
    (npu_dynamic_mx_quant, "a2", "a2", {}, "is for a5"),
    (npu_dynamic_mx_quant, "a3", "a3", {}, "is for a5"),
    (npu_dynamic_mx_quant, "a5", "int8", {"dst_type": 1}, "no MX format"),
    (npu_dynamic_mx_quant, "a5", "a number of no dtype", {"dst_type": 999}, "no dtype"),
    (npu_dynamic_mx_quant, "a5", "integers", {"input": torch.ones(2, 128, dtype=torch.int8)}, "input cannot be"),
    (npu_dynamic_mx_quant, "a5", "fp8 rounded down", {"dst_type": 292, "round_mode": "floor"}, "round_mode"),
    (npu_dynamic_mx_quant, "a5", "blocks of 48", {"block_size": 48}, "multiple of 32"),
    (npu_dynamic_mx_quant, "a5", "blocks of 2048", {"block_size": 2048}, "to 1024"),
    (npu_dynamic_mx_quant, "a5", "f32 by 64", {"input": torch.ones(2, 128), "block_size": 64}, "blocks of 32"),
    (npu_dynamic_mx_quant, "a5", "an odd axis", {"input": half(2, 127)}, "even"),
    (npu_dynamic_mx_quant, "a5", "algorithm 3", {"scale_alg": 3}, "none of 0, 1, 2"),
    (npu_dynamic_mx_quant, "a5", "algorithm 1 for fp4", {"scale_alg": 1}, "is for fp8"),
    (npu_dynamic_mx_quant, "a5", "algorithm 2 for fp8", {"dst_type": 292, "scale_alg": 2}, "for fp4"),
    (npu_dynamic_mx_quant, "a5", "algorithm 2 up to 5", {"scale_alg": 2, "dst_type_max": 5.0}, "dst_type_max"),
    (npu_dynamic_dual_level_mx_quant, "a2", "a2", {}, "is for a5"),
    (npu_dynamic_dual_level_mx_quant, "a3", "a3", {}, "is for a5"),
    (npu_dynamic_dual_level_mx_quant, "a5", "f32", {"input": torch.ones(2, 1024)}, "input cannot be"),
    (npu_dynamic_dual_level_mx_quant, "a5", "an odd axis", {"input": half(2, 1023)}, "even"),
    (npu_dynamic_dual_level_mx_quant, "a5", "ceil", {"round_mode": "ceil"}, "round_mode"),
    (npu_dynamic_dual_level_mx_quant, "a5", "smoothing in f32", {"smooth_scale": torch.ones(1024)}, "smooth_scale"),
    (npu_dynamic_dual_level_mx_quant, "a5", "smoothing of another K", {"smooth_scale": half(512)}, "smooth_scale"),
    (npu_dynamic_quant, "a2", "f32", {"input": torch.ones(2, 128)}, "input cannot be"),
    (npu_dynamic_quant, "a5", "f32", {"input": torch.ones(2, 128)}, "input cannot be"),
    (npu_dynamic_quant, "a5", "a number of no dtype", {"dst_type": 260}, "no dtype"),
    (npu_dynamic_quant, "a5", "fp4", {"dst_type": 296}, "not possible"),
    (npu_dynamic_quant, "a2", "fp8 on a2", {"dst_type": 292}, "for a5"),
    (npu_dynamic_quant, "a3", "fp8 on a3", {"dst_type": 292}, "for a5"),
    (npu_dynamic_quant, "a2", "int4 of 124", {"input": half(2, 124), "dst_type": 16}, "multiple of 8"),
    (npu_dynamic_quant, "a2", "smoothing in f32", {"smooth_scales": torch.ones(128)}, "smooth_scales"),
    (npu_dynamic_quant, "a2", "smoothing of another K", {"smooth_scales": half(64)}, "smooth_scales"),
    (npu_quantize, "a2", "codes as input", {"input": torch.ones(2, 128, dtype=torch.int8)}, "input cannot be"),
    (npu_quantize, "a2", "two scales", {"scales": torch.ones(2)}, "2 scales do not fit"),
    (npu_quantize, "a2", "scales [1, 1]", {"scales": torch.ones(1, 1)}, "2-dimensional"),
    (npu_quantize, "a2", "scales in f16", {"scales": torch.ones(1, dtype=torch.float16)}, "scales is"),
    (npu_quantize, "a2", "factors of another dtype", {"div_mode": False}, "scales is"),
    (npu_quantize, "a2", "zero points in f32", {"zero_points": torch.zeros(1)}, "zero_points is"),
    (npu_quantize, "a2", "two zero points", {"zero_points": torch.zeros(2, dtype=torch.int32)}, "another shape"),
    (npu_trans_quant_param, "a2", "bf16", {"scale": half(8)}, "scale is"),
    (npu_trans_quant_param, "a5", "int64", {"scale": torch.ones(8, dtype=torch.int64)}, "scale is"),
)  # fmt: skip

#: what is refused for want of an emulation, not by the vendor: never computed as something else
NOT_EMULATED: tuple[tuple[Callable[[], Arguments], Arguments], ...] = (
    (npu_dynamic_mx_quant, {"axis": 0}),
    (npu_dynamic_mx_quant, {"max_low_bound": 1.0}),
    (npu_dynamic_quant, {"quant_mode": "pertensor"}),
    (npu_dynamic_quant, {"dst_type_max": 7.0}),
    (npu_quantize, {"dtype": 16}),
    (npu_trans_quant_param, {"round_mode": 1}),
)


def call(make: Callable[[], Arguments], changed: Arguments) -> Any:
    return getattr(torch.ops.npu, make.__name__)(**{**make(), **changed})


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_the_right_call_is_right(make: Callable[[], Arguments]) -> None:
    with emulate("npu:a5") as emulation:
        call(make, {})
    assert not emulation.violations


@pytest.mark.parametrize(
    ("make", "arch", "changed", "problem"),
    [(make, arch, changed, problem) for make, arch, _, changed, problem in REFUSED],
    ids=[f"{make.__name__}: {what}, {arch}" for make, arch, what, _, _ in REFUSED],
)
def test_refused(make: Callable[[], Arguments], arch: str, changed: Arguments, problem: str) -> None:
    with emulate(f"npu:{arch}"), pytest.raises(VendorError, match=problem):
        call(make, changed)


@pytest.mark.parametrize(("make", "changed"), NOT_EMULATED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_not_emulated(make: Callable[[], Arguments], changed: Arguments) -> None:
    with emulate("npu:a5"), pytest.raises(NotImplementedError, match="emulated"):
        call(make, changed)


#: operator -> the test beside this file that has its wrong calls
ELSEWHERE = {
    "npu_format_cast": "test_calls.py::test_format_casts_that_fail",
    "npu_dynamic_block_quant": "test_quantizers.py::test_wrong_block_calls_fail",
    "npu_kronecker_quant": "test_quantizers.py::test_wrong_kronecker_calls_fail",
    "npu_convert_weight_to_int4pack": "test_experts.py::test_wrong_packing_fails",
    "npu_swiglu": "test_experts.py::test_swiglu_takes_the_first_half_as_gate",
    "npu_grouped_matmul_swiglu_quant_v2": "test_experts.py::test_wrong_fused_calls_fail",
    "npu_moe_init_routing_v2": "test_experts.py::test_wrong_routing_fails",
    "npu_moe_finalize_routing": "test_experts.py::test_wrong_sums_fail",
}
#: it looks at any tensor, so that no call of it is wrong
NEVER_WRONG = {"get_npu_format"}


def test_every_operator_has_wrong_calls() -> None:
    with emulate("npu:a5"):
        products = {CALLS[name]().op for name, *_ in WRONG}
    tables = {make.__name__ for make, *_ in REFUSED} | products
    assert not tables & set(ELSEWHERE)
    assert tables | set(ELSEWHERE) | NEVER_WRONG == {name.partition("::")[2] for name in OPERATORS}


@pytest.mark.parametrize(("operator", "place"), ELSEWHERE.items())
def test_wrong_calls_that_are_elsewhere_are_there(operator: str, place: str) -> None:
    file, _, name = place.partition("::")
    source = (Path(__file__).parent / file).read_text()
    body = source.partition(f"def {name}(")[2].partition("\n\n\n")[0]
    assert f"torch.ops.npu.{operator}(" in body
    assert "pytest.raises(VendorError" in body
