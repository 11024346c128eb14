"""The rocm backend, as data: AITER's ops on CDNA 3 and 4, and portable Triton kernels on every architecture.

FP8 on gfx942 is FNUZ: a kernel converts the stored OCP codes when it prepares them (twice the scale, no negative
zero). Ops that take no bias, or drop it without saying so (gemm_a4w4), get it added outside.
gemm_a16wfp4, in spite of its name, quantizes its inputs to MXFP4: it is not used for weight-only layers.
"""

from __future__ import annotations

from dataclasses import replace

from omniplat.backend import BackendSpec, NotSupported, Quirk
from omniplat.capability import Capability, ShapeRule, multiples
from omniplat.portable.decoded import DECODED_EXPERTS, DECODED_RESIDENT, DECODED_WEIGHTS

_TORCH = "torch>=2.6"
_TRITON = "triton>=3.2"
_AITER = "amd-aiter>=0.1.13"
#: fused_moe takes `swiglu_limit` from here on.
_AITER_MOE = "amd-aiter>=0.1.14"
#: Here the rule by which the MXFP4 quantizer derives scales changed.
_AITER_CEIL = "amd-aiter>=0.1.16"
_AITER_EVEN = "amd-aiter>=0.1.13,<0.1.16"
#: fused_moe takes MXFP8 from here on, by kernels of FlyDSL, which that release asks for.
_AITER_MXFP8 = "amd-aiter>=0.1.17"
_FLYDSL = "flydsl>=0.2.2"
_AITER_MOE_EVEN = "amd-aiter>=0.1.14,<0.1.16"
#: The sources that kernels and emulation were written from.
_SOURCE = "https://github.com/ROCm/aiter/blob/e4048607a535ace3a2b51ded31b1c8c2d45c0879"

_GFX942 = ("gfx942",)
_GFX950 = ("gfx950",)
_CDNA = (*_GFX942, *_GFX950)
_HALF = ("bf16", "f16")
_MODULES = "omniplat_rocm.kernels"
#: AITER's quantizers derive scales by rules of their own, which a plan notes. For e2m1 both names of "even" are one.
_CEIL = ("ceil", "rceil")
_EVEN = ("even", "even-m1")
_NEAREST_EVEN = ("nearest-even",)
#: Tiles of weights, and of scales.
_A4W4 = (*multiples(32, "out"), *multiples(256, "in"))


