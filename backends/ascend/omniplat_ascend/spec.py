"""The ascend backend, as data: torch_npu's ops. FP8 and MX formats exist on a5 only.

An inner axis of a matrix may have 65535 elements at most. MX matmuls take scales in pairs, so K is a multiple of 64.
"""

from __future__ import annotations

from omniplat.backend import BackendSpec, NotSupported, Quirk
from omniplat.capability import Capability, ShapeRule, multiples

_TORCH_NPU = "torch-npu>=2.6"
_OP_PLUGIN = "https://github.com/Ascend/op-plugin"
_VLLM_ASCEND = "https://github.com/vllm-project/vllm-ascend"
_TORCH = "torch>=2.6"

_LINEAR = "omniplat_ascend.kernels.linear"
_MOE = "omniplat_ascend.kernels.moe"

_INT8_ARCHS = ("a2", "a3", "a5")
_A5 = ("a5",)
_HALF = ("bf16", "f16")
#: Groups of weight-only layers: multiples of 32.
_GROUPS = ("g32", "g64", "g96", "g128", "g160", "g192", "g256", "g512", "g1024")
_INT4_GROUPED = tuple(f"{stem}-{group}" for stem in ("int4", "uint4") for group in _GROUPS)
_INT8_GROUPED = tuple(f"{stem}-{group}" for stem in ("int8", "uint8") for group in _GROUPS)

_AXIS = 65535
_LINEAR_AXES = (ShapeRule("in", maximum=_AXIS), ShapeRule("out", maximum=_AXIS))
_MOE_AXES = (*_LINEAR_AXES, ShapeRule("intermediate", maximum=_AXIS))
_PACKED_AXES = (ShapeRule("in", multiple_of=8, maximum=_AXIS), ShapeRule("out", maximum=_AXIS))
_PACKED_MOE = (
    ShapeRule("in", multiple_of=8, maximum=_AXIS),
    ShapeRule("out", multiple_of=8, maximum=_AXIS),
    ShapeRule("intermediate", multiple_of=8, maximum=_AXIS),
)
_MX_AXES = (ShapeRule("in", multiple_of=64, maximum=_AXIS), ShapeRule("out", maximum=_AXIS))
_MX_MOE = (
    ShapeRule("in", multiple_of=64, maximum=_AXIS),
    ShapeRule("out", multiple_of=64, maximum=_AXIS),
    ShapeRule("intermediate", multiple_of=64, maximum=_AXIS),
)

