"""The cuda backend, as data."""

from __future__ import annotations

from omniplat.backend import BackendSpec

SPEC = BackendSpec(
    name="cuda",
    api_version=1,
    kinds=("cuda",),
    capabilities=(),
    probe="omniplat_cuda.probe:probe",
    install='pip install "omniplat[cuda]"',
    distributions=(
        "torch>=2.6",
        "triton>=3.2",
        "humming-kernels>=0.1.10",
        "bitsandbytes>=0.46",
        "flashinfer-python>=0.6",
    ),
)
