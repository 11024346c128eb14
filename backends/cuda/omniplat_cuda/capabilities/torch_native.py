"""torch's own GEMMs, and MX weights rewritten for FP8 units: one power of two per row (`via`)."""

from __future__ import annotations

from dataclasses import replace

from omniplat.capability import Capability, multiples
from omniplat.portable.declared import TORCH, TRITON
from omniplat_cuda.capabilities.common import (
    FLOAT_RULES,
    FP8_ACCUMULATOR,
    FP8_PROMOTED,
    GLUON,
    HALF,
    MX_RULES,
    NEAREST,
    POWER_RULES,
    SM80,
    SM89,
    SM90,
    SM100,
    SM120,
)

_KERNELS = "omniplat_cuda.kernels.torch_native"
_REENCODED = "omniplat_cuda.kernels.reencoded"
_DECODED = "omniplat_cuda.kernels.decoded"
_GROUPED = "omniplat_cuda.kernels.grouped"
_SCALED_MM = multiples(16, "out", "in")
_TENSOR_SCALED = ("fp8-token", "fp8-tensor", "fp8-tensor-static")
MXFP8 = Capability(
    "scaled_mm_mxfp8",
    "linear",
    ("mxfp8",),
    ("fp8-token",),
    executes="fp8-token",
    scale_rules=("absmax",),
    roundings=NEAREST,
    archs=("sm89", "sm90"),
    dtypes=HALF,
    shapes=(*multiples(16, "out"), *multiples(32, "in")),
    requires=(TORCH, TRITON),
    accumulator=FP8_ACCUMULATOR,
    priority=40,
    via="fp8-channel",
    impl=f"{_REENCODED}:ScaledMmMxfp8",
)
MXFP4 = Capability(
    "scaled_mm_mxfp4",
    "linear",
    ("mxfp4",),
    ("mxfp4",),
    scale_rules=MX_RULES,
    roundings=NEAREST,
    archs=("sm89", "sm90"),
    dtypes=HALF,
    shapes=(*multiples(16, "out"), *multiples(32, "in")),
    requires=(TORCH, TRITON),
    accumulator=FP8_ACCUMULATOR,
    priority=40,
    via="fp8-channel",
    resident=2.0,
    impl=f"{_REENCODED}:ScaledMmMxfp4",
)
MXFP4_A8 = Capability(
    "scaled_mm_mxfp4_a8",
    "linear",
    ("mxfp4",),
    ("fp8-token",),
    executes="fp8-token",
    scale_rules=("absmax",),
    roundings=NEAREST,
    archs=("sm89", "sm90"),
    dtypes=HALF,
    shapes=(*multiples(16, "out"), *multiples(32, "in")),
    requires=(TORCH, TRITON),
    accumulator=FP8_ACCUMULATOR,
    priority=35,
    via="fp8-channel",
    resident=2.0,
    impl=f"{_REENCODED}:ScaledMmMxfp4A8",
)
#: The same products of weights that stay in 4 bits.
DECODED_MXFP4 = replace(
    MXFP4,
    name="fp8_decoded_mxfp4",
    archs=SM90,
    requires=(TORCH, GLUON),
    priority=39,
    resident=1.0,
    impl=f"{_DECODED}:DecodedMxfp4",
)
DECODED_MXFP4_A8 = replace(
    MXFP4_A8,
    name="fp8_decoded_mxfp4_a8",
    archs=SM90,
    requires=(TORCH, GLUON),
    priority=34,
    resident=1.0,
    impl=f"{_DECODED}:DecodedMxfp4A8",
)
#: 1x128 activations by 128x128 weights: torch has it for Hopper only. Where groups of a row do not come in fours, torch
#: 2.11 gives garbage; older ones were not tried.
FP8_BLOCK = Capability(
    "scaled_mm_block",
    "linear",
    ("fp8-block128x128",),
    ("fp8-g128",),
    scale_rules=(*FLOAT_RULES, *POWER_RULES),
    roundings=NEAREST,
    archs=SM90,
    dtypes=HALF,
    shapes=(*multiples(128, "out"), *multiples(512, "in")),
    requires=("torch>=2.11", TRITON),
    accumulator=FP8_PROMOTED,
    priority=40,
    impl="omniplat_cuda.kernels.fp8_block:ScaledMmBlock",
)
LINEAR = (
    Capability(
        "scaled_mm_tensor",
        "linear",
        ("fp8-tensor",),
        ("fp8-tensor", "fp8-tensor-static"),
        scale_rules=FLOAT_RULES,
        roundings=NEAREST,
        archs=SM89,
        dtypes=HALF,
        shapes=_SCALED_MM,
        requires=(TORCH,),
        accumulator=FP8_ACCUMULATOR,
        priority=45,
        impl=f"{_KERNELS}:ScaledMmTensor",
    ),
    Capability(
        "scaled_mm_row",
        "linear",
        ("fp8-tensor", "fp8-channel"),
        _TENSOR_SCALED,
        scale_rules=FLOAT_RULES,
        roundings=NEAREST,
        archs=("sm89", "sm90", *SM100, *SM120),
        dtypes=HALF,
        shapes=_SCALED_MM,
        requires=(TORCH,),
        accumulator=FP8_ACCUMULATOR,
        priority=40,
        impl=f"{_KERNELS}:ScaledMmRow",
    ),
    FP8_BLOCK,
    MXFP8,
    MXFP4,
    MXFP4_A8,
    DECODED_MXFP4,
    DECODED_MXFP4_A8,
    Capability(
        "scaled_mm_mx_native",
        "linear",
        ("mxfp8",),
        ("mxfp8",),
        archs=SM100,
        dtypes=HALF,
        shapes=(*multiples(16, "out"), *multiples(32, "in")),
        requires=(TORCH,),
        priority=35,
    ),
    Capability(
        "int_mm",
        "linear",
        ("int8-tensor", "int8-channel"),
        ("int8-token", "int8-tensor", "int8-tensor-static"),
        scale_rules=FLOAT_RULES,
        roundings=NEAREST,
        archs=SM80,
        dtypes=HALF,
        shapes=multiples(8, "out", "in"),
        requires=(TORCH,),
        accumulator="int32",
        priority=30,
        impl=f"{_KERNELS}:IntMm",
    ),
)

