"""The rocm backend, as data: AITER's ops on CDNA 3 and 4, and portable Triton kernels on every architecture.

FP8 on gfx942 is FNUZ: a kernel converts the stored OCP codes when it prepares them (twice the scale, no negative
zero). Ops that take no bias, or drop it without saying so (gemm_a4w4), get it added outside.
"""

from __future__ import annotations

from omniplat.backend import BackendSpec, NotSupported, Quirk
from omniplat.capability import Capability, multiples

_TORCH = "torch>=2.6"
_AITER = "amd-aiter>=0.1.8"
#: fused_moe takes `swiglu_limit` from here on.
_AITER_MOE = "amd-aiter>=0.1.14"
#: The sources that kernels and emulation were written from.
_SOURCE = "https://github.com/ROCm/aiter/blob/e4048607a535ace3a2b51ded31b1c8c2d45c0879"

_GFX942 = ("gfx942",)
_GFX950 = ("gfx950",)
_CDNA = (*_GFX942, *_GFX950)
_HALF = ("bf16", "f16")
_INTEGERS = ("int[2-8]-channel", "int[2-8]-g*", "uint[2-8]-channel", "uint[2-8]-g*")
_WEIGHT_ONLY = (*_INTEGERS, "fp8-tensor", "fp8-channel", "fp8-g*", "fp8-block*", "mxfp8", "mxfp4", "nvfp4", "nf4-b*",
                "fp4bnb-b*")  # fmt: skip

#: fused_moe quantizes activations inside: AITER before 0.1.16 by the first, since then by the others.
_FUSED_RULES = ("even", "ceil", "rceil")

_LINEAR = (
    Capability(
        "gemm_a8w8_fp8_shuffled",
        "linear",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-token", "fp8-tensor", "fp8-tensor-static"),
        archs=_CDNA,
        dtypes=_HALF,
        shapes=(*multiples(16, "out"), *multiples(32, "in")),
        requires=(_AITER,),
        priority=45,
    ),
    Capability(
        "gemm_a8w8_fp8",
        "linear",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-token", "fp8-tensor", "fp8-tensor-static"),
        archs=_CDNA,
        dtypes=_HALF,
        shapes=multiples(16, "in"),
        requires=(_AITER,),
        priority=40,
    ),
    Capability(
        "gemm_a8w8_int8",
        "linear",
        ("int8-tensor", "int8-channel"),
        ("int8-token", "int8-tensor", "int8-tensor-static"),
        archs=_CDNA,
        dtypes=_HALF,
        shapes=multiples(16, "in"),
        requires=(_AITER,),
        accumulator="int32",
        priority=40,
    ),
    Capability(
        "gemm_a8w8_blockscale",
        "linear",
        ("fp8-block128x128",),
        ("fp8-g128",),
        archs=_CDNA,
        dtypes=_HALF,
        shapes=multiples(128, "out", "in"),
        requires=(_AITER,),
        priority=40,
    ),
    Capability(
        # Below K % 256 the op returns garbage without an error; scales are padded to 256 rows by 8 groups.
        "gemm_a4w4",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        archs=_GFX950,
        dtypes=("bf16",),
        shapes=(*multiples(32, "out"), *multiples(256, "in")),
        requires=(_AITER,),
        priority=50,
        variants=("asm", "ck"),
    ),
    Capability(
        "gemm_afp4wfp4",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        archs=_GFX950,
        dtypes=_HALF,
        shapes=multiples(32, "in"),
        requires=(_AITER,),
        priority=40,
    ),
    Capability(
        "gemm_a8wfp4",
        "linear",
        ("mxfp4",),
        ("fp8-token",),
        executes="fp8-token",
        archs=_GFX950,
        dtypes=("bf16",),
        shapes=multiples(32, "in"),
        requires=(_AITER,),
        priority=30,
    ),
    Capability(
        "reencoded_mxfp8",
        "linear",
        ("mxfp8",),
        ("fp8-token",),
        executes="fp8-token",
        archs=_CDNA,
        dtypes=_HALF,
        shapes=multiples(32, "in"),
        requires=(_AITER,),
        priority=35,
        via="fp8-channel",
    ),
    Capability(
        "reencoded_mxfp4",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        archs=_GFX942,
        dtypes=_HALF,
        shapes=multiples(32, "in"),
        requires=(_AITER,),
        priority=35,
        via="fp8-channel",
        resident=2.0,
    ),
    Capability(
        "portable_linear",
        "linear",
        _WEIGHT_ONLY,
        ("a16",),
        executes="a16",
        dtypes=_HALF,
        requires=(_TORCH,),
        priority=5,
    ),
)

