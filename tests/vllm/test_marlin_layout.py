"""Orders and tiles of Marlin against vLLM's own functions: what the cuda backend lays out and its emulation reads."""

from __future__ import annotations

import pytest
import torch
from omniplat_cuda.kernels import marlin_layout
from omniplat_cuda.kernels.vllm_ops import TYPE_IDS
from packaging.version import Version
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4, marlin_utils_fp8
from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights
from vllm.scalar_type import scalar_types

from omniplat.device import Device
from omniplat.emulation import Emulation
from omniplat.emulation.cuda.marlin import gptq_marlin_repack

N, K = 192, 256
HALF = (torch.bfloat16, torch.float16)
EMULATION = Emulation(Device("cuda", "sm90", emulated=True), Version("0.30.0"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_numbers_of_formats_are_vllms() -> None:
    assert {name: getattr(scalar_types, name).id for name in TYPE_IDS} == TYPE_IDS


@pytest.mark.parametrize("bits", [4, 8])
def test_tiles(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (K, N), dtype=torch.int32)
    words = torch.zeros((K * bits // 32, N), dtype=torch.int64)
    for index in range(32 // bits):
        words |= codes[index :: 32 // bits].to(torch.int64) << bits * index
    found = gptq_marlin_repack(EMULATION, words.to(torch.int32), K, N, bits, False)
    assert torch.equal(found, marlin_weights(codes, K, N, bits, get_weight_perm(bits)))


@pytest.mark.parametrize("group", [-1, 32, 128])
@pytest.mark.parametrize("dtype", HALF)
def test_scales(group: int, dtype: torch.dtype) -> None:
    scale = torch.rand(1 if group == -1 else K // group, N).to(dtype)
    wanted = marlin_utils.marlin_permute_scales(scale, K, N, group)
    assert torch.equal(marlin_layout.scales(scale), wanted)
    wanted = marlin_utils_fp8.fp8_fused_exponent_bias_into_scales(wanted)
    assert torch.equal(marlin_layout.fp8_scales(scale), wanted)


@pytest.mark.parametrize("groups", [1, 4])
def test_zero_points(groups: int) -> None:
    zero = torch.randint(0, 16, (groups, N), dtype=torch.int32)
    assert torch.equal(marlin_layout.zero_points(zero), marlin_utils.marlin_zero_points(zero, groups, N, 4))


def test_a_bias() -> None:
    bias = torch.rand(N)
    assert torch.equal(marlin_layout.in_pairs(bias), marlin_utils.marlin_permute_bias(bias))


def test_powers_of_two() -> None:
    stored = torch.randint(0, 250, (K // 32, N), dtype=torch.uint8)
    ordered = marlin_utils.marlin_permute_scales(stored.view(torch.float8_e8m0fnu).to(torch.bfloat16), K, N, 32)
    found = marlin_layout.e8m0_scales(stored)
    for wanted in (
        marlin_utils_fp4.mxfp4_marlin_process_scales(ordered),
        marlin_utils_fp8.mxfp8_marlin_process_scales(ordered),
    ):
        assert torch.equal(found, wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("largest", [448.0, 3.0])
def test_scales_of_nvfp4(dtype: torch.dtype, largest: float) -> None:
    stored = (torch.rand(K // 16, N) * largest).clamp(max=largest).to(torch.float8_e4m3fn).to(torch.float32)
    stored[0, 0] = 0.0
    found, factor = marlin_layout.e4m3_scales(stored, dtype)
    ordered = marlin_utils.marlin_permute_scales(stored.to(dtype), K, N, 16)
    wanted, wanted_factor = marlin_utils_fp4.nvfp4_marlin_process_scales(ordered, a_dtype=dtype)
    assert factor == wanted_factor
    assert torch.equal(found, wanted.view(torch.uint8))
    value = torch.tensor([0.375])
    raised = marlin_utils_fp4.nvfp4_marlin_process_global_scale(value, dtype) / wanted_factor
    assert torch.equal(marlin_layout.global_scale(value, factor, dtype), raised)
