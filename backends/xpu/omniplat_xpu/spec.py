"""The xpu backend, as data: the ops of vllm-xpu-kernels on Xe2, and portable Triton kernels on every architecture.

Quantized experts run weight-only: the grouped GEMM ignores activation scales. It has one scale for an expert's whole
FP8 weight, and gate and up have their own: such experts are not declared.
"""

from __future__ import annotations

from omniplat.backend import BackendSpec, NotSupported, Quirk
from omniplat.capability import ARCHIVED, Capability, ShapeRule, multiples
from omniplat.portable.declared import PORTABLE_LINEAR, PORTABLE_LOW_RANK, PORTABLE_MOE, TORCH, TRITON

#: The release whose operators were looked at; they take every argument by position and have no defaults.
_KERNELS = "vllm-xpu-kernels>=0.1.16"
_AUTO_ROUND = "auto-round-lib>=0.16"
#: Archived by its makers: what it could do is said, and nothing is written for it.
_IPEX = "intel-extension-for-pytorch>=2.5"

#: Battlemage, Lunar Lake and Ponte Vecchio: what the vendor's library calls Xe2.
_XE2 = ("bmg", "lnl", "pvc")
_HALF = ("bf16", "f16")
#: What the vendor's quantizers do with activations; the fp4 one says so too, and does not.
_NEAREST_EVEN = ("nearest-even",)
_MODULES = "omniplat_xpu.kernels"
#: The sources that kernels and emulation were written from.
_SOURCE = "https://github.com/vllm-project/vllm-xpu-kernels/blob/4543b580fecca68a7dd54ddaf6e444dc5f11a6a4"
_AUTO_ROUND_SOURCE = (
    "https://github.com/intel/auto-round/blob/03f03075439f365ffa0b99fcb694390d44c9bdae/"
    "auto_round_extension/ark/auto_round_kernel"
)
#: Groups of the int4 GEMM are multiples of 32; those of the grouped GEMM end at 256.
_INT4 = ("int4-g32", "int4-g64", "int4-g128", "int4-g256")
_INT4_LONG = ("int4-g512", "int4-g1024")
#: What the vendor's kernel that gathers rows counts in one work-group's memory.
_EXPERTS = ShapeRule("experts", maximum=1024)
_UINT4 = ("uint4-g32", "uint4-g64", "uint4-g128", "uint4-g256", "uint4-g512", "uint4-g1024")


