"""Looks for AMD devices in the kernel driver's topology and for what drives them, without importing torch."""

from __future__ import annotations

import os
from pathlib import Path

from omniplat.backend import BackendProbe
from omniplat.device import Device
from omniplat.host import ROOT, installed_versions, is_known, read_text, visible
from omniplat_rocm.spec import SPEC

TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"
MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def probe() -> BackendProbe:
    return examine(ROOT, tuple(os.environ.get(name) for name in MASKS), installed_versions(SPEC.distributions))


def examine(root: Path, masks: tuple[str | None, ...], versions: dict[str, str]) -> BackendProbe:
    """What `probe` reports for a file system, the values of `MASKS` and the installed versions."""
    installed = "+rocm" in versions["torch"]
    here = devices_of(root, {name: text for name, text in versions.items() if text})
    shown = here
    for mask in masks:
        shown = visible(shown, mask)
    known = tuple(device for device in shown if is_known(device))
    if not here:
        reason = "no AMD device is here"
    elif not shown:
        reason = f"{' and '.join(MASKS)} hide every device"
    elif not known:
        reason = f"{shown[0]} has an architecture that is not supported"
    elif not installed:
        reason = f"torch {versions['torch'] or '(not installed)'} is not a ROCm build"
    else:
        reason = ""
    names = tuple(f"{device.kind}:{device.arch}" for device in known)
    return BackendProbe(not reason, reason, names, versions, installed, known)


def devices_of(root: Path, versions: dict[str, str]) -> tuple[Device, ...]:
    """The GPUs of the driver's topology, in its order; CPU nodes of it have no SIMD units."""
    nodes = [node for node in (root / TOPOLOGY).glob("*") if node.name.isdecimal()]
    devices = []
    for node in sorted(nodes, key=lambda node: int(node.name)):
        properties = _properties(node / "properties")
        if properties.get("simd_count", 0) and properties.get("gfx_target_version", 0):
            memory = sum(
                _properties(bank).get("size_in_bytes", 0) for bank in sorted(node.glob("mem_banks/*/properties"))
            )
            arch = gfx_name(properties["gfx_target_version"])
            devices.append(Device("rocm", arch, read_text(node / "name"), memory, False, versions))
    return tuple(devices)


def gfx_name(target_version: int) -> str:
    """90402 -> gfx942, 90010 -> gfx90a, 110001 -> gfx1101: major, minor and stepping, the last two as one hex digit."""
    major, rest = divmod(target_version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
