"""The ascend backend, as data: torch_npu's ops. FP8 and MX formats exist on a5 only.

An inner axis of a matrix may have 65535 elements at most. MX matmuls take scales in pairs, so K is a multiple of 64.
"""

from __future__ import annotations

from omniplat.backend import BackendSpec, NotSupported, Quirk
from omniplat_ascend.capabilities import floats, integers
from omniplat_ascend.capabilities.common import OP_PLUGIN, OPS_NN, TORCH, TORCH_NPU, VLLM_ASCEND

_ADAPTERS = f"{OP_PLUGIN}/op_plugin/ops/opapi"
_DOCUMENTS = f"{OP_PLUGIN}/docs/zh/custom_APIs/torch_npu"

SPEC = BackendSpec(
    name="ascend",
    api_version=1,
    kinds=("npu",),
    capabilities=(*integers.CAPABILITIES, *floats.CAPABILITIES),
    probe="omniplat_ascend.probe:probe",
    install='pip install "omniplat[ascend]"',
    distributions=(TORCH_NPU, TORCH),
    quirks=(
        Quirk(
            ("quant_matmul_int8_static",),
            "without a scale per token, an f32 scale is cut to 19 bits beside an f16 output; the input's scale is "
            "given per token",
            f"{_ADAPTERS}/QuantMatmulKernelNpuOpApi.cpp",
        ),
        Quirk(
            ("quant_matmul_int4",),
            "takes no bias beside a scale per token: layers with one are refused, since adding it outside rounds twice",
            f"{_DOCUMENTS}/torch_npu-npu_quant_matmul.md",
        ),
        Quirk(
            ("quant_matmul_fp8",),
            "a bias inside the operator is reported wrong for fp8; it is added to a float32 output",
            f"{VLLM_ASCEND}/vllm_ascend/quantization/methods/w8a8fp8_dynamic.py",
        ),
        Quirk(
            ("dual_level_quant_matmul",),
            "the weight has to lie in the NZ format, which a copy through another device or a state dict loses: it is "
            "cast anew in every call then",
            f"{_ADAPTERS}/DualLevelQuantMatmulKernelNpuOpApi.cpp",
        ),
        Quirk(
            ("dual_level_quant_matmul",),
            "a smoothing vector inside the quantizer is documented as unsupported; the input is multiplied outside, "
            "and rounded to its dtype",
            f"{_DOCUMENTS}/torch_npu-npu_dynamic_dual_level_mx_quant.md",
        ),
        Quirk(
            ("weight_quant_batchmatmul_int*", "grouped_matmul_w*a16", "grouped_matmul_mxfp4_w8a16"),
            "scales have 16 bits: of one per row the operator gets a power of two and the output the rest; scales of "
            "groups are rounded",
            f"{_DOCUMENTS}/torch_npu-npu_weight_quant_batchmatmul.md",
        ),
        Quirk(
            ("grouped_matmul_int8", "grouped_matmul_int4_a8"),
            "a2 and a3 take bf16 scales only beside a bf16 output; the int32 product is scaled outside",
            f"{_DOCUMENTS}/torch_npu-npu_grouped_matmul.md",
        ),
        Quirk(
            ("grouped_matmul_w4a8",),
            "splits inputs in two, rounds sums of 256 products to f16 and adds them up in it: scales are given without "
            "their size, so that no sum leaves f16; it writes over its inputs",
            f"{OP_PLUGIN}/test/test_custom_ops/test_npu_grouped_matmul.py",
        ),
        Quirk(
            ("quant_matmul_fp8_block",),
            "takes no bias; it is added to a float32 output",
            f"{OPS_NN}/matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulV5.md",
        ),
        Quirk(
            ("grouped_matmul_mxfp4_a16",),
            "the weight has to lie in the NZ format, which a copy through another device or a state dict loses: it is "
            "cast anew in every call then",
            f"{_ADAPTERS}/GroupedMatmulKernelNpuOpApi.cpp",
        ),
        Quirk(
            ("grouped_matmul_*",),
            "groups have to cover all rows: rows of experts that are elsewhere are counted to the last one and dropped",
            f"{_DOCUMENTS}/torch_npu-npu_grouped_matmul.md",
        ),
        Quirk(
            ("*_mxfp8", "quant_matmul_mxfp4*", "dual_*", "grouped_matmul_mxfp4", "*_mxfp4_a8"),
            "scales come in pairs, so that K is a multiple of 64",
            f"{OPS_NN}/matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulV5.md",
        ),
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
