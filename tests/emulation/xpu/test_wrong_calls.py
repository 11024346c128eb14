"""Calls that are wrong in one way each: refused as the vendor refuses them, or recorded where it would not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omniplat.emulation import Emulation, emulate
from omniplat.emulation.xpu import VENDOR

FP8, FP4, E8M0 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
BF16, F16, F32, U8, I32 = torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int32
M, N, K = 4, 128, 256
Arguments = dict[str, Any]


@pytest.fixture
def bmg() -> Emulation:
    with emulate("xpu:bmg") as emulation:
        yield emulation


def some_bytes(*shape: int, high: int = 100) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=U8, generator=torch.Generator().manual_seed(sum(shape)))


def e8m0(*shape: int) -> torch.Tensor:
    return (some_bytes(*shape, high=4) + 120).view(E8M0)


# -- right calls, one per operator --------------------------------------------------------------------------------


def fp8_gemm() -> Arguments:
    """MXFP8, the form with the most rules."""
    return {
        "A": some_bytes(M, K).view(FP8), "B": some_bytes(N, K).view(FP8).t(), "out_dtype": BF16,
        "A_scale_": e8m0(M, K // 32), "B_scale_": e8m0(K // 32, N), "bias_": torch.ones(N),
    }  # fmt: skip


def fp8_gemm_w8a16() -> Arguments:
    scale = torch.rand(K // 128, N // 128)
    return {"A": torch.ones(M, K, dtype=BF16), "B": some_bytes(N, K).view(FP8).t(), "B_scale_": scale, "bias_": None}


def fp4_gemm() -> Arguments:
    return {
        "A": some_bytes(M, K // 2).view(FP4), "B": some_bytes(N, K // 2).view(FP4).t(),
        "A_scale": e8m0(M, K // 32), "B_scale": e8m0(K // 32, N), "out_dtype": F16, "bias_": None,
    }  # fmt: skip


def int4_gemm_w4a16() -> Arguments:
    return {
        "A": torch.ones(M, K, dtype=BF16), "B": some_bytes(N, K // 2).view(I32).t(), "bias": None,
        "B_scale": torch.ones(K // 64, N, dtype=BF16), "B_zp": torch.full((1,), 8, dtype=torch.int8),
        "group_size": 64, "g_idx": None,
    }  # fmt: skip


def int4_gemm_w4a8() -> Arguments:
    return {
        "A_": torch.ones(M, K, dtype=torch.int8), "A_scale": torch.ones(M, 1, dtype=F16),
        "A_zp": torch.zeros(M, 1, dtype=I32), "B": some_bytes(N, K // 2).view(I32).t(),
        "B_scale": torch.ones(K // 64, N, dtype=F16), "B_zp": torch.full((1,), 8, dtype=torch.int8),
        "group_size": 64, "g_idx": None, "bias": None,
    }  # fmt: skip


def cutlass_grouped_gemm_interface() -> Arguments:
    """MXFP8 for two experts."""
    return {
        "ptr_A": torch.ones(M, K, dtype=BF16), "ptr_A_scale": None, "ptr_B": some_bytes(2, K, N).view(FP8),
        "ptr_B_scale": e8m0(2, N, K // 32).view(U8), "ptr_bias": torch.ones(2, N, dtype=BF16),
        "ptr_D": torch.empty(M, N, dtype=BF16), "rows_per_expert": torch.tensor([3, 1], dtype=I32),
        "N": N, "K": K, "num_experts": 2,
    }  # fmt: skip


def remap_hidden_states() -> Arguments:
    return {
        "hidden_states": torch.ones(M, K, dtype=BF16), "hidden_states_scales": None,
        "remapped_hidden_states": torch.empty(2 * M, K, dtype=BF16), "remapped_hidden_states_scales": None,
        "expert_map": None, "rows_per_expert": torch.zeros(3, dtype=I32),
        "unpermuted_row_to_permuted_row": torch.empty(M, 2, dtype=I32),
        "topk_ids": torch.tensor([[0, 2]] * M, dtype=I32), "total_experts_num": 3, "local_experts_num": 3,
    }  # fmt: skip


def moe_gather() -> Arguments:
    return {
        "output": torch.empty(M, K, dtype=BF16), "moe_output": torch.ones(2 * M, K, dtype=BF16),
        "topk_weights": torch.ones(M, 2), "num_experts": 3,
        "unpermuted_row_to_permuted_row": torch.arange(2 * M, dtype=I32).view(M, 2),
    }  # fmt: skip


def silu_and_mul() -> Arguments:
    return {"result": torch.empty(M, K, dtype=BF16), "input": torch.ones(M, 2 * K, dtype=BF16)}


def gelu_and_mul() -> Arguments:
    return {"out": torch.empty(M, K, dtype=BF16), "input": torch.ones(M, 2 * K, dtype=BF16)}


def gelu_tanh_and_mul() -> Arguments:
    return gelu_and_mul()


def per_token_group_fp8_quant() -> Arguments:
    return {
        "input": torch.ones(M, K, dtype=BF16), "output_q": torch.empty(M, K, dtype=FP8),
        "output_s": torch.empty(M, K // 32), "group_size": 32, "eps": 1e-10, "fp8_min": -448.0, "fp8_max": 448.0,
        "scale_ue8m0": True, "dummy_is_scale_transposed": False, "dummy_is_tma_aligned": False,
    }  # fmt: skip


def per_token_group_quant_mxfp4() -> Arguments:
    return {
        "input": torch.ones(M, K, dtype=BF16), "output_q": torch.empty(M, K // 2, dtype=U8),
        "output_s": torch.empty(M, K // 32), "group_size": 32, "eps": 1e-10,
    }  # fmt: skip


def static_scaled_fp8_quant() -> Arguments:
    return {"result": torch.empty(M, K, dtype=FP8), "input": torch.ones(M, K), "scale": torch.ones(1)}


def dynamic_scaled_fp8_quant() -> Arguments:
    return {"result": torch.empty(M, K, dtype=FP8), "input": torch.ones(M, K), "scale": torch.empty(1)}


def dynamic_per_token_scaled_fp8_quant() -> Arguments:
    return {
        "result": torch.empty(M, K, dtype=FP8), "input": torch.ones(M, K), "scale": torch.empty(M, 1), "scale_ub": None
    }  # fmt: skip


OPERATORS: tuple[tuple[str, Callable[[], Arguments]], ...] = (
    ("_xpu_C", fp8_gemm), ("_xpu_C", fp8_gemm_w8a16), ("_xpu_C", fp4_gemm), ("_xpu_C", int4_gemm_w4a16),
    ("_xpu_C", int4_gemm_w4a8), ("_xpu_C", cutlass_grouped_gemm_interface), ("_moe_C", remap_hidden_states),
    ("_moe_C", moe_gather), ("_C", silu_and_mul), ("_C", gelu_and_mul), ("_C", gelu_tanh_and_mul),
    ("_C", per_token_group_fp8_quant), ("_C", per_token_group_quant_mxfp4), ("_C", static_scaled_fp8_quant),
    ("_C", dynamic_scaled_fp8_quant), ("_C", dynamic_per_token_scaled_fp8_quant),
)  # fmt: skip
LIBRARIES = {function.__name__: library for library, function in OPERATORS}


def call(make: Callable[[], Arguments], **changed: Any) -> Any:
    return getattr(getattr(torch.ops, LIBRARIES[make.__name__]), make.__name__)(**{**make(), **changed})


@pytest.mark.parametrize("make", [make for _, make in OPERATORS], ids=lambda make: make.__name__)
def test_the_right_call_is_right(bmg: Emulation, make: Callable[[], Arguments]) -> None:
    call(make)
    assert not bmg.violations


#: The gated activations, and what each calls its output.
GATED = ((silu_and_mul, "result"), (gelu_and_mul, "out"), (gelu_tanh_and_mul, "out"))
WRONG_GATED = tuple(
    (make, what, changed, problem)
    for make, output in GATED
    for what, changed, problem in (
        ("output as wide as the input", {output: torch.empty(M, 2 * K, dtype=BF16)}, "result is"),
        ("output in f32", {output: torch.empty(M, K)}, "result is written as"),
        ("integers", {"input": torch.ones(M, 2 * K, dtype=I32)}, "not implemented"),
    )
)
#: operator, what is wrong, the changed arguments, part of the refusal
REFUSED: tuple[tuple[Callable[[], Arguments], str, Arguments, str], ...] = (
    (fp8_gemm, "16-bit input", {"A": torch.ones(M, K, dtype=BF16)}, "must be f8"),
    (fp8_gemm, "bytes as a carrier", {"A": some_bytes(M, K)}, "must be f8"),
    (fp8_gemm, "two fp8 formats", {"A": some_bytes(M, K).view(torch.float8_e5m2)}, "must be f8"),
    (fp8_gemm, "f32 output", {"out_dtype": F32}, "float16 or bfloat16"),
    (fp8_gemm, "weight not transposed", {"B": some_bytes(N, K).view(FP8)}, "columns"),
    (fp8_gemm, "scales of the weight as a view", {"B_scale_": e8m0(N, K // 32).t()}, "B_scale must be contiguous"),
    (fp8_gemm, "scales of the weight not transposed", {"B_scale_": e8m0(N, K // 32)}, "Mismatch group size"),
    (fp8_gemm, "scales of the weight in one dimension", {"B_scale_": torch.ones(N)}, "no dimension 1"),
    (fp8_gemm, "scales of the input as a view", {"A_scale_": e8m0(K // 32, M).t()}, "A_scale must be contiguous"),
    (fp8_gemm, "bias as a view", {"bias_": torch.ones(2 * N)[::2]}, "bias must be contiguous"),
    (fp8_gemm, "bias of another size", {"bias_": torch.ones(N - 1)}, "bias dim"),
    (fp8_gemm, "integer bias", {"bias_": torch.ones(N, dtype=I32)}, "data type for bias"),
    (fp8_gemm, "four dimensions", {"A": some_bytes(1, 1, M, K).view(FP8)}, "2D and 3D"),
    (fp8_gemm_w8a16, "f32 input", {"A": torch.ones(M, K)}, "Unsupported data type"),
    (fp8_gemm_w8a16, "weight in int8", {"B": some_bytes(K, N).view(torch.int8)}, "weight must be f8"),
    (fp8_gemm_w8a16, "scales as a view", {"B_scale_": torch.ones(N, 2).t()}, "B_scale must be contiguous"),
    (fp4_gemm, "bytes as a carrier", {"B": some_bytes(N, K // 2).t()}, "must be f4"),
    (fp4_gemm, "f32 scales", {"A_scale": torch.ones(M, K // 32)}, "Unsupported scale type"),
    (fp4_gemm, "byte scales", {"B_scale": some_bytes(K // 32, N)}, "Mismatched scale"),
    (fp4_gemm, "scales as a view", {"B_scale": e8m0(N, K // 32).t()}, "B_scale must be contiguous"),
    (fp4_gemm, "weight row by row", {"B": some_bytes(K // 2, N).view(FP4)}, "fastest dimension"),
    (int4_gemm_w4a16, "weight row by row", {"B": some_bytes(K // 8, 4 * N).view(I32)}, "NT format"),
    (int4_gemm_w4a16, "weight in bytes", {"B": some_bytes(N, K // 8).t()}, "int32 words"),
    (int4_gemm_w4a16, "f32 input", {"A": torch.ones(M, K)}, "Unsupported data type"),
    (int4_gemm_w4a16, "scales as a view", {"B_scale": torch.ones(N, K // 64, dtype=BF16).t()}, "must be contiguous"),
    (int4_gemm_w4a16, "one zero point in int32", {"B_zp": torch.full((1,), 8, dtype=I32)}, "int8 tensor"),
    (int4_gemm_w4a16, "zero points one a byte", {"B_zp": torch.zeros(K // 64, N, dtype=I32)}, "B_zp"),
    (int4_gemm_w4a16, "groups that do not divide K", {"group_size": 96}, "does not divide"),
    (int4_gemm_w4a8, "16-bit input", {"A_": torch.ones(M, K, dtype=F16)}, "Unsupported data type"),
    (int4_gemm_w4a8, "scales [M, 1], zero point [1]", {"A_zp": torch.zeros(1, dtype=I32)}, "per-token"),
    (int4_gemm_w4a8, "zero points in int8", {"A_zp": torch.zeros(M, 1, dtype=torch.int8)}, "int32"),
    (cutlass_grouped_gemm_interface, "weight [E, N, K]", {"ptr_B": some_bytes(2, N, K).view(FP8)}, "ptr_B is"),
    (cutlass_grouped_gemm_interface, "a view", {"ptr_B": some_bytes(2, N, K).view(FP8).mT}, "ptr_B must be contig"),
    (cutlass_grouped_gemm_interface, "f32 input", {"ptr_A": torch.ones(M, K)}, "fp16,bf16"),
    (cutlass_grouped_gemm_interface, "no scales", {"ptr_B_scale": None}, "must have scales"),
    (cutlass_grouped_gemm_interface, "scales per channel", {"ptr_B_scale": torch.ones(2, N)}, "1D"),
    (cutlass_grouped_gemm_interface, "scales of one expert", {"ptr_B_scale": some_bytes(1, N, K // 32)}, "num_experts"),
    (cutlass_grouped_gemm_interface, "scales [E, N, K/64]", {"ptr_B_scale": some_bytes(2, N, K // 64)}, "K/32"),
    (cutlass_grouped_gemm_interface, "block scales [E, N/128, K/128]", {"ptr_B_scale": torch.ones(2, 1, 2)}, "K/128"),
    (cutlass_grouped_gemm_interface, "bias [N]", {"ptr_bias": torch.ones(N, dtype=BF16)}, "2D"),
    (cutlass_grouped_gemm_interface, "f32 output", {"ptr_D": torch.empty(M, N)}, "written as"),
    (
        cutlass_grouped_gemm_interface, "int4 in groups of 16",
        {"ptr_B": some_bytes(2, N, K // 2).view(torch.int8), "ptr_B_scale": torch.ones(2, N, K // 16, dtype=BF16)},
        "group_size",
    ),
    (
        cutlass_grouped_gemm_interface, "int4 unsigned in bytes",
        {"ptr_B": some_bytes(2, N, K // 2), "ptr_B_scale": torch.ones(2, N, K // 64, dtype=BF16)}, "ptr_B is",
    ),
    (remap_hidden_states, "counts in int64", {"rows_per_expert": torch.zeros(3, dtype=torch.int64)}, "int32"),
    (remap_hidden_states, "map in int64", {"expert_map": torch.zeros(3, dtype=torch.int64)}, "int32"),
    (remap_hidden_states, "three choices", {
        "topk_ids": torch.zeros(M, 3, dtype=I32), "remapped_hidden_states": torch.empty(3 * M, K, dtype=BF16)
    }, "TopK"),
    (remap_hidden_states, "too few rows", {"remapped_hidden_states": torch.empty(M, K, dtype=BF16)}, "TopK"),
    (remap_hidden_states, "K of 4", {
        "hidden_states": torch.ones(M, 4, dtype=BF16), "remapped_hidden_states": torch.empty(2 * M, 4, dtype=BF16)
    }, "ElemsPerItem"),
    (moe_gather, "weights in bf16", {"topk_weights": torch.ones(M, 2, dtype=BF16)}, "float32"),
    (moe_gather, "three choices", {"topk_weights": torch.ones(M, 3)}, "TOPK"),
    *WRONG_GATED,
    (per_token_group_fp8_quant, "a view", {"input": torch.ones(K, M, dtype=BF16).t()}, "contiguous"),
    (per_token_group_fp8_quant, "scales in three dimensions", {"output_s": torch.empty(1, M, K // 32)}, "2-D"),
    (per_token_group_fp8_quant, "scales in e8m0", {"output_s": e8m0(M, K // 32)}, "Float"),
    (per_token_group_fp8_quant, "integer codes", {"output_q": torch.empty(M, K, dtype=torch.int8)}, "not implemented"),
    (per_token_group_quant_mxfp4, "groups of 16", {"group_size": 16, "output_s": torch.empty(M, K // 16)}, "32"),
    (per_token_group_quant_mxfp4, "fp4 as a carrier", {"output_q": some_bytes(M, K // 2).view(FP4)}, "uint8"),
    (static_scaled_fp8_quant, "scale in bf16", {"scale": torch.ones(1, dtype=BF16)}, "Float"),
    (static_scaled_fp8_quant, "a view", {"input": torch.ones(K, M).t()}, "contiguous"),
    (dynamic_scaled_fp8_quant, "several scales", {"scale": torch.empty(M, 1)}, "single-element"),
    (dynamic_per_token_scaled_fp8_quant, "a view", {"input": torch.ones(K, M).t()}, "contiguous"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "changed", "problem"),
    [(make, changed, problem) for make, _, changed, problem in REFUSED],
    ids=[f"{make.__name__}: {what}" for make, what, _, _ in REFUSED],
)
def test_refused(bmg: Emulation, make: Callable[[], Arguments], changed: Arguments, problem: str) -> None:
    with pytest.raises(RuntimeError, match=problem):
        call(make, **changed)


#: operator, rule, the changed arguments
RECORDED: tuple[tuple[Callable[[], Arguments], str, Arguments], ...] = (
    # three dimensions all through: scales per group are read as one per token
    (fp8_gemm, "scales-with-three-dimensions", {"A": some_bytes(1, M, K).view(FP8), "A_scale_": e8m0(1, M, K // 32)}),
    # one block along K: its N/128 scales are read as N
    (fp8_gemm, "scale-shape", {
        "A": some_bytes(M, 128).view(FP8), "B": some_bytes(2 * N, 128).view(FP8).t(), "bias_": None,
        "A_scale_": torch.ones(M, 1), "B_scale_": torch.ones(1, 2),
    }),
    (fp8_gemm, "scale-shape", {"A_scale_": torch.ones(M + 1, 1), "B_scale_": torch.ones(N)}),
    (fp8_gemm, "strides-ignored", {"A": some_bytes(M, 2 * K).view(FP8)[:, ::2]}),
    (fp8_gemm_w8a16, "scale-shape", {"B_scale_": torch.ones(N // 64, K // 64)}),
    (fp8_gemm_w8a16, "scale-shape", {"B_scale_": torch.ones(1, N // 64)}),
    # as the library's own test passes them
    (fp4_gemm, "scale-shape", {"B_scale": e8m0(N, K // 32)}),
    (int4_gemm_w4a16, "scale-dtype", {"B_scale": torch.ones(K // 64, N)}),
    (int4_gemm_w4a16, "scale-shape", {"B_scale": torch.ones(N, K // 64, dtype=BF16)}),
    (int4_gemm_w4a8, "scale-dtype", {"B_scale": torch.ones(K // 64, N, dtype=BF16)}),
    (int4_gemm_w4a8, "scale-dtype", {"A_scale": torch.ones(M, 1)}),
    (cutlass_grouped_gemm_interface, "input-scales-ignored", {"ptr_A_scale": e8m0(M, K // 32)}),
    (cutlass_grouped_gemm_interface, "bias-dtype", {"ptr_bias": torch.ones(2, N)}),
    (cutlass_grouped_gemm_interface, "scale-out-of-range", {"ptr_B_scale": torch.zeros(2, N, K // 32, dtype=U8)}),
    (cutlass_grouped_gemm_interface, "scale-out-of-range", {
        "ptr_A": torch.ones(M, K, dtype=F16), "ptr_D": torch.empty(M, N, dtype=F16), "ptr_bias": None,
        "ptr_B_scale": torch.full((2, N, K // 32), 127 + 16, dtype=U8),
    }),
    (cutlass_grouped_gemm_interface, "scale-dtype", {
        "ptr_B": some_bytes(2, N, K // 2).view(torch.int8), "ptr_B_scale": torch.ones(2, N, K // 64),
    }),
    (remap_hidden_states, "counts-not-zeroed", {"rows_per_expert": torch.ones(3, dtype=I32)}),
    (remap_hidden_states, "map-read-before-its-start", {
        "topk_ids": torch.full((M, 2), -1, dtype=I32), "expert_map": torch.arange(3, dtype=I32)
    }),
    (remap_hidden_states, "id-out-of-range", {"topk_ids": torch.full((M, 2), 3, dtype=I32)}),
    (remap_hidden_states, "strides-ignored", {"hidden_states": torch.ones(K, M, dtype=BF16).t()}),
    (moe_gather, "strides-ignored", {"topk_weights": torch.ones(2, M).t()}),
    *((make, "strides-ignored", {"input": torch.ones(2 * K, M, dtype=BF16).t()}) for make, _ in GATED),
    (per_token_group_fp8_quant, "limits-ignored", {"fp8_max": 240.0}),
    (per_token_group_fp8_quant, "nan-becomes-largest", {"input": torch.full((M, K), torch.nan)}),
    (dynamic_per_token_scaled_fp8_quant, "scale-shape", {"scale": torch.empty(1)}),
)  # fmt: skip


@pytest.mark.parametrize(("make", "rule", "changed"), RECORDED, ids=[f"{m.__name__}: {r}" for m, r, _ in RECORDED])
def test_recorded(bmg: Emulation, make: Callable[[], Arguments], rule: str, changed: Arguments) -> None:
    call(make, **changed)
    assert rule in [violation.rule for violation in bmg.violations]


@pytest.mark.parametrize("make", [make for _, make in OPERATORS], ids=lambda make: make.__name__)
def test_arguments_are_those_of_the_schema(bmg: Emulation, make: Callable[[], Arguments]) -> None:
    """An unknown keyword, a missing argument and one of another type are refused by the dispatcher."""
    arguments = make()
    with pytest.raises(RuntimeError):
        call(make, is_B_int4=False)
    for name in arguments:
        operator = getattr(getattr(torch.ops, LIBRARIES[make.__name__]), make.__name__)
        with pytest.raises(RuntimeError):
            operator(**{key: value for key, value in arguments.items() if key != name})
        with pytest.raises(RuntimeError):
            call(make, **{name: "text"})


def test_architectures_without_the_grouped_product() -> None:
    with emulate("xpu:acm"), pytest.raises(RuntimeError, match="is for bmg, lnl, pvc"):
        call(cutlass_grouped_gemm_interface)


def test_every_operator_has_wrong_calls() -> None:
    """Functions of auto-round-lib have theirs beside this file."""
    tables = {make.__name__ for table in (REFUSED, RECORDED) for make, *_ in table}
    assert tables == {name.partition("::")[2] for name in VENDOR.operators}
    assert {make.__name__ for make, *_ in REFUSED} == tables
