"""Whether the cpu backend can run here: it can wherever torch is installed."""

from __future__ import annotations

from omniplat.backend import BackendProbe
from omniplat.host import detect_cpu, installed_versions


def probe() -> BackendProbe:
    """The CPU of this machine. Looks torch up without importing it."""
    versions = installed_versions(("torch",))
    device = detect_cpu()
    ready = bool(versions.get("torch"))
    return BackendProbe(
        available=ready,
        reason="" if ready else "torch is not installed",
        devices=(f"{device.kind}:{device.arch}",),
        versions=versions,
        installed=ready,
        found=(device,),
    )
