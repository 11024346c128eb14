"""The xpu backend, as data."""

from __future__ import annotations

from omniplat.backend import BackendSpec

SPEC = BackendSpec(
    name="xpu",
    api_version=1,
    kinds=("xpu",),
    capabilities=(),
    probe="omniplat_xpu.probe:probe",
    install='pip install "omniplat[xpu]"',
    distributions=("torch>=2.6", "vllm-xpu-kernels>=0.1.12"),
)
