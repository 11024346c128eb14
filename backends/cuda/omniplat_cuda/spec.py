"""The cuda backend, as data: what each library's kernels run, on which architectures, at which shapes.

Priorities follow the measurements on an H200 that backends/cuda/README.md names. A capability with an `impl` has its
kernel; the others are planned only.
"""

from __future__ import annotations

from omniplat.backend import BackendSpec, NotSupported, Quirk
from omniplat.portable.declared import TORCH, TRITON
from omniplat_cuda.capabilities import humming, others, torch_native, vllm
from omniplat_cuda.capabilities.common import BITSANDBYTES, FLASHINFER, HUMMING, VLLM

_VLLM = "https://github.com/vllm-project/vllm/blob/v0.30.0"

SPEC = BackendSpec(
    name="cuda",
    api_version=1,
    kinds=("cuda",),
    capabilities=(*torch_native.CAPABILITIES, *humming.CAPABILITIES, *others.CAPABILITIES, *vllm.CAPABILITIES),
    probe="omniplat_cuda.probe:probe",
    install='pip install "omniplat[cuda]"',
    distributions=(TORCH, TRITON, HUMMING, BITSANDBYTES, FLASHINFER),
    optional=(VLLM,),
    quirks=(
        Quirk(
            ("vllm_cutlass_fp8", "vllm_cutlass_fp8_tensor", "vllm_cutlass_int8", "vllm_cutlass_int8_tensor"),
            "vLLM's quantizers make numbers of NaN: where they are used, NaN in an input does not reach the output",
            f"{_VLLM}/csrc/libtorch_stable/quantization/w8a8/fp8/common.cu",
        ),
        Quirk(
            ("vllm_marlin_*",),
            "vLLM's wheels hold some of Marlin's kernels as PTX, which Hopper's driver compiles at their first call",
            "https://github.com/vllm-project/vllm/issues/38619",
            archs=("sm90",),
        ),
    ),
    not_supported=(
        NotSupported("mxfp6*", "todo", "no kernel decodes 6-bit codes on architectures before sm100"),
        NotSupported("gguf-*", "todo", "no decoder for GGUF blocks"),
    ),
)
