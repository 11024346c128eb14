"""vLLM's compiled kernels, where vLLM is installed beside omniplat: CUTLASS for 8 bits, Marlin for weights alone.

They are called as vLLM 0.30 registers them. Marlin's table is that of its generated kernels: no codes of 2, 3, 5 or 6
bits, no zero points beside 8-bit codes, groups of 32, 64 and 128; powers of two as scales in bf16 only.
"""

from __future__ import annotations

from omniplat.capability import Capability, multiples
from omniplat_cuda.capabilities.common import (
    FP8_ACCUMULATOR,
    HALF,
    MX_RULES,
    NEAREST,
    SM80,
    SM100,
    SM120,
    VLLM,
)

_CUTLASS = "omniplat_cuda.kernels.vllm_cutlass"
_MARLIN = "omniplat_cuda.kernels.vllm_marlin"
_SIXTEEN = multiples(16, "out", "in")
_MX = (*multiples(16, "out"), *multiples(32, "in"))
#: N of the narrowest of Marlin's tiles, and K of the deepest.
_TILES = (*multiples(64, "out"), *multiples(128, "in"))
#: What has FP8 products; Ada's are of another generation of CUTLASS.
_FP8_ARCHS = ("sm89", "sm90", *SM100, *SM120)
#: CUTLASS's int8 products end with Hopper.
_INT8_ARCHS = ("sm80", "sm86", "sm87", "sm89", "sm90")

FP8_TOKEN = Capability(
    # vLLM's quantizer follows the first rule; omniplat's stands in for it where another is declared.
    "vllm_cutlass_fp8",
    "linear",
    ("fp8-tensor", "fp8-channel"),
    ("fp8-token",),
    scale_rules=("absmax-clamped", "absmax", "half-range", "absmax-reciprocal"),
    roundings=NEAREST,
    archs=_FP8_ARCHS,
    dtypes=HALF,
    shapes=_SIXTEEN,
    requires=(VLLM,),
    assumed=False,
    accumulator=FP8_ACCUMULATOR,
    priority=39,
    impl=f"{_CUTLASS}:CutlassFp8",
)
FP8_TENSOR = Capability(
    "vllm_cutlass_fp8_tensor",
    "linear",
    ("fp8-tensor", "fp8-channel"),
    ("fp8-tensor", "fp8-tensor-static"),
    scale_rules=("absmax-reciprocal", "absmax", "half-range", "absmax-clamped"),
    roundings=NEAREST,
    archs=_FP8_ARCHS,
    dtypes=HALF,
    shapes=_SIXTEEN,
    requires=(VLLM,),
    assumed=False,
    accumulator=FP8_ACCUMULATOR,
    priority=39,
    impl=f"{_CUTLASS}:CutlassFp8Tensor",
)
INT8_TOKEN = Capability(
    "vllm_cutlass_int8",
    "linear",
    ("int8-tensor", "int8-channel"),
    ("int8-token",),
    scale_rules=("absmax-reciprocal", "absmax", "half-range", "absmax-clamped"),
    roundings=NEAREST,
    archs=_INT8_ARCHS,
    dtypes=HALF,
    shapes=_SIXTEEN,
    requires=(VLLM,),
    assumed=False,
    accumulator="int32",
    priority=32,
    impl=f"{_CUTLASS}:CutlassInt8",
)
INT8_TENSOR = Capability(
    "vllm_cutlass_int8_tensor",
    "linear",
    ("int8-tensor", "int8-channel"),
    ("int8-tensor", "int8-tensor-static"),
    scale_rules=("absmax", "absmax-reciprocal", "half-range", "absmax-clamped"),
    roundings=NEAREST,
    archs=_INT8_ARCHS,
    dtypes=HALF,
    shapes=_SIXTEEN,
    requires=(VLLM,),
    assumed=False,
    accumulator="int32",
    priority=32,
    impl=f"{_CUTLASS}:CutlassInt8Tensor",
)
MXFP8 = Capability(
    "vllm_cutlass_mxfp8",
    "linear",
    ("mxfp8",),
    ("fp8-token",),
    executes="fp8-token",
    scale_rules=("absmax",),
    roundings=NEAREST,
    archs=("sm89", "sm90"),
    dtypes=HALF,
    shapes=_MX,
    requires=(VLLM,),
    assumed=False,
    accumulator=FP8_ACCUMULATOR,
    priority=39,
    via="fp8-channel",
    impl=f"{_CUTLASS}:CutlassMxfp8",
)
MXFP4 = Capability(
    "vllm_cutlass_mxfp4",
    "linear",
    ("mxfp4",),
    ("mxfp4",),
    scale_rules=MX_RULES,
    roundings=NEAREST,
    archs=("sm89", "sm90"),
    dtypes=HALF,
    shapes=_MX,
    requires=(VLLM,),
    assumed=False,
    accumulator=FP8_ACCUMULATOR,
    priority=39,
    via="fp8-channel",
    resident=2.0,
    impl=f"{_CUTLASS}:CutlassMxfp4",
)

