"""AMD GPUs: the functions of AITER (distribution amd-aiter) that omniplat's rocm backend calls.

AITER is a Python package: modules of the same names stand in for it, whose functions have its signatures, release by
release. Written from ROCm/aiter at e4048607 and its tags.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from omniplat.emulation.core import Emulation, Implementation, Vendor, VendorError
from omniplat.emulation.functions import stand_in
from omniplat.emulation.rocm import experts, gemm, layouts, quantizers
from omniplat.emulation.rocm.functions import FUNCTIONS
from omniplat.emulation.schemas import of_version


def _get_hip_quant(emulation: Emulation, qType: experts.QuantType) -> Callable[..., Any]:
    if qType != experts.QuantType.per_1x32:
        raise VendorError("aiter.get_hip_quant", f"{qType} is not emulated")
    package = sys.modules["aiter"]
    found: Callable[..., Any] = getattr(package, "per_1x32_mx_quant_hip", package.per_1x32_f4_quant_hip)
    return found


_IMPLEMENTATIONS: dict[str, Implementation] = {
    "aiter::gemm_a4w4": gemm.gemm_a4w4,
    "aiter::gemm_a8w8": gemm.gemm_a8w8,
    "aiter::gemm_a8w8_bpreshuffle": gemm.gemm_a8w8_bpreshuffle,
    "aiter::gemm_a8w8_blockscale": gemm.gemm_a8w8_blockscale,
    "aiter::get_hip_quant": _get_hip_quant,
    "aiter::per_1x32_f4_quant_hip": quantizers.per_1x32_f4_quant_hip,
    "aiter::per_1x32_mx_quant_hip": quantizers.per_1x32_f4_quant_hip,
    "aiter.fused_moe::fused_moe": experts.fused_moe,
    "aiter.ops.shuffle::shuffle_weight": layouts.shuffle_weight,
    "aiter.ops.shuffle::shuffle_weight_a16w4": layouts.shuffle_weight_a16w4,
    "aiter.ops.shuffle::shuffle_scale_a16w4": layouts.shuffle_scale_a16w4,
    "aiter.ops.triton.quant::dynamic_mxfp4_quant": quantizers.dynamic_mxfp4_quant,
    "aiter.ops.triton.gemm_afp4wfp4::gemm_afp4wfp4": gemm.gemm_afp4wfp4,
    "aiter.ops.triton.gemm_a8wfp4::gemm_a8wfp4": gemm.gemm_a8wfp4,
    "aiter.utility.fp4_utils::e8m0_shuffle": layouts.e8m0_shuffle,
}


def _module(name: str, emulation: Emulation) -> ModuleType:
    """A module with the functions that the emulated release has in it."""
    module = ModuleType(name)
    for schema in of_version(FUNCTIONS, str(emulation.version)):
        if schema.namespace == name:
            setattr(module, schema.name, stand_in(schema, _IMPLEMENTATIONS[schema.qualified], emulation))
    return module


def _dtypes(emulation: Emulation) -> ModuleType:
    module = ModuleType("aiter.utility.dtypes")
    module.fp8 = quantizers.fp8_dtype(emulation.arch)  # type: ignore[attr-defined]
    module.fp4x2 = torch.float4_e2m1fn_x2  # type: ignore[attr-defined]
    module.fp8_e8m0 = torch.float8_e8m0fnu  # type: ignore[attr-defined]
    module.i8, module.bf16, module.fp16, module.fp32 = (  # type: ignore[attr-defined]
        torch.int8, torch.bfloat16, torch.float16, torch.float32,
    )  # fmt: skip
    return module


def _package(emulation: Emulation) -> ModuleType:
    module = _module("aiter", emulation)
    module.QuantType, module.ActivationType = experts.QuantType, experts.ActivationType  # type: ignore[attr-defined]
    module.dtypes = _dtypes(emulation)  # type: ignore[attr-defined]
    return module


_MODULES = (
    "aiter.fused_moe", "aiter.ops", "aiter.ops.shuffle", "aiter.ops.triton", "aiter.ops.triton.quant",
    "aiter.ops.triton.gemm_afp4wfp4", "aiter.ops.triton.gemm_a8wfp4", "aiter.utility", "aiter.utility.fp4_utils",
)  # fmt: skip

VENDOR = Vendor(
    kind="rocm",
    library="amd-aiter",
    version="0.1.19",
    known=("0.1.13.post1", "0.1.14", "0.1.15", "0.1.16", "0.1.17", "0.1.18", "0.1.19", "0.1.20.post1"),
    loaded_as=("aiter",),
    modules={
        "aiter": _package,
        "aiter.utility.dtypes": _dtypes,
        **{name: partial(_module, name) for name in _MODULES},
    },
    functions=FUNCTIONS,
)
