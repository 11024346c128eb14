"""The rocm backend, as data: AITER's ops on CDNA 3 and 4, and portable Triton kernels on every architecture.

FP8 on gfx942 is FNUZ: a kernel converts the stored OCP codes when it prepares them (twice the scale, no negative
zero). Ops that take no bias, or drop it without saying so (gemm_a4w4), get it added outside.
gemm_a16wfp4, in spite of its name, quantizes its inputs to MXFP4: it is not used for weight-only layers.
"""

from __future__ import annotations

from omniplat.backend import BackendSpec, NotSupported, Quirk
from omniplat.portable.declared import TORCH, TRITON
from omniplat_rocm.capabilities import experts, linear
from omniplat_rocm.capabilities.common import AITER, FLYDSL, GFX942, SOURCE

SPEC = BackendSpec(
    name="rocm",
    api_version=1,
    kinds=("rocm",),
    capabilities=(*linear.CAPABILITIES, *experts.CAPABILITIES),
    probe="omniplat_rocm.probe:probe",
    install='pip install "omniplat[rocm]"',
    distributions=(TORCH, TRITON, AITER, FLYDSL),
    quirks=(
        Quirk(
            ("gemm_a4w4*",),
            "gemm_a4w4 takes a bias and ignores it on gfx950: it is added outside",
            f"{SOURCE}/aiter/ops/gemm_op_a4w4.py",
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
            f"{SOURCE}/aiter/ops/shuffle.py",
        ),
        Quirk(
            ("gemm_a8w8_fp8*", "gemm_a8w8_blockscale", "reencoded_*", "fused_moe_fp8*"),
            "fp8 is FNUZ here: the bits of a stored number mean half of it, and its negative zero is NaN. Codes and "
            "scales are converted when a layer is prepared",
            f"{SOURCE}/aiter/utility/dtypes.py",
            archs=GFX942,
        ),
        Quirk(
            ("fused_moe_fp8*", "reencoded_moe*"),
            "inputs are divided by FNUZ's largest number, 240, and not by the declared format's, 448",
            f"{SOURCE}/aiter/ops/quant.py",
            archs=GFX942,
        ),
        Quirk(
            ("fused_moe*", "reencoded_moe*"),
            "only some of the kernels behind fused_moe add a bias, and the others drop it without a word: experts with "
            "one are not given to it",
            f"{SOURCE}/aiter/fused_moe.py",
        ),
        Quirk(
            ("fused_moe_mxfp8",),
            "kernels for MXFP8 experts read gate and up rows in turns, whatever gate_mode says, and are FlyDSL's alone",
            f"{SOURCE}/op_tests/test_moe_2stage.py",
        ),
        Quirk(
            ("gemm_afp4wfp4",),
            "the quantizer takes a rule for scales and follows even always",
            f"{SOURCE}/aiter/ops/triton/quant/quant.py",
        ),
        Quirk(
            ("fused_moe*", "reencoded_moe*"),
            "layouts of weights are chosen by an attribute of the tensor, which a view loses: it is set at every call",
            f"{SOURCE}/aiter/fused_moe.py",
        ),
    ),
    not_supported=(
        NotSupported("int8-bnb", "todo", "no kernel splits outlier columns"),
        NotSupported("gguf-*", "todo", "no decoder for GGUF blocks"),
    ),
)
