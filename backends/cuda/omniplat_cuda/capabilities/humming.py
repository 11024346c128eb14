"""humming-kernels: weight-only and 8-bit activations, dense and experts, compiled for each shape at first use."""

from __future__ import annotations

from omniplat.capability import Capability, multiples
from omniplat.portable.declared import TRITON
from omniplat_cuda.capabilities.common import FP8_ACCUMULATOR, HALF, HUMMING, INTEGERS, NEAREST, SM80, SM89

_LINEAR = "omniplat_cuda.kernels.humming"
_EXPERTS = "omniplat_cuda.kernels.humming_experts"

_TAILS = ("channel", "g32", "g64", "g128")
#: What `humming_forms` lays out. Other widths of integers, and blocks of other sizes, are planned only.
_WEIGHTS = (
    *(f"{element}-{tail}" for element in ("int4", "uint4", "int8") for tail in _TAILS),
    *("int8-tensor", "int8-bnb", "fp8-tensor", "fp8-channel", "mxfp8", "mxfp4", "nvfp4"),
)
_BLOCKS = ("fp8-block128x128",)

#: humming fills N and K up to its tiles, in steps of 8 columns of 16-bit and 16 columns of 8-bit activations.
_SHAPES = multiples(8, "out", "in")
_SHAPES_A8 = (*multiples(8, "out"), *multiples(16, "in"))
_MOE = multiples(8, "out", "in", "intermediate")
_MOE_A8 = (*multiples(8, "out"), *multiples(16, "in", "intermediate"))

#: Below the portable kernels, which are faster for few rows and for many; and where those are not, still there.
_SLOWER = 4
#: Sums of 8-bit inputs become numbers of 16 bits before they are scaled, and leave f16's range: seen on an H200, -inf
#: for fp8-channel.
_DTYPES_A8 = ("bf16",)

A16 = Capability(
    "humming_linear",
    "linear",
    _WEIGHTS,
    ("a16",),
    executes="a16",
    archs=SM80,
    dtypes=HALF,
    shapes=_SHAPES,
    requires=(HUMMING,),
    priority=_SLOWER,
    rounds_before_bias=True,
    refuses=("group_index",),
    impl=f"{_LINEAR}:HummingLinear",
)
A16_TURING = Capability(
    "humming_linear_turing",
    "linear",
    _WEIGHTS,
    ("a16",),
    executes="a16",
    archs=("sm75",),
    dtypes=("f16",),
    shapes=_SHAPES,
    requires=(HUMMING,),
    priority=_SLOWER,
    rounds_before_bias=True,
    refuses=("group_index",),
    impl=f"{_LINEAR}:HummingLinearTuring",
)
A16_BLOCK = Capability(
    # One scale more or less for a block that is cut off at an edge: humming counts whole ones only.
    "humming_linear_block",
    "linear",
    _BLOCKS,
    ("a16",),
    executes="a16",
    archs=SM80,
    dtypes=HALF,
    shapes=multiples(128, "out", "in"),
    requires=(HUMMING,),
    priority=_SLOWER,
    rounds_before_bias=True,
    impl=f"{_LINEAR}:HummingLinearBlock",
)
FP8 = Capability(
    "humming_linear_fp8",
    "linear",
    ("fp8-tensor", "fp8-channel"),
    ("fp8-token",),
    scale_rules=("absmax",),
    roundings=NEAREST,
    archs=SM89,
    dtypes=_DTYPES_A8,
    shapes=_SHAPES_A8,
    requires=(HUMMING, TRITON),
    accumulator=FP8_ACCUMULATOR,
    priority=30,
    rounds_before_bias=True,
    impl=f"{_LINEAR}:HummingLinearFp8",
)
MXFP4_A8 = Capability(
    # Faster than weight-only for many rows, but a weight whose scales span more than 11 binades is refused at loading
    # only: the preflight knows no such limit.
    "humming_linear_mxfp4_a8",
    "linear",
    ("mxfp4",),
    ("fp8-token",),
    executes="fp8-token",
    scale_rules=("absmax",),
    roundings=NEAREST,
    archs=SM89,
    dtypes=_DTYPES_A8,
    shapes=_SHAPES_A8,
    requires=(HUMMING, TRITON),
    accumulator=FP8_ACCUMULATOR,
    priority=_SLOWER,
    maturity="experimental",
    rounds_before_bias=True,
    impl=f"{_LINEAR}:HummingLinearMxfp4A8",
)

