"""bitsandbytes, FlashInfer (Blackwell), and omniplat's portable Triton kernels."""

from __future__ import annotations

from dataclasses import replace

from omniplat.capability import Capability, multiples
from omniplat.portable.declared import PORTABLE_LINEAR, PORTABLE_LOW_RANK, PORTABLE_MOE, TORCH, TRITON
from omniplat.portable.decoded import FP8_BLOCKS, FP8_ROWS, INT8_ROWS
from omniplat_cuda.capabilities.common import (
    BITSANDBYTES,
    BLACKWELL,
    FLASHINFER,
    FLOAT_RULES,
    FP8_ACCUMULATOR,
    FP8_PROMOTED,
    HALF,
    NEAREST,
    POWER_RULES,
    SM80,
    SM100,
    SM120,
)

_SM75 = ("sm75", *SM80)

BITSANDBYTES_4BIT = Capability(
    "bitsandbytes_4bit",
    "linear",
    tuple(f"{element}-b{size}" for element in ("nf4", "fp4bnb") for size in (32, 64, 128, 256, 512, 1024, 2048, 4096)),
    ("a16",),
    executes="a16",
    archs=_SM75,
    dtypes=("bf16", "f16", "f32"),
    requires=(BITSANDBYTES,),
    priority=4,
    rounds_before_bias=True,
    refuses=("pre_scale",),
    variants=("gemm_4bit", "dequantize"),
    impl="omniplat_cuda.kernels.bitsandbytes:BitsAndBytes4Bit",
)
_BITSANDBYTES = (
    BITSANDBYTES_4BIT,
    Capability(
        "bitsandbytes_int8",
        "linear",
        ("int8-bnb",),
        ("int8-bnb",),
        archs=_SM75,
        dtypes=HALF,
        requires=(BITSANDBYTES,),
        accumulator="int32",
        priority=20,
    ),
)

_FP4 = (*multiples(32, "out"), *multiples(32, "in"))
_FP4_MOE = multiples(32, "out", "in", "intermediate")
_FLASHINFER = (
    Capability(
        "flashinfer_nvfp4",
        "linear",
        ("nvfp4",),
        ("nvfp4",),
        archs=BLACKWELL,
        dtypes=HALF,
        shapes=_FP4,
        requires=(FLASHINFER,),
        priority=50,
    ),
    Capability(
        "flashinfer_mxfp4",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        archs=SM100,
        dtypes=HALF,
        shapes=_FP4,
        requires=(FLASHINFER,),
        priority=50,
    ),
    Capability(
        "flashinfer_mxfp8",
        "linear",
        ("mxfp8",),
        ("mxfp8",),
        archs=SM100,
        dtypes=HALF,
        shapes=_FP4,
        requires=(FLASHINFER,),
        priority=50,
    ),
    Capability(
        "flashinfer_fp8_block",
        "linear",
        ("fp8-block128x128",),
        ("fp8-g128",),
        archs=SM100,
        dtypes=HALF,
        shapes=multiples(128, "out", "in"),
        requires=(FLASHINFER,),
        priority=50,
    ),
    Capability(
        "flashinfer_moe_nvfp4",
        "moe",
        ("nvfp4",),
        ("nvfp4",),
        archs=(*SM100, *SM120),
        dtypes=HALF,
        shapes=_FP4_MOE,
        requires=(FLASHINFER,),
        priority=50,
    ),
    Capability(
        # FP4 weights with MXFP8 activations: above the declared ones where those are MXFP4.
        "flashinfer_moe_mxfp4_a8",
        "moe",
        ("mxfp4",),
        ("mxfp8",),
        executes="mxfp8",
        archs=SM100,
        dtypes=("bf16",),
        shapes=_FP4_MOE,
        requires=(FLASHINFER,),
        priority=50,
    ),
)

#: Blackwell has units of its own for most of these.
_PORTABLE_ARCHS = ("sm80", "sm86", "sm87", "sm89", "sm90")
_PORTABLE = tuple(
    replace(capability, archs=_PORTABLE_ARCHS) for capability in (PORTABLE_LINEAR, PORTABLE_LOW_RANK, PORTABLE_MOE)
)

_EXPERTS = "omniplat.portable.eight_bit_experts"
_FP8_ARCHS = ("sm89", "sm90", *SM100, *SM120)
#: Products of codes in 8 bits, with the inputs that are declared: before what computes in 16 bit.
_EIGHT_BITS = (
    Capability(
        "portable_fp8_block",
        "linear",
        FP8_BLOCKS,
        ("fp8-g128",),
        scale_rules=(*FLOAT_RULES, *POWER_RULES),
        roundings=NEAREST,
        archs=_FP8_ARCHS,
        dtypes=HALF,
        shapes=multiples(16, "in"),
        requires=(TORCH, TRITON),
        accumulator=FP8_PROMOTED,
        priority=30,
        impl="omniplat.portable.fp8_block:PortableFp8Block",
    ),
    Capability(
        "portable_moe_fp8_block",
        "moe",
        FP8_BLOCKS,
        ("fp8-g128",),
        scale_rules=(*FLOAT_RULES, *POWER_RULES),
        roundings=NEAREST,
        archs=_FP8_ARCHS,
        dtypes=HALF,
        shapes=multiples(16, "in", "intermediate"),
        requires=(TORCH, TRITON),
        accumulator=FP8_PROMOTED,
        priority=30,
        refuses=("pre_scale",),
        impl=f"{_EXPERTS}:PortableFp8BlockExperts",
    ),
    Capability(
        # After torch's grouped product, which is for Hopper and bf16 alone, and has no bias.
        "portable_moe_fp8",
        "moe",
        FP8_ROWS,
        ("fp8-token",),
        scale_rules=FLOAT_RULES,
        roundings=NEAREST,
        archs=_FP8_ARCHS,
        dtypes=HALF,
        shapes=multiples(16, "in", "intermediate"),
        requires=(TORCH, TRITON),
        accumulator=FP8_ACCUMULATOR,
        priority=25,
        refuses=("pre_scale",),
        impl=f"{_EXPERTS}:PortableFp8Experts",
    ),
    Capability(
        "portable_moe_int8",
        "moe",
        INT8_ROWS,
        ("int8-token",),
        scale_rules=FLOAT_RULES,
        roundings=NEAREST,
        archs=SM80,
        dtypes=HALF,
        shapes=multiples(16, "in", "intermediate"),
        requires=(TORCH, TRITON),
        accumulator="int32",
        priority=25,
        refuses=("pre_scale",),
        impl=f"{_EXPERTS}:PortableInt8Experts",
    ),
)

CAPABILITIES = (*_BITSANDBYTES, *_FLASHINFER, *_PORTABLE, *_EIGHT_BITS)
