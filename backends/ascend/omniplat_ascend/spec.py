"""The ascend backend, as data."""

from __future__ import annotations

from omniplat.backend import BackendSpec

SPEC = BackendSpec(
    name="ascend",
    api_version=1,
    kinds=("npu",),
    capabilities=(),
    probe="omniplat_ascend.probe:probe",
    install='pip install "omniplat[ascend]"',
    distributions=("torch-npu>=2.6", "torch>=2.6"),
)