_INT8 = (
    Capability(
        "quant_matmul_int8",
        "linear",
        ("int8-tensor", "int8-channel"),
        ("int8-token",),
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=_LINEAR_AXES,
        requires=(_TORCH_NPU,),
        accumulator="int32",
        priority=40,
        impl=f"{_LINEAR}:Int8Linear",
    ),
    Capability(
        "quant_matmul_int8_static",
        "linear",
        ("int8-tensor", "int8-channel"),
        ("int8-tensor-static", "int8-tensor-static-asym"),
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=_LINEAR_AXES,
        requires=(_TORCH_NPU,),
        accumulator="int32",
        priority=40,
        impl=f"{_LINEAR}:Int8StaticLinear",
    ),
    Capability(
        "quant_matmul_int4",
        "linear",
        ("int4-channel",),
        ("int4-token",),
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=_PACKED_AXES,
        requires=(_TORCH_NPU,),
        accumulator="int32",
        priority=40,
        bias=False,
        impl=f"{_LINEAR}:Int4Linear",
    ),
    Capability(
        "weight_quant_batchmatmul_int8",
        "linear",
        ("int8-tensor", "int8-channel", *_INT8_GROUPED),
        ("a16",),
        executes="a16",
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=_LINEAR_AXES,
        requires=(_TORCH_NPU,),
        priority=20,
        impl=f"{_LINEAR}:WeightOnlyInt8Linear",
    ),
    Capability(
        "weight_quant_batchmatmul_int4",
        "linear",
        ("int4-channel", "uint4-channel", *_INT4_GROUPED),
        ("a16",),
        executes="a16",
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=_PACKED_AXES,
        requires=(_TORCH_NPU,),
        priority=20,
        impl=f"{_LINEAR}:WeightOnlyInt4Linear",
    ),
    Capability(
        # Twice each value is an integer of at most 12: exact, with the group scales kept.
        "weight_quant_batchmatmul_mxfp4",
        "linear",
        ("mxfp4",),
        ("a16",),
        executes="a16",
        archs=_INT8_ARCHS,
        dtypes=("bf16",),
        shapes=_LINEAR_AXES,
        requires=(_TORCH_NPU,),
        priority=10,
        via="int8-g32",
        resident=2.0,
        impl=f"{_LINEAR}:WeightOnlyMxfp4Linear",
    ),
    Capability(
        # Twice the stored size: int4 by int8 is no product of the vendor's for linear layers.
        "quant_matmul_int4_a8",
        "linear",
        ("int4-channel",),
        ("int8-token",),
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=_LINEAR_AXES,
        requires=(_TORCH_NPU,),
        accumulator="int32",
        priority=30,
        impl=f"{_LINEAR}:Int4A8Linear",
        via="int8-channel",
        resident=2.0,
    ),
    Capability(
        "grouped_matmul_int4_a8",
        "moe",
        ("int4-channel",),
        ("int8-token",),
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=(*_MOE_AXES, *multiples(2, "in", "out", "intermediate")),
        requires=(_TORCH_NPU,),
        accumulator="int32",
        priority=30,
        impl=f"{_MOE}:Int4A8Experts",
        via="int8-channel",
        resident=2.0,
    ),
    Capability(
        "grouped_matmul_int8",
        "moe",
        ("int8-channel",),
        ("int8-token",),
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=_MOE_AXES,
        requires=(_TORCH_NPU,),
        accumulator="int32",
        priority=40,
        impl=f"{_MOE}:Int8Experts",
    ),
    Capability(
        "grouped_matmul_w4a8",
        "moe",
        ("int4-channel", *(text for text in _INT4_GROUPED if text.startswith("int4"))),
        ("int8-token",),
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=_PACKED_MOE,
        requires=(_TORCH_NPU,),
        accumulator="int32",
        priority=40,
    ),
    Capability(
        "grouped_matmul_w8a16",
        "moe",
        ("int8-channel",),
        ("a16",),
        executes="a16",
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=_MOE_AXES,
        requires=(_TORCH_NPU,),
        priority=20,
        impl=f"{_MOE}:WeightOnlyInt8Experts",
    ),
    Capability(
        "grouped_matmul_w4a16",
        "moe",
        ("int4-channel", "uint4-channel", *_INT4_GROUPED),
        ("a16",),
        executes="a16",
        archs=_INT8_ARCHS,
        dtypes=_HALF,
        shapes=_PACKED_MOE,
        requires=(_TORCH_NPU,),
        priority=20,
        impl=f"{_MOE}:WeightOnlyInt4Experts",
    ),
)

_FP8 = (
    Capability(
        # A bias is added outside: inside the op it is reported wrong for FP8.
        "quant_matmul_fp8",
        "linear",
        ("fp8-tensor", "fp8-channel"),
        ("fp8-token",),
        archs=_A5,
        dtypes=_HALF,
        shapes=_LINEAR_AXES,
        requires=(_TORCH_NPU,),
        priority=40,
        impl=f"{_LINEAR}:Fp8Linear",
    ),
    Capability(
        "quant_matmul_fp8_block",
        "linear",
        ("fp8-block128x128",),
        ("fp8-g128",),
        archs=_A5,
        dtypes=_HALF,
        shapes=_LINEAR_AXES,
        requires=(_TORCH_NPU,),
        priority=40,
    ),
    Capability(
        "grouped_matmul_fp8",
        "moe",
        ("fp8-channel",),
        ("fp8-token",),
        archs=_A5,
        dtypes=_HALF,
        shapes=_MOE_AXES,
        requires=(_TORCH_NPU,),
        priority=40,
        impl=f"{_MOE}:Fp8Experts",
    ),
    Capability(
        "quant_matmul_mxfp8",
        "linear",
        ("mxfp8",),
        ("mxfp8",),
        executes="mxfp8",
        archs=_A5,
        dtypes=_HALF,
        shapes=_MX_AXES,
        requires=(_TORCH_NPU,),
        priority=40,
        impl=f"{_LINEAR}:Mxfp8Linear",
    ),
    Capability(
        "quant_matmul_mxfp4",
        "linear",
        ("mxfp4",),
        ("mxfp4",),
        archs=_A5,
        dtypes=_HALF,
        shapes=_MX_AXES,
        requires=(_TORCH_NPU,),
        priority=40,
        impl=f"{_LINEAR}:Mxfp4Linear",
    ),
    Capability(
        "quant_matmul_mxfp4_a8",
        "linear",
        ("mxfp4",),
        ("mxfp8",),
        executes="mxfp8",
        archs=_A5,
        dtypes=_HALF,
        shapes=_MX_AXES,
        requires=(_TORCH_NPU,),
        priority=30,
        impl=f"{_LINEAR}:Mxfp4A8Linear",
    ),
    Capability(
        "dual_level_quant_matmul",
        "linear",
        ("mxfp4-dual",),
        ("mxfp4-dual",),
        archs=_A5,
        dtypes=_HALF,
        shapes=_MX_AXES,
        requires=(_TORCH_NPU,),
        priority=40,
        impl=f"{_LINEAR}:DualLevelLinear",
    ),
    Capability(
        "grouped_matmul_mxfp8",
        "moe",
        ("mxfp8",),
        ("mxfp8",),
        executes="mxfp8",
        archs=_A5,
        dtypes=_HALF,
        shapes=_MX_MOE,
        requires=(_TORCH_NPU,),
        priority=40,
        impl=f"{_MOE}:Mxfp8Experts",
    ),
    Capability(
        "grouped_matmul_mxfp4",
        "moe",
        ("mxfp4",),
        ("mxfp4",),
        archs=_A5,
        dtypes=_HALF,
        shapes=_MX_MOE,
        requires=(_TORCH_NPU,),
        priority=40,
        impl=f"{_MOE}:Mxfp4Experts",
    ),
    Capability(
        "grouped_matmul_mxfp4_a8",
        "moe",
        ("mxfp4",),
        ("mxfp8",),
        executes="mxfp8",
        archs=_A5,
        dtypes=_HALF,
        shapes=_MX_MOE,
        requires=(_TORCH_NPU,),
        priority=30,
        impl=f"{_MOE}:Mxfp4A8Experts",
    ),
    Capability(
        "grouped_matmul_mxfp4_a16",
        "moe",
        ("mxfp4",),
        ("a16",),
        executes="a16",
        archs=_A5,
        dtypes=("bf16",),
        shapes=_MX_MOE,
        requires=(_TORCH_NPU,),
        priority=20,
    ),
)

