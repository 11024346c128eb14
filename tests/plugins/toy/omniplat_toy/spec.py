"""A complete backend outside the tree: one kernel for one scheme, on the CPU."""

from __future__ import annotations

from omniplat.backend import BackendProbe, BackendSpec, NotSupported
from omniplat.capability import Capability
from omniplat.host import detect_cpu, installed_versions

SPEC = BackendSpec(
    name="toy",
    api_version=1,
    kinds=("cpu",),
    capabilities=(
        Capability(
            name="int8_rows",
            op="linear",
            weights=("int8-channel",),
            activations=("a16",),
            executes="a16",
            refuses=("pre_scale",),
            requires=("torch>=2.6",),
            impl="omniplat_toy.kernels:Int8Rows",
        ),
    ),
    probe="omniplat_toy.spec:probe",
    install="pip install omniplat-toy",
    distributions=("torch>=2.6",),
    not_supported=(NotSupported("mxfp4/*", "never", "the toy knows one scheme"),),
)


def probe() -> BackendProbe:
    device = detect_cpu()
    versions = installed_versions(SPEC.distributions)
    return BackendProbe(True, devices=(f"cpu:{device.arch}",), versions=versions, found=(device,))
