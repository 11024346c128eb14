"""The backend under test: its declaration, the device that is here or why none is, and its kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omniplat.backend import BackendProbe, BackendSpec
from omniplat.capability import ARCHIVED, Capability, Rejected
from omniplat.choose import backend_devices
from omniplat.device import DEFAULT_ARCH, Device
from omniplat.errors import OmniplatError, UsageError
from omniplat.layer import LayerSpec
from omniplat.match import Policy, decide, unmet
from omniplat.registry import BACKENDS, Registry, default_registry, probe_backend

if TYPE_CHECKING:
    import torch

    from omniplat.runtime.kernel import Kernel


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a check cannot run here.

    `code` is "no-device", "no-kernel", "distribution", "arch" or "archived". All but the last two leave the run
    `partial`: nobody has every architecture, and a report speaks for the device that it names; nothing will ever be
    written for what is archived.
    """

    code: str
    reason: str

    @property
    def is_gap(self) -> bool:
        return self.code not in ("arch", "archived")


@dataclass(frozen=True, slots=True)
class Subject:
    """One backend on one device. `device` is described, and `missing` says why, where none is here.

    An emulated device is none: kernels run on it, and the run stays partial.
    """

    spec: BackendSpec
    device: Device
    missing: str = ""
    distribution: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_device(self) -> bool:
        return not self.missing and not self.device.emulated

    def obstacle(self, capability: Capability) -> Obstacle | None:
        """What keeps a capability's kernel from running here; None where it runs."""
        if self.missing:
            return Obstacle("no-device", f"no device: {self.missing}")
        if capability.archs and self.device.arch not in capability.archs:
            return Obstacle("arch", f"needs {', '.join(capability.archs)}; the device is {self.device.arch}")
        if not capability.impl:
            if capability.maturity == ARCHIVED:
                return Obstacle("archived", f"{capability.name} is archived: it is declared, and gets no kernel")
            return Obstacle("no-kernel", f"{capability.name} is declared and has no kernel yet")
        for requirement in capability.requires:
            missing = unmet(requirement, self.device)
            if missing:
                return Obstacle("distribution", f"needs {requirement}, found {missing}")
        return None

    def decide(self, capability: Capability, layer: LayerSpec) -> str:
        """Why the capability refuses a layer here; "" where it accepts."""
        answer = decide(capability, layer, self.device, Policy())
        return str(answer) if isinstance(answer, Rejected) else ""

    def kernel(self, capability: Capability) -> Kernel:
        """A fresh kernel of a capability."""
        from omniplat.runtime.kernel import load_kernel

        return load_kernel(capability.impl)

    @property
    def torch_device(self) -> torch.device:
        import torch

        from omniplat.runtime.tensors import torch_kind

        return torch.device(torch_kind(self.device))


def equipped(kind: str, arch: str) -> Device:
    """A device of which no distribution is missing, to hold declarations against."""
    return Device(kind, arch, described=False, emulated=True)


def find_subject(name: str, registry: Registry | None = None, emulated: Device | None = None) -> Subject:
    """The backend of that name, on the `emulated` device instead of one that its probe finds where one is given.

    Raises what the registry raises where the backend cannot even be loaded, and UsageError where it serves no device of
    the emulated kind. A probe that fails leaves the subject without a device: the manifest group reports the failure.
    """
    registry = registry or default_registry()
    spec = registry.load(BACKENDS, name)
    plugin = next(item for item in registry.plugins(BACKENDS) if item.name == name)
    if emulated is not None:
        if emulated.kind not in spec.kinds:
            raise UsageError(f"backend {name} serves {', '.join(spec.kinds)}, and {emulated} is emulated")
        return Subject(spec, emulated, "", plugin.distribution, emulated.versions)
    try:
        probe = probe_backend(spec)
    except OmniplatError as error:
        probe = BackendProbe(available=False, reason=error.message)
    kind = spec.kinds[0] if spec.kinds else "cpu"
    if probe.available:
        devices = backend_devices(spec, probe)
        reason = "" if devices else "the probe found none"
    else:
        devices, reason = (), probe.reason or "the probe found none"
    device = devices[0] if devices else Device(kind, DEFAULT_ARCH.get(kind, "generic"))
    versions = {key: text for key, text in {**device.versions, **probe.versions}.items() if text}
    return Subject(spec, device, reason, plugin.distribution, versions)


_VARIABLES = (
    "OMNIPLAT_BACKEND",
    "OMNIPLAT_PREFER",
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
)


def environment() -> dict[str, str]:
    """Variables that change what the suite runs on."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}