SPEC = BackendSpec(
    name="ascend",
    api_version=1,
    kinds=("npu",),
    capabilities=(*_INT8, *_FP8),
    probe="omniplat_ascend.probe:probe",
    install='pip install "omniplat[ascend]"',
    distributions=(_TORCH_NPU, _TORCH),
    quirks=(
        Quirk(
            ("quant_matmul_int8_static",),
            "without a scale per token, an f32 scale is cut to 19 bits beside an f16 output; the input's scale is "
            "given per token",
            _OP_PLUGIN,
        ),
        Quirk(
            ("quant_matmul_int4",),
            "takes no bias beside a scale per token: layers with one are refused, since adding it outside rounds twice",
            _OP_PLUGIN,
        ),
        Quirk(
            ("quant_matmul_fp8",),
            "a bias inside the operator is reported wrong for fp8; it is added to a float32 output",
            _VLLM_ASCEND,
        ),
        Quirk(
            ("dual_level_quant_matmul",),
            "the weight has to lie in the NZ format, which a copy through another device or a state dict loses: it is "
            "cast anew in every call then",
            _OP_PLUGIN,
        ),
        Quirk(
            ("dual_level_quant_matmul",),
            "a smoothing vector inside the quantizer is documented as unsupported; the input is multiplied outside, "
            "and rounded to its dtype",
            _OP_PLUGIN,
        ),
        Quirk(
            ("weight_quant_batchmatmul_int*", "grouped_matmul_w*a16"),
            "scales have 16 bits: of one per row the operator gets a power of two and the output the rest; scales of "
            "groups are rounded",
            _OP_PLUGIN,
        ),
        Quirk(
            ("grouped_matmul_int8", "grouped_matmul_int4_a8"),
            "a2 and a3 take bf16 scales only beside a bf16 output; the int32 product is scaled outside",
            _OP_PLUGIN,
        ),
        Quirk(
            ("grouped_matmul_*",),
            "groups have to cover all rows: rows of experts that are elsewhere are counted to the last one and dropped",
            _OP_PLUGIN,
        ),
        Quirk(("*_mxfp8", "*_mxfp4*"), "scales come in pairs, so that K is a multiple of 64", _OP_PLUGIN),
    ),
    not_supported=(
        NotSupported("nvfp4", "never", "no unit for groups of 16 with e4m3 scales"),
        NotSupported("nf4-*", "todo", "bitsandbytes has plain torch code for this device only"),
        NotSupported("fp4bnb-*", "todo", "bitsandbytes has plain torch code for this device only"),
        NotSupported("int8-bnb", "todo", "no kernel splits outlier columns"),
        NotSupported("svdq-*", "todo", "no low-rank branch"),
        NotSupported("gguf-*", "todo", "no decoder for GGUF blocks"),
    ),
)