_A8W8 = multiples(16, "out", "in")
_LINEAR = (
    Capability(
        "gemm_a8w8_fp8_shuffled",
        "linear",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-token", "fp8-tensor", "fp8-tensor-static"),
        roundings=_NEAREST_EVEN,
        archs=_CDNA,
        dtypes=_HALF,
        shapes=(*multiples(16, "out"), ShapeRule("in", multiple_of=64, minimum=192)),
        requires=(_AITER,),
        priority=45,
        rounds_before_bias=True,
        impl=f"{_MODULES}.eight_bits:GemmA8W8Shuffled",
    ),
    Capability(
        "gemm_a8w8_fp8",
        "linear",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-token", "fp8-tensor", "fp8-tensor-static"),
        roundings=_NEAREST_EVEN,
        archs=_CDNA,
        dtypes=_HALF,
        shapes=_A8W8,
        requires=(_AITER,),
        priority=40,
        impl=f"{_MODULES}.eight_bits:GemmA8W8",
    ),
    Capability(
        "gemm_a8w8_int8",
        "linear",
        ("int8-tensor", "int8-channel"),
        ("int8-token", "int8-tensor", "int8-tensor-static"),
        roundings=_NEAREST_EVEN,
        archs=_CDNA,
        dtypes=_HALF,
        shapes=_A8W8,
        requires=(_AITER,),
        accumulator="int32",
        priority=40,
        impl=f"{_MODULES}.eight_bits:GemmA8W8Int8",
    ),
    Capability(
        "gemm_a8w8_blockscale",
        "linear",
        ("fp8-block128x128",),
        ("fp8-g128",),
        roundings=_NEAREST_EVEN,
        archs=_CDNA,
        dtypes=_HALF,
        shapes=multiples(128, "out", "in"),
        requires=(_AITER,),
        priority=40,
        rounds_before_bias=True,
        impl=f"{_MODULES}.eight_bits:GemmA8W8Blockscale",
    ),
    Capability(
        # Below K % 256 the op reads scales that nobody has written; they are padded to 256 rows by 8 groups.
        "gemm_a4w4",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        scale_rules=_CEIL,
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_GFX950,
        dtypes=("bf16",),
        shapes=_A4W4,
        requires=(_AITER_CEIL,),
        priority=50,
        rounds_before_bias=True,
        variants=("asm", "ck"),
        impl=f"{_MODULES}.four_bits:GemmA4W4",
    ),
    Capability(
        "gemm_a4w4_even",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        scale_rules=_EVEN,
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_GFX950,
        dtypes=("bf16",),
        shapes=_A4W4,
        requires=(_AITER_EVEN,),
        priority=49,
        rounds_before_bias=True,
        variants=("asm", "ck"),
        impl=f"{_MODULES}.four_bits:GemmA4W4Even",
    ),
    Capability(
        # Triton's quantizer has one rule in all releases.
        "gemm_afp4wfp4",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        scale_rules=_EVEN,
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_GFX950,
        dtypes=_HALF,
        shapes=multiples(32, "in"),
        requires=(_AITER,),
        priority=40,
        rounds_before_bias=True,
        impl=f"{_MODULES}.four_bits:GemmAfp4Wfp4",
    ),
    Capability(
        "gemm_a8wfp4",
        "linear",
        ("mxfp4",),
        ("fp8-token",),
        executes="fp8-token",
        scale_rules=("absmax",),
        roundings=_NEAREST_EVEN,
        archs=_GFX950,
        dtypes=("bf16",),
        shapes=multiples(32, "in"),
        requires=(_AITER,),
        priority=30,
        rounds_before_bias=True,
        impl=f"{_MODULES}.four_bits:GemmA8Wfp4",
    ),
    Capability(
        "reencoded_mxfp8",
        "linear",
        ("mxfp8",),
        ("fp8-token",),
        executes="fp8-token",
        roundings=_NEAREST_EVEN,
        archs=_CDNA,
        dtypes=_HALF,
        shapes=(*multiples(16, "out"), *multiples(32, "in")),
        requires=(_AITER,),
        priority=35,
        via="fp8-channel",
        impl=f"{_MODULES}.eight_bits:ReencodedMxfp8",
    ),
    Capability(
        "reencoded_mxfp4",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        roundings=_NEAREST_EVEN,
        archs=_GFX942,
        dtypes=_HALF,
        shapes=(*multiples(16, "out"), *multiples(32, "in")),
        requires=(_AITER,),
        priority=35,
        via="fp8-channel",
        resident=2.0,
        impl=f"{_MODULES}.eight_bits:ReencodedMxfp4",
    ),
    Capability(
        "portable_linear",
        "linear",
        DECODED_WEIGHTS,
        ("a16",),
        executes="a16",
        dtypes=_HALF,
        requires=(_TORCH, _TRITON),
        priority=5,
        resident_by_weight=DECODED_RESIDENT,
        impl="omniplat.portable.weight_only:PortableLinear",
    ),
)