MARLIN_INT = Capability(
    # Scales become numbers of the input's dtype; a scale per row is applied to the sum once that was rounded.
    "vllm_marlin_int",
    "linear",
    ("int4-channel", "int4-g32", "int4-g64", "int4-g128", "int8-channel", "int8-g32", "int8-g64", "int8-g128"),
    ("a16",),
    executes="a16",
    archs=SM80,
    dtypes=HALF,
    shapes=_TILES,
    requires=(VLLM,),
    assumed=False,
    priority=4,
    rounds_before_bias=True,
    refuses=("group_index",),
    impl=f"{_MARLIN}:MarlinInt",
)
MARLIN_UINT4 = Capability(
    "vllm_marlin_uint4",
    "linear",
    ("uint4-channel", "uint4-g32", "uint4-g64", "uint4-g128"),
    ("a16",),
    executes="a16",
    archs=SM80,
    dtypes=HALF,
    shapes=_TILES,
    requires=(VLLM,),
    assumed=False,
    priority=4,
    rounds_before_bias=True,
    refuses=("group_index", "fractional zero points"),
    impl=f"{_MARLIN}:MarlinUint4",
)
MARLIN_FP8 = Capability(
    "vllm_marlin_fp8",
    "linear",
    ("fp8-tensor", "fp8-channel", "fp8-g128"),
    ("a16",),
    executes="a16",
    archs=SM80,
    dtypes=HALF,
    shapes=_TILES,
    requires=(VLLM,),
    assumed=False,
    priority=4,
    rounds_before_bias=True,
    impl=f"{_MARLIN}:MarlinFp8",
)
MARLIN_MX = Capability(
    "vllm_marlin_mx",
    "linear",
    ("mxfp4", "mxfp8"),
    ("a16",),
    executes="a16",
    archs=SM80,
    dtypes=("bf16",),
    shapes=_TILES,
    requires=(VLLM,),
    assumed=False,
    priority=4,
    rounds_before_bias=True,
    impl=f"{_MARLIN}:MarlinMx",
)
MARLIN_NVFP4 = Capability(
    "vllm_marlin_nvfp4",
    "linear",
    ("nvfp4",),
    ("a16",),
    executes="a16",
    archs=SM80,
    dtypes=HALF,
    shapes=_TILES,
    requires=(VLLM,),
    assumed=False,
    priority=4,
    rounds_before_bias=True,
    impl=f"{_MARLIN}:MarlinNvfp4",
)

CAPABILITIES = (
    FP8_TOKEN,
    FP8_TENSOR,
    INT8_TOKEN,
    INT8_TENSOR,
    MXFP8,
    MXFP4,
    MARLIN_INT,
    MARLIN_UINT4,
    MARLIN_FP8,
    MARLIN_MX,
    MARLIN_NVFP4,
)
