"""Looks for Intel GPUs on the PCI bus and for what drives them, without importing torch."""

from __future__ import annotations

import os
from pathlib import Path

from omniplat.backend import BackendProbe
from omniplat.device import Device
from omniplat.host import ROOT, installed_versions, read_text, visible
from omniplat_xpu.spec import SPEC

INTEL = "0x8086"
MASK = "ZE_AFFINITY_MASK"

#: Architecture -> PCI device ids, as the Linux drivers i915 and xe list them. Other Intel graphics is not counted.
PCI_IDS: dict[str, frozenset[int]] = {
    "bmg": frozenset({0xE202, 0xE209, 0xE20B, 0xE20C, 0xE20D, 0xE210, 0xE211, 0xE212, 0xE215, 0xE216})
    | frozenset(range(0xE220, 0xE224)),
    "pvc": frozenset({0x0B69, 0x0B6E}) | frozenset(range(0x0BD4, 0x0BDC)),
    "lnl": frozenset({0x6420, 0x64A0, 0x64B0}),
    "acm": frozenset(range(0x5690, 0x5698))
    | frozenset(range(0x56A0, 0x56A7))
    | frozenset(range(0x56B0, 0x56B4))
    | frozenset(range(0x56BA, 0x56BE))
    | frozenset(range(0x56C0, 0x56C3)),
}


def probe() -> BackendProbe:
    return examine(ROOT, os.environ.get(MASK), installed_versions((*SPEC.distributions, *SPEC.optional)))


def examine(root: Path, mask: str | None, versions: dict[str, str]) -> BackendProbe:
    """What `probe` reports for a file system, ZE_AFFINITY_MASK and the installed versions."""
    installed = "+xpu" in versions["torch"]
    here = devices_of(root, {name: text for name, text in versions.items() if text})
    shown = visible(here, mask)
    if not here:
        reason = "no supported Intel GPU is here"
    elif not shown:
        reason = f"{MASK}={mask} hides every device"
    elif not installed:
        reason = f"torch {versions['torch'] or '(not installed)'} is not an XPU build"
    else:
        reason = ""
    names = tuple(f"{device.kind}:{device.arch}" for device in shown)
    return BackendProbe(not reason, reason, names, versions, installed, shown)


def devices_of(root: Path, versions: dict[str, str]) -> tuple[Device, ...]:
    """The known Intel GPUs that have a render node, in the nodes' order."""
    devices = []
    for node in sorted((root / "sys/class/drm").glob("renderD*")):
        arch = arch_of(read_text(node / "device/vendor"), read_text(node / "device/device"))
        if arch:
            name = f"Intel GPU {read_text(node / 'device/device')}"
            devices.append(Device("xpu", arch, name, 0, False, versions))
    return tuple(devices)


def arch_of(vendor: str, device: str) -> str:
    """Architecture of a PCI vendor and device id such as "0x8086" and "0xe20b"; "" for others."""
    try:
        number = int(device, 16)
    except ValueError:
        return ""
    return next((arch for arch, ids in PCI_IDS.items() if vendor == INTEL and number in ids), "")
