"""The rocm backend, as data."""

from __future__ import annotations

from omniplat.backend import BackendSpec

SPEC = BackendSpec(
    name="rocm",
    api_version=1,
    kinds=("rocm",),
    capabilities=(),
    probe="omniplat_rocm.probe:probe",
    install='pip install "omniplat[rocm]"',
    distributions=("torch>=2.6", "amd-aiter>=0.1.8"),
)