_GROUPED_MM = multiples(16, "out", "in", "intermediate")
GROUPED = Capability(
    "scaled_grouped_mm",
    "moe",
    ("fp8-tensor", "fp8-channel"),
    ("fp8-token",),
    scale_rules=FLOAT_RULES,
    roundings=NEAREST,
    archs=SM90,
    dtypes=("bf16",),
    shapes=_GROUPED_MM,
    requires=(TORCH, TRITON),
    accumulator=FP8_ACCUMULATOR,
    priority=30,
    bias=False,
    impl=f"{_GROUPED}:ScaledGroupedMm",
)
GROUPED_MXFP8 = Capability(
    "scaled_grouped_mm_mxfp8",
    "moe",
    ("mxfp8",),
    ("fp8-token",),
    executes="fp8-token",
    scale_rules=("absmax",),
    roundings=NEAREST,
    archs=SM90,
    dtypes=("bf16",),
    shapes=multiples(32, "out", "in", "intermediate"),
    requires=(TORCH, TRITON),
    accumulator=FP8_ACCUMULATOR,
    priority=25,
    via="fp8-channel",
    bias=False,
    impl=f"{_GROUPED}:ScaledGroupedMmMxfp8",
)
GROUPED_MXFP4 = Capability(
    "scaled_grouped_mm_mxfp4",
    "moe",
    ("mxfp4",),
    ("mxfp4",),
    scale_rules=MX_RULES,
    roundings=NEAREST,
    archs=SM90,
    dtypes=("bf16",),
    shapes=multiples(32, "out", "in", "intermediate"),
    requires=(TORCH, TRITON),
    accumulator=FP8_ACCUMULATOR,
    priority=25,
    via="fp8-channel",
    resident=2.0,
    bias=False,
    impl=f"{_GROUPED}:ScaledGroupedMmMxfp4",
)
MOE = (
    GROUPED,
    Capability(
        # One scale for all rows: experts of a checkpoint have static ones of their own.
        "scaled_grouped_mm_tensor",
        "moe",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-tensor", "fp8-tensor-static"),
        archs=SM90,
        dtypes=("bf16",),
        shapes=_GROUPED_MM,
        requires=(TORCH, TRITON),
        accumulator=FP8_ACCUMULATOR,
        priority=30,
        bias=False,
    ),
    GROUPED_MXFP8,
    GROUPED_MXFP4,
)

CAPABILITIES = (*LINEAR, *MOE)