#: Of fused_moe's variants only some add a bias, and the others drop it without saying so: none is declared to.
_MOE = (
    Capability(
        "fused_moe_fp8",
        "moe",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-token",),
        archs=_CDNA,
        dtypes=_HALF,
        shapes=multiples(32, "in", "intermediate"),
        requires=(_AITER_MOE,),
        priority=40,
        bias=False,
    ),
    Capability(
        "fused_moe_fp8_block",
        "moe",
        ("fp8-block128x128",),
        ("fp8-g128",),
        archs=_CDNA,
        dtypes=_HALF,
        shapes=multiples(128, "in", "intermediate"),
        requires=(_AITER_MOE,),
        priority=40,
        bias=False,
    ),
    Capability(
        "fused_moe_int8",
        "moe",
        ("int8-channel",),
        ("int8-token",),
        archs=_CDNA,
        dtypes=_HALF,
        shapes=multiples(32, "in", "intermediate"),
        requires=(_AITER_MOE,),
        accumulator="int32",
        priority=40,
        bias=False,
    ),
    Capability(
        # The kernels behind it crash where a rank's intermediate size is no multiple of 256.
        "fused_moe_mxfp4",
        "moe",
        ("mxfp4",),
        ("mxfp4",),
        scale_rules=_FUSED_RULES,
        roundings=("nearest-even",),
        archs=_GFX950,
        dtypes=("bf16",),
        shapes=multiples(256, "in", "intermediate"),
        requires=(_AITER_MOE,),
        priority=50,
        bias=False,
    ),
    Capability(
        "fused_moe_mxfp8",
        "moe",
        ("mxfp8",),
        ("mxfp8",),
        scale_rules=("ceil", "rceil"),
        roundings=("nearest-even",),
        archs=_GFX950,
        dtypes=("bf16",),
        shapes=multiples(256, "in", "intermediate"),
        requires=(_AITER_MOE,),
        priority=50,
        bias=False,
    ),
    Capability(
        "reencoded_moe_mxfp8",
        "moe",
        ("mxfp8",),
        ("fp8-token",),
        executes="fp8-token",
        archs=_CDNA,
        dtypes=_HALF,
        shapes=multiples(32, "in", "intermediate"),
        requires=(_AITER_MOE,),
        priority=30,
        via="fp8-channel",
        bias=False,
    ),
    Capability(
        "portable_moe",
        "moe",
        _WEIGHT_ONLY,
        ("a16",),
        executes="a16",
        dtypes=_HALF,
        requires=(_TORCH,),
        priority=5,
    ),
)

SPEC = BackendSpec(
    name="rocm",
    api_version=1,
    kinds=("rocm",),
    capabilities=(*_LINEAR, *_MOE),
    probe="omniplat_rocm.probe:probe",
    install='pip install "omniplat[rocm]"',
    distributions=(_TORCH, _AITER),
    quirks=(
        Quirk(
            ("gemm_a4w4",),
            "gemm_a4w4 takes a bias and ignores it on gfx950: it is added outside",
            f"{_SOURCE}/aiter/ops/gemm_op_a4w4.py",
        ),
        Quirk(
            ("gemm_a4w4",),
            "the scale rule of AITER's MXFP4 quantizer became ceil in 0.1.16, and was even before",
            "https://github.com/ROCm/aiter/commit/c654495d",
        ),
    ),
    not_supported=(
        NotSupported("mxfp4-dual*", "never", "two levels of scales exist on Ascend only"),
        NotSupported("int8-bnb", "todo", "no kernel splits outlier columns"),
        NotSupported("svdq-*", "todo", "no low-rank branch"),
        NotSupported("gguf-*", "todo", "no decoder for GGUF blocks"),
    ),
)
