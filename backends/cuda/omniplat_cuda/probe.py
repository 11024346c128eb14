"""Looks for NVIDIA devices and for what drives them, without importing torch."""

from __future__ import annotations

import os
import shutil

from omniplat.backend import BackendProbe
from omniplat.device import Device
from omniplat.errors import BackendUnavailableError
from omniplat.host import installed_versions, is_known, kinds_with_nodes, run_tool, visible
from omniplat_cuda.spec import SPEC

QUERY = ("nvidia-smi", "--query-gpu=uuid,compute_cap,memory.total,name", "--format=csv,noheader,nounits")


def probe() -> BackendProbe:
    versions = installed_versions((*SPEC.distributions, *SPEC.optional))
    has_nodes = "cuda" in kinds_with_nodes()
    if not has_nodes and shutil.which(QUERY[0]) is None:
        return BackendProbe(False, "no NVIDIA device is here", versions=versions, installed=has_cuda(versions["torch"]))
    return examine(run_tool(QUERY), has_nodes, os.environ.get("CUDA_VISIBLE_DEVICES"), versions)


def examine(answer: str, has_nodes: bool, mask: str | None, versions: dict[str, str]) -> BackendProbe:
    """What `probe` reports for nvidia-smi's answer, the presence of device nodes and CUDA_VISIBLE_DEVICES."""
    installed = has_cuda(versions["torch"])
    devices = parse_answer(answer, {name: text for name, text in versions.items() if text})
    if not devices:
        if has_nodes:
            raise BackendUnavailableError(SPEC.name, "an NVIDIA device is here, but nvidia-smi lists none")
        return BackendProbe(False, "no NVIDIA device is here", versions=versions, installed=installed)
    shown = visible(tuple(devices.values()), _indices(mask, tuple(devices)))
    known = tuple(device for device in shown if is_known(device))
    if not shown:
        reason = f"CUDA_VISIBLE_DEVICES={mask} hides every device"
    elif not known:
        reason = f"{shown[0]} has an architecture that is not supported"
    elif not versions["torch"]:
        reason = "torch is not installed"
    elif not installed:
        reason = f"torch {versions['torch']} is not a CUDA build"
    else:
        reason = ""
    names = tuple(f"{device.kind}:{device.arch}" for device in known)
    return BackendProbe(not reason, reason, names, versions, installed, known)


def has_cuda(torch_version: str) -> bool:
    """True for a CUDA build of torch: the index's has no local label, PyTorch's own are +cuNNN."""
    label = torch_version.partition("+")[2]
    return bool(torch_version) and (not label or label.startswith("cu"))


def parse_answer(answer: str, versions: dict[str, str]) -> dict[str, Device]:
    """uuid -> device, in the driver's order, from nvidia-smi's answer to `QUERY`."""
    devices = {}
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",", 3)]
        if len(fields) != 4 or not fields[1].replace(".", "").isdecimal():
            continue
        uuid, capability, mebibytes, name = fields
        memory = int(mebibytes) << 20 if mebibytes.isdecimal() else 0
        devices[uuid] = Device("cuda", "sm" + capability.replace(".", ""), name, memory, False, versions)
    return devices


def _indices(mask: str | None, uuids: tuple[str, ...]) -> str | None:
    """The mask with device uuids, whole or cut, written as indices."""
    if mask is None:
        return None
    words = [word.strip() for word in mask.split(",")]
    found = {word: [i for i, uuid in enumerate(uuids) if word and uuid.startswith(word)] for word in words}
    return ",".join(str(found[word][0]) if len(found[word]) == 1 else word for word in words)