_MOE_EXPERTS = (
    Capability(
        "fused_moe_fp8",
        "moe",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-token",),
        scale_rules=("absmax",),
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_GFX950,
        dtypes=_HALF,
        shapes=multiples(32, "in", "intermediate"),
        requires=(_AITER_MOE,),
        priority=40,
        bias=False,
        moe_activations=("silu",),
        impl=f"{_MODULES}.experts:FusedMoe",
    ),
    Capability(
        "fused_moe_fp8_block",
        "moe",
        ("fp8-block128x128",),
        ("fp8-g128",),
        scale_rules=("absmax",),
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_GFX950,
        dtypes=_HALF,
        shapes=multiples(128, "in", "intermediate"),
        requires=(_AITER_MOE,),
        priority=40,
        bias=False,
        moe_activations=("silu",),
        impl=f"{_MODULES}.experts:FusedMoeBlock",
    ),
    Capability(
        "fused_moe_int8",
        "moe",
        ("int8-channel",),
        ("int8-token",),
        scale_rules=("absmax",),
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_CDNA,
        dtypes=_HALF,
        shapes=multiples(32, "in", "intermediate"),
        requires=(_AITER_MOE,),
        accumulator="int32",
        priority=40,
        bias=False,
        moe_activations=("silu",),
        impl=f"{_MODULES}.experts:FusedMoeInt8",
    ),
    Capability(
        # The kernels behind it crash where a rank's intermediate size is no multiple of 256.
        "fused_moe_mxfp4",
        "moe",
        ("mxfp4",),
        ("mxfp4",),
        scale_rules=_CEIL,
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_GFX950,
        dtypes=("bf16",),
        shapes=multiples(256, "in", "intermediate"),
        requires=(_AITER_CEIL,),
        priority=50,
        bias=False,
        moe_activations=("silu",),
        impl=f"{_MODULES}.experts:FusedMoeMxfp4",
    ),
    Capability(
        "fused_moe_mxfp4_even",
        "moe",
        ("mxfp4",),
        ("mxfp4",),
        scale_rules=_EVEN,
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_GFX950,
        dtypes=("bf16",),
        shapes=multiples(256, "in", "intermediate"),
        requires=(_AITER_MOE_EVEN,),
        priority=49,
        bias=False,
        moe_activations=("silu",),
        impl=f"{_MODULES}.experts:FusedMoeMxfp4Even",
    ),
    Capability(
        # By FlyDSL's kernels alone: without them the call goes on to kernels that have no such product.
        "fused_moe_mxfp8",
        "moe",
        ("mxfp8",),
        ("mxfp8",),
        scale_rules=_CEIL,
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_GFX950,
        dtypes=("bf16",),
        shapes=multiples(256, "in", "intermediate"),
        requires=(_AITER_MXFP8, _FLYDSL),
        priority=50,
        bias=False,
        moe_activations=("silu",),
        impl=f"{_MODULES}.experts:FusedMoeMxfp8",
    ),
    Capability(
        "reencoded_moe_mxfp8",
        "moe",
        ("mxfp8",),
        ("fp8-token",),
        executes="fp8-token",
        scale_rules=("absmax",),
        roundings=_NEAREST_EVEN,
        substitutes=True,
        archs=_GFX950,
        dtypes=_HALF,
        shapes=multiples(32, "in", "intermediate"),
        requires=(_AITER_MOE,),
        priority=30,
        via="fp8-channel",
        bias=False,
        moe_activations=("silu",),
        impl=f"{_MODULES}.experts:ReencodedMoeMxfp8",
    ),
    Capability(
        "reencoded_moe_mxfp4",
        "moe",
        ("mxfp4",),
        ("fp8-token",),
        executes="fp8-token",
        scale_rules=("absmax",),
        roundings=_NEAREST_EVEN,
        input_element="fp8_e4m3fnuz",
        substitutes=True,
        archs=_GFX942,
        dtypes=_HALF,
        shapes=multiples(32, "in", "intermediate"),
        requires=(_AITER_MOE,),
        priority=30,
        via="fp8-channel",
        resident=2.0,
        bias=False,
        moe_activations=("silu",),
        impl=f"{_MODULES}.experts:ReencodedMoeMxfp4",
    ),
    Capability(
        "portable_moe",
        "moe",
        DECODED_EXPERTS,
        ("a16",),
        executes="a16",
        dtypes=_HALF,
        requires=(_TORCH, _TRITON),
        priority=5,
        resident_by_weight=DECODED_RESIDENT,
        impl="omniplat.portable.weight_only_experts:PortableExperts",
    ),
)