_LINEAR = (
    Capability(
        "fp8_gemm",
        "linear",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-token",),
        scale_rules=("absmax-clamped",),
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_XE2,
        dtypes=_HALF,
        requires=(_KERNELS,),
        priority=40,
        impl=f"{_MODULES}.fp8:Fp8Gemm",
    ),
    Capability(
        "fp8_gemm_tensor",
        "linear",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-tensor", "fp8-tensor-static"),
        scale_rules=("absmax",),
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_XE2,
        dtypes=_HALF,
        requires=(_KERNELS,),
        priority=40,
        impl=f"{_MODULES}.fp8:Fp8GemmTensor",
    ),
    Capability(
        "fp8_gemm_block",
        "linear",
        ("fp8-block128x128",),
        ("fp8-g128",),
        scale_rules=("absmax-clamped",),
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_XE2,
        dtypes=_HALF,
        shapes=multiples(128, "out", "in"),
        requires=(_KERNELS,),
        priority=40,
        impl=f"{_MODULES}.fp8:Fp8GemmBlock",
    ),
    Capability(
        "fp8_gemm_mx",
        "linear",
        ("mxfp8",),
        ("mxfp8",),
        scale_rules=("ceil", "rceil"),
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_XE2,
        dtypes=_HALF,
        shapes=multiples(32, "in"),
        requires=(_KERNELS,),
        priority=40,
        impl=f"{_MODULES}.fp8:Fp8GemmMx",
    ),
    Capability(
        "fp8_gemm_w8a16",
        "linear",
        ("fp8-tensor", "fp8-channel"),
        ("a16",),
        executes="a16",
        archs=_XE2,
        dtypes=_HALF,
        requires=(_KERNELS,),
        priority=20,
        refuses=("pre_scale",),
        impl=f"{_MODULES}.fp8:Fp8WeightOnly",
    ),
    Capability(
        "fp8_gemm_w8a16_block",
        "linear",
        ("fp8-block128x128",),
        ("a16",),
        executes="a16",
        archs=_XE2,
        dtypes=_HALF,
        shapes=multiples(128, "out", "in"),
        requires=(_KERNELS,),
        priority=20,
        refuses=("pre_scale",),
        impl=f"{_MODULES}.fp8:Fp8WeightOnlyBlock",
    ),
    Capability(
        "fp4_gemm",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        scale_rules=("ceil", "rceil"),
        roundings=("half-to-zero",),
        substitutes=True,
        archs=_XE2,
        dtypes=_HALF,
        shapes=multiples(32, "in"),
        requires=(_KERNELS,),
        priority=40,
        impl=f"{_MODULES}.fp8:Fp4Gemm",
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
        refuses=("fractional zero points", "pre_scale"),
        impl=f"{_MODULES}.int4:Int4Gemm",
    ),
    Capability(
        # Its output is f16 whatever the input is: not declared for bf16. Sums are exact in int32, but scales are f16
        # too, and what they lose of a checkpoint's own is accounted for as accumulation in f16.
        "int4_gemm_w4a8",
        "linear",
        (*_INT4, *_INT4_LONG),
        ("int8-token",),
        scale_rules=("absmax",),
        roundings=_NEAREST_EVEN,
        scale_format="f16",
        substitutes=True,
        archs=_XE2,
        dtypes=("f16",),
        shapes=(*multiples(32, "in"), *multiples(8, "out")),
        requires=(_KERNELS,),
        accumulator="f16",
        priority=40,
        refuses=("group_index",),
        impl=f"{_MODULES}.int4:Int4Int8Gemm",
    ),
    Capability(
        # One row is summed up in f16: int8 codes would overflow there. There, too, the scale of a group of more than
        # 256 columns is taken from the wrong place.
        "auto_round_linear",
        "linear",
        (*_INT4, "int4-channel"),
        ("a16",),
        executes="a16",
        archs=("bmg",),
        dtypes=("f16",),
        shapes=(*multiples(32, "in"), *multiples(16, "out")),
        requires=(_AUTO_ROUND,),
        assumed=False,
        accumulator="f16",
        priority=3,
        refuses=("group_index", "pre_scale"),
        impl=f"{_MODULES}.auto_round:AutoRoundLinear",
    ),
    PORTABLE_LINEAR,
    PORTABLE_LOW_RANK,
    Capability(
        "ipex_weight_only_linear",
        "linear",
        (*_INT4, *_UINT4),
        ("a16",),
        executes="a16",
        dtypes=_HALF,
        requires=(_IPEX,),
        assumed=False,
        priority=-10,
        maturity=ARCHIVED,
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
        shapes=(*multiples(32, "in", "intermediate"), _EXPERTS),
        requires=(_KERNELS,),
        priority=30,
        impl=f"{_MODULES}.experts:GroupedGemm",
    ),
    Capability(
        "grouped_gemm_fp8_block",
        "moe",
        ("fp8-block128x128",),
        ("a16",),
        executes="a16",
        archs=_XE2,
        dtypes=_HALF,
        shapes=(*multiples(128, "in", "intermediate"), _EXPERTS),
        requires=(_KERNELS,),
        priority=30,
        impl=f"{_MODULES}.experts:GroupedGemmBlock",
    ),
    PORTABLE_MOE,
)

