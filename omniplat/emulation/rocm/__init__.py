"""AMD GPUs: the functions of AITER (distribution amd-aiter) that omniplat's rocm backend calls.

AITER is a Python package: modules of the same names stand in for it, whose functions have its signatures, release by
release. Written from ROCm/aiter at e4048607 and the signatures of its tags.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version

from omniplat.emulation.core import Emulation, Vendor, VendorError
from omniplat.emulation.rocm import experts, gemm, layouts, quantizers

_GLOBAL_SCALES_FROM = Version("0.1.18")
_SWIGLU_LIMIT_FROM = Version("0.1.14")


def _module(name: str, emulation: Emulation, **functions: Callable[..., Any]) -> ModuleType:
    module = ModuleType(name)
    for key, function in functions.items():
        setattr(module, key, partial(function, emulation))
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
    has_global_scales = emulation.version >= _GLOBAL_SCALES_FROM
    module = _module(
        "aiter",
        emulation,
        gemm_a4w4=gemm.gemm_a4w4 if has_global_scales else gemm.gemm_a4w4_until_0_1_17,
        gemm_a8w8=gemm.gemm_a8w8,
        gemm_a8w8_bpreshuffle=gemm.gemm_a8w8_bpreshuffle,
        gemm_a8w8_blockscale=gemm.gemm_a8w8_blockscale,
        per_1x32_f4_quant_hip=quantizers.per_1x32_f4_quant_hip,
        get_hip_quant=_get_hip_quant,
    )
    module.QuantType, module.ActivationType = experts.QuantType, experts.ActivationType  # type: ignore[attr-defined]
    module.dtypes = _dtypes(emulation)  # type: ignore[attr-defined]
    return module


def _get_hip_quant(emulation: Emulation, qType: experts.QuantType) -> Callable[..., Any]:
    if qType != experts.QuantType.per_1x32:
        raise VendorError("aiter.get_hip_quant", f"{qType} is not emulated")
    return partial(quantizers.per_1x32_f4_quant_hip, emulation)


def _fused_moe(emulation: Emulation) -> ModuleType:
    has_limit = emulation.version >= _SWIGLU_LIMIT_FROM
    return _module("aiter.fused_moe", emulation, fused_moe=experts.fused_moe if has_limit else experts.fused_moe_0_1_13)


VENDOR = Vendor(
    kind="rocm",
    library="amd-aiter",
    version="0.1.19",
    known=("0.1.13.post1", "0.1.14", "0.1.16", "0.1.18", "0.1.19"),
    loaded_as=("aiter",),
    modules={
        "aiter": _package,
        "aiter.fused_moe": _fused_moe,
        "aiter.ops": partial(_module, "aiter.ops"),
        "aiter.ops.shuffle": partial(
            _module,
            "aiter.ops.shuffle",
            shuffle_weight=layouts.shuffle_weight,
            shuffle_scale=layouts.shuffle_scale,
        ),
        "aiter.ops.triton": partial(_module, "aiter.ops.triton"),
        "aiter.ops.triton.quant": partial(
            _module, "aiter.ops.triton.quant", dynamic_mxfp4_quant=quantizers.dynamic_mxfp4_quant
        ),
        "aiter.ops.triton.gemm_afp4wfp4": partial(
            _module, "aiter.ops.triton.gemm_afp4wfp4", gemm_afp4wfp4=gemm.gemm_afp4wfp4
        ),
        "aiter.ops.triton.gemm_a8wfp4": partial(_module, "aiter.ops.triton.gemm_a8wfp4", gemm_a8wfp4=gemm.gemm_a8wfp4),
        "aiter.utility": partial(_module, "aiter.utility"),
        "aiter.utility.dtypes": _dtypes,
        "aiter.utility.fp4_utils": partial(_module, "aiter.utility.fp4_utils", e8m0_shuffle=layouts.shuffle_scale),
    },
)