def _fnuz(capability: Capability) -> Capability:
    """The same experts on gfx942, where AITER quantizes inputs to its own fp8, whose largest number is 240."""
    return replace(
        capability,
        name=f"{capability.name}_fnuz",
        archs=_GFX942,
        input_element="fp8_e4m3fnuz",
        impl=f"{capability.impl}Fnuz",
    )


_FNUZ_EXPERTS = ("fused_moe_fp8", "fused_moe_fp8_block", "reencoded_moe_mxfp8")
_MOE = (*_MOE_EXPERTS, *(_fnuz(item) for item in _MOE_EXPERTS if item.name in _FNUZ_EXPERTS))

SPEC = BackendSpec(
    name="rocm",
    api_version=1,
    kinds=("rocm",),
    capabilities=(*_LINEAR, *_MOE),
    probe="omniplat_rocm.probe:probe",
    install='pip install "omniplat[rocm]"',
    distributions=(_TORCH, _TRITON, _AITER, _FLYDSL),
    quirks=(
        Quirk(
            ("gemm_a4w4*",),
            "gemm_a4w4 takes a bias and ignores it on gfx950: it is added outside",
            f"{_SOURCE}/aiter/ops/gemm_op_a4w4.py",
        ),
        Quirk(
            ("gemm_a4w4*", "fused_moe_mxfp4*"),
            "the rule by which the MXFP4 quantizer derives scales became ceil in 0.1.16, and was even before",
            "https://github.com/ROCm/aiter/commit/c654495d",
        ),
        Quirk(
            ("gemm_a4w4*",),
            "scales are read in eights, and the quantizer and e8m0_shuffle leave their padding unwritten: only layers "
            "of whole tiles are given to it",
            f"{_SOURCE}/aiter/ops/shuffle.py",
        ),
        Quirk(
            ("gemm_a8w8_fp8*", "gemm_a8w8_blockscale", "reencoded_*", "fused_moe_fp8*"),
            "fp8 is FNUZ here: the bits of a stored number mean half of it, and its negative zero is NaN. Codes and "
            "scales are converted when a layer is prepared",
            f"{_SOURCE}/aiter/utility/dtypes.py",
            archs=_GFX942,
        ),
        Quirk(
            ("fused_moe_fp8*", "reencoded_moe*"),
            "inputs are divided by FNUZ's largest number, 240, and not by the declared format's, 448",
            f"{_SOURCE}/aiter/ops/quant.py",
            archs=_GFX942,
        ),
        Quirk(
            ("fused_moe*", "reencoded_moe*"),
            "only some of the kernels behind fused_moe add a bias, and the others drop it without a word: experts with "
            "one are not given to it",
            f"{_SOURCE}/aiter/fused_moe.py",
        ),
        Quirk(
            ("fused_moe_mxfp8",),
            "kernels for MXFP8 experts read gate and up rows in turns, whatever gate_mode says, and are FlyDSL's alone",
            f"{_SOURCE}/op_tests/test_moe_2stage.py",
        ),
        Quirk(
            ("gemm_afp4wfp4",),
            "the quantizer takes a rule for scales and follows even always",
            f"{_SOURCE}/aiter/ops/triton/quant/quant.py",
        ),
        Quirk(
            ("fused_moe*", "reencoded_moe*"),
            "layouts of weights are chosen by an attribute of the tensor, which a view loses: it is set at every call",
            f"{_SOURCE}/aiter/fused_moe.py",
        ),
    ),
    not_supported=(
        NotSupported("mxfp4-dual*", "never", "two levels of scales exist on Ascend only"),
        NotSupported("int8-bnb", "todo", "no kernel splits outlier columns"),
        NotSupported("svdq-*", "todo", "no low-rank branch"),
        NotSupported("gguf-*", "todo", "no decoder for GGUF blocks"),
    ),
)
