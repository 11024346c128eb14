"""The xpu backend, as data: the ops of vllm-xpu-kernels on Xe2, and portable Triton kernels on every architecture.

Quantized experts run weight-only: the grouped GEMM ignores activation scales.
"""

from __future__ import annotations

from omniplat.backend import BackendSpec, NotSupported
from omniplat.capability import Capability, multiples

_TORCH = "torch>=2.6"
_KERNELS = "vllm-xpu-kernels>=0.1.12"

#: Battlemage, Lunar Lake and Ponte Vecchio: what the vendor's library calls Xe2.
_XE2 = ("bmg", "lnl", "pvc")
_HALF = ("bf16", "f16")
_INTEGERS = ("int[2-8]-channel", "int[2-8]-g*", "uint[2-8]-channel", "uint[2-8]-g*")
_WEIGHT_ONLY = (*_INTEGERS, "fp8-tensor", "fp8-channel", "fp8-g*", "fp8-block*", "mxfp8", "mxfp4", "nvfp4", "nf4-b*",
                "fp4bnb-b*")  # fmt: skip
#: Groups of the int4 GEMM are multiples of 32; those of the grouped GEMM end at 256.
_INT4 = ("int4-g32", "int4-g64", "int4-g128", "int4-g256")
_INT4_LONG = ("int4-g512", "int4-g1024")
_UINT4 = ("uint4-g32", "uint4-g64", "uint4-g128", "uint4-g256", "uint4-g512", "uint4-g1024")


_LINEAR = (
    Capability(
        "fp8_gemm",
        "linear",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-token", "fp8-tensor", "fp8-tensor-static"),
        archs=_XE2,
        dtypes=_HALF,
        requires=(_KERNELS,),
        priority=40,
    ),
    Capability(
        "fp8_gemm_block",
        "linear",
        ("fp8-block128x128",),
        ("fp8-g128",),
        archs=_XE2,
        dtypes=_HALF,
        shapes=multiples(128, "out", "in"),
        requires=(_KERNELS,),
        priority=40,
    ),
    Capability(
        "fp8_gemm_mx",
        "linear",
        ("mxfp8",),
        ("mxfp8",),
        archs=_XE2,
        dtypes=_HALF,
        shapes=multiples(32, "in"),
        requires=(_KERNELS,),
        priority=40,
    ),
    Capability(
        "fp8_gemm_w8a16",
        "linear",
        ("fp8-tensor", "fp8-channel", "fp8-block128x128"),
        ("a16",),
        executes="a16",
        archs=_XE2,
        dtypes=_HALF,
        requires=(_KERNELS,),
        priority=20,
    ),
    Capability(
        "fp4_gemm",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        archs=_XE2,
        dtypes=_HALF,
        shapes=multiples(32, "in"),
        requires=(_KERNELS,),
        priority=40,
    ),
    Capability(
        "int4_gemm_w4a16",
        "linear",
        (*_INT4, *_INT4_LONG, *_UINT4),
        ("a16",),
        executes="a16",
        archs=_XE2,
        dtypes=_HALF,
        shapes=(*multiples(32, "in"), *multiples(8, "out")),
        requires=(_KERNELS,),
        priority=30,
    ),
    Capability(
        # Its output is f16 whatever the input is: not declared for bf16.
        "int4_gemm_w4a8",
        "linear",
        (*_INT4, *_INT4_LONG),
        ("int8-token",),
        archs=_XE2,
        dtypes=("f16",),
        shapes=(*multiples(32, "in"), *multiples(8, "out")),
        requires=(_KERNELS,),
        accumulator="int32",
        priority=40,
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

_MOE = (
    Capability(
        "grouped_gemm",
        "moe",
        (*_INT4, "mxfp8", "mxfp4"),
        ("a16",),
        executes="a16",
        archs=_XE2,
        dtypes=_HALF,
        shapes=(*multiples(32, "in", "intermediate"), *multiples(8, "out")),
        requires=(_KERNELS,),
        priority=30,
    ),
    Capability(
        "grouped_gemm_fp8_block",
        "moe",
        ("fp8-block128x128",),
        ("a16",),
        executes="a16",
        archs=_XE2,
        dtypes=_HALF,
        shapes=multiples(128, "out", "in", "intermediate"),
        requires=(_KERNELS,),
        priority=30,
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
    name="xpu",
    api_version=1,
    kinds=("xpu",),
    capabilities=(*_LINEAR, *_MOE),
    probe="omniplat_xpu.probe:probe",
    install='pip install "omniplat[xpu]"',
    distributions=(_TORCH, _KERNELS),
    quirks=(
        "fp8_gemm takes 3-D activations for per-token ones: they are flattened first",
        "the grouped GEMM reads e8m0 byte 0 as 0 and byte 255 as infinity",
        "the grouped GEMM has one scale for an expert's whole FP8 weight: gate and up with their own are refused",
    ),
    not_supported=(
        NotSupported("mxfp4-dual*", "never", "two levels of scales exist on Ascend only"),
        NotSupported("int8-*/int8-*", "todo", "no int8 GEMM in vllm-xpu-kernels: weight-only"),
        NotSupported("int8-bnb", "todo", "no kernel splits outlier columns"),
        NotSupported("svdq-*", "todo", "no low-rank branch"),
        NotSupported("gguf-*", "todo", "no decoder for GGUF blocks"),
    ),
)