SPEC = BackendSpec(
    name="xpu",
    api_version=1,
    kinds=("xpu",),
    capabilities=(*_LINEAR, *_MOE),
    probe="omniplat_xpu.probe:probe",
    install='pip install "omniplat[xpu]"',
    distributions=(TORCH, TRITON, _KERNELS),
    optional=(_AUTO_ROUND, _IPEX),
    quirks=(
        Quirk(
            ("fp8_gemm_block", "fp8_gemm_mx"),
            "fp8_gemm tells how scales lie by their shapes alone: inputs are flattened to two dimensions, and a weight "
            "of one block along K gets its scales repeated per channel",
            f"{_SOURCE}/csrc/xpu/onednn/fp8_gemm_w8a8.h",
        ),
        Quirk(
            ("fp8_gemm_block", "fp8_gemm_mx"),
            "the quantizer of inputs takes the least and the largest number of the format and ignores both",
            f"{_SOURCE}/csrc/quantization/fp8/fp8_quant.cpp",
        ),
        Quirk(
            ("fp8_gemm_mx",),
            "the quantizer of inputs gives no scale below 2^-17: what a group below that scale holds loses bits",
            f"{_SOURCE}/csrc/quantization/fp8/fp8_quant.cpp",
        ),
        Quirk(
            ("fp4_gemm",),
            "the quantizer of inputs gives no scale below 2^-33",
            f"{_SOURCE}/csrc/quantization/fp4/mxfp4_quant.h",
        ),
        Quirk(
            ("fp4_gemm",),
            "the library's own test lays the weight's scales out as [N, K/32], with a tolerance that cannot see it: "
            "they are given as [K/32, N], as vLLM gives them",
            f"{_SOURCE}/tests/test_fp4_gemm_onednn.py",
        ),
        Quirk(
            ("fp4_gemm",),
            "the quantizer of inputs says nearest even, and takes values in the middle of two codes towards zero",
            f"{_SOURCE}/csrc/quantization/fp4/mxfp4_quant.h",
        ),
        Quirk(
            ("int4_gemm_w4a16",),
            "scales are read in the dtype of the input, and rounded to it",
            f"{_SOURCE}/csrc/xpu/onednn/int4_gemm_w4a16.h",
        ),
        Quirk(
            ("int4_gemm_w4a8",),
            "scales and outputs are f16, whatever the layer's dtype is",
            f"{_SOURCE}/csrc/xpu/onednn/onednn_matmul.cpp",
        ),
        Quirk(
            ("auto_round_linear",),
            "a single row is multiplied and summed up in f16, several rows with sums in f32",
            f"{_AUTO_ROUND_SOURCE}/bestla/bestla/sycl/sycl_prologue_b.h",
        ),
        Quirk(
            ("auto_round_linear",),
            "products in int8, the library's first choice, quantize their inputs: f16 is asked for",
            f"{_AUTO_ROUND_SOURCE}/wrapper/include/xpu_wrapper.hpp",
        ),
        Quirk(
            ("grouped_gemm*",),
            "the grouped product takes scales of inputs and ignores them: experts run weight-only",
            f"{_SOURCE}/csrc/xpu/grouped_gemm/xe_2/grouped_gemm_xe2_interface.hpp",
        ),
        Quirk(
            ("grouped_gemm*",),
            "weights are multiplied by their scales and rounded to the input's dtype before the product; for f16 the "
            "scale itself becomes f16 first",
            f"{_SOURCE}/csrc/xpu/grouped_gemm/xe_2/grouped_gemm_xe2_interface.hpp",
        ),
        Quirk(
            ("grouped_gemm*",),
            "the kernel that adds up an expert's outputs knows 1, 2, 4, 6, 7, 8, 10 and 16 experts for a token: slots "
            "that choose nothing are added",
            f"{_SOURCE}/csrc/moe/moe_gather.cpp",
        ),
        Quirk(
            ("grouped_gemm*",),
            "the kernel that gathers rows adds to counts of rows without clearing them: they are zeroed at every call",
            f"{_SOURCE}/csrc/moe/remap_hidden_states.cpp",
        ),
        Quirk(
            ("grouped_gemm",),
            "the grouped product reads e8m0 byte 0 as 0 and byte 255 as infinity, and cannot tell its two layouts of "
            "scales apart where K / 32 = N",
            f"{_SOURCE}/csrc/xpu/grouped_gemm/xe_2/grouped_gemm_xe2_interface.hpp",
        ),
        Quirk(
            ("grouped_gemm*",),
            "the kernel that gathers rows by expert looks an id of -1 up before the start of the map of experts: ids "
            "are mapped before",
            f"{_SOURCE}/csrc/moe/remap_hidden_states.cpp",
        ),
    ),
    not_supported=(
        NotSupported("int8-*/int8-*", "todo", "no int8 GEMM in vllm-xpu-kernels: weight-only"),
        NotSupported("int8-bnb", "todo", "no kernel splits outlier columns"),
        NotSupported("gguf-*", "todo", "no decoder for GGUF blocks"),
    ),
)