LINEAR = (
    A16,
    A16_TURING,
    A16_BLOCK,
    FP8,
    MXFP4_A8,
    Capability(
        "humming_linear_other_integers",
        "linear",
        INTEGERS,
        ("a16",),
        executes="a16",
        archs=SM80,
        dtypes=HALF,
        shapes=_SHAPES,
        requires=(HUMMING,),
        priority=20,
    ),
    Capability(
        "humming_linear_fp8_block",
        "linear",
        _BLOCKS,
        ("fp8-g128",),
        archs=SM89,
        dtypes=HALF,
        shapes=multiples(128, "in"),
        requires=(HUMMING,),
        priority=30,
    ),
    Capability(
        # Its scales of rows are numbers of 16 bits, which the exact sums of int8 by int8 show.
        "humming_linear_int8",
        "linear",
        ("int8-tensor", "int8-channel"),
        ("int8-token",),
        archs=SM80,
        dtypes=HALF,
        shapes=_SHAPES_A8,
        requires=(HUMMING,),
        accumulator="int32",
        priority=25,
    ),
    Capability(
        "humming_linear_w4a8_int8",
        "linear",
        ("int4-channel", "int4-g*"),
        ("int8-token",),
        archs=SM80,
        dtypes=HALF,
        shapes=_SHAPES_A8,
        requires=(HUMMING,),
        accumulator="int32",
        priority=30,
    ),
    Capability(
        "humming_linear_w4a8_fp8",
        "linear",
        ("int4-channel", "int4-g*"),
        ("fp8-token",),
        archs=SM89,
        dtypes=HALF,
        shapes=_SHAPES_A8,
        requires=(HUMMING,),
        accumulator=FP8_ACCUMULATOR,
        priority=30,
    ),
)

#: Weights whose scales are those of whole rows. Experts' sums over parts of K are rounded to 16 bits without them, and
#: in f16 leave its range: seen on an H200, -inf for fp8-channel.
_BY_ROW = tuple(weight for weight in _WEIGHTS if weight.endswith(("-channel", "-tensor", "-bnb")))
_BY_GROUP = tuple(weight for weight in _WEIGHTS if weight not in _BY_ROW)

#: On an H200 faster than the portable kernel up to 256 rows, and as fast for 4096.
MOE_A16 = Capability(
    "humming_moe",
    "moe",
    _BY_GROUP,
    ("a16",),
    executes="a16",
    archs=SM80,
    dtypes=HALF,
    shapes=_MOE,
    requires=(HUMMING, TRITON),
    priority=20,
    refuses=("group_index", "pre_scale"),
    impl=f"{_EXPERTS}:HummingExperts",
)
MOE_BY_ROW = Capability(
    "humming_moe_rows",
    "moe",
    _BY_ROW,
    ("a16",),
    executes="a16",
    archs=SM80,
    dtypes=("bf16",),
    shapes=_MOE,
    requires=(HUMMING, TRITON),
    priority=20,
    refuses=("group_index", "pre_scale"),
    impl=f"{_EXPERTS}:HummingExpertsByRow",
)
MOE_TURING = Capability(
    "humming_moe_turing",
    "moe",
    _BY_GROUP,
    ("a16",),
    executes="a16",
    archs=("sm75",),
    dtypes=("f16",),
    shapes=_MOE,
    requires=(HUMMING, TRITON),
    priority=20,
    refuses=("group_index", "pre_scale"),
    impl=f"{_EXPERTS}:HummingExpertsTuring",
)

MOE = (
    MOE_A16,
    MOE_BY_ROW,
    MOE_TURING,
    Capability(
        "humming_moe_other",
        "moe",
        (*INTEGERS, "fp8-block*"),
        ("a16",),
        executes="a16",
        archs=SM80,
        dtypes=HALF,
        shapes=_MOE,
        requires=(HUMMING,),
        priority=20,
    ),
    Capability(
        "humming_moe_fp8",
        "moe",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-token",),
        archs=SM89,
        dtypes=HALF,
        shapes=_MOE_A8,
        requires=(HUMMING,),
        accumulator=FP8_ACCUMULATOR,
        priority=35,
    ),
    Capability(
        "humming_moe_fp8_block",
        "moe",
        _BLOCKS,
        ("fp8-g128",),
        archs=SM89,
        dtypes=HALF,
        shapes=multiples(128, "in", "intermediate"),
        requires=(HUMMING,),
        priority=30,
    ),
    Capability(
        "humming_moe_int8",
        "moe",
        ("int8-tensor", "int8-channel"),
        ("int8-token",),
        archs=SM80,
        dtypes=HALF,
        shapes=_MOE_A8,
        requires=(HUMMING,),
        accumulator="int32",
        priority=35,
    ),
    Capability(
        "humming_moe_w4a8_int8",
        "moe",
        ("int4-channel", "int4-g*"),
        ("int8-token",),
        archs=SM80,
        dtypes=HALF,
        shapes=_MOE_A8,
        requires=(HUMMING,),
        accumulator="int32",
        priority=30,
    ),
    Capability(
        "humming_moe_mxfp4_a8",
        "moe",
        ("mxfp4",),
        ("fp8-token",),
        executes="fp8-token",
        archs=SM89,
        dtypes=HALF,
        shapes=_MOE_A8,
        requires=(HUMMING,),
        accumulator=FP8_ACCUMULATOR,
        priority=15,
        maturity="experimental",
    ),
)

CAPABILITIES = (*LINEAR, *MOE)
