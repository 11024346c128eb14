"""The cuda backend, as data: what each library's kernels run, on which architectures, at which shapes.

Priorities follow the measurements on an H200 that backends/cuda/README.md names. A capability with an `impl` has its
kernel; the others are planned only.
"""

from __future__ import annotations

from omniplat.backend import BackendSpec, NotSupported
from omniplat_cuda.capabilities import humming, others, torch_native
from omniplat_cuda.capabilities.common import BITSANDBYTES, FLASHINFER, HUMMING, TORCH, TRITON

SPEC = BackendSpec(
    name="cuda",
    api_version=1,
    kinds=("cuda",),
    capabilities=(*torch_native.CAPABILITIES, *humming.CAPABILITIES, *others.CAPABILITIES),
    probe="omniplat_cuda.probe:probe",
    install='pip install "omniplat[cuda]"',
    distributions=(TORCH, TRITON, HUMMING, BITSANDBYTES, FLASHINFER),
    not_supported=(
        NotSupported("mxfp4-dual*", "never", "two levels of scales exist on Ascend only"),
        NotSupported("mxfp6*", "todo", "no kernel decodes 6-bit codes on architectures before sm100"),
        NotSupported("svdq-*", "todo", "no low-rank branch"),
        NotSupported("gguf-*", "todo", "no decoder for GGUF blocks"),
    ),
)
