"""Facts about this machine that need no torch and no vendor library. Probes of backends are built from them.

Every function that reads the file system takes its root, so that tests describe machines as folders.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from packaging.requirements import Requirement

from omniplat.device import ARCHITECTURES, Device

ROOT = Path("/")

#: Where the kernel shows a device of each kind. Only what tells the kind beyond doubt (a DRM node does not).
DEVICE_NODES: dict[str, str] = {"cuda": "dev/nvidia[0-9]*", "rocm": "dev/kfd", "npu": "dev/davinci[0-9]*"}

#: Distribution -> others that bring the same modules: torch's builds for AMD and Intel devices come with Triton under
#: names of their own, which changed over torch's releases.
_ALSO_KNOWN_AS: dict[str, tuple[str, ...]] = {
    "triton": ("triton-rocm", "pytorch-triton-rocm", "triton-xpu", "pytorch-triton-xpu"),
}

T = TypeVar("T")


def kinds_with_nodes(root: Path = ROOT) -> tuple[str, ...]:
    """Kinds of accelerators whose device nodes exist here, whether or not anything can drive them."""
    return tuple(kind for kind, pattern in DEVICE_NODES.items() if any(root.glob(pattern)))


def read_text(path: Path) -> str:
    """The text of a small system file, stripped; "" when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def run_tool(argv: tuple[str, ...], timeout: float = 10.0) -> str:
    """Standard output of a vendor's tool; "" when it is missing, fails or hangs."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def installed_version(distribution: str) -> str:
    """Version of an installed distribution, or of one that brings the same; "" when none is. Imports nothing of it."""
    for name in (distribution, *_ALSO_KNOWN_AS.get(distribution, ())):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def installed_versions(requirements: Iterable[str]) -> dict[str, str]:
    """Distribution -> installed version ("" where missing), for requirement strings such as "torch>=2.6"."""
    return {name: installed_version(name) for name in (Requirement(text).name for text in requirements)}


def visible(devices: tuple[T, ...], mask: str | None) -> tuple[T, ...]:
    """The devices that a `*_VISIBLE_DEVICES` variable leaves, in its order. None leaves all.

    Numbers are indices; as the vendors' runtimes do, the list ends at the first entry that names no device.
    """
    if mask is None:
        return devices
    kept: list[T] = []
    for word in mask.split(","):
        index = word.strip().partition(".")[0]
        if not index.isdecimal() or int(index) >= len(devices):
            break
        kept.append(devices[int(index)])
    return tuple(kept)


def is_known(device: Device) -> bool:
    """True if the planner knows the device's architecture."""
    return device.arch in ARCHITECTURES.get(device.kind, ())


def detect_cpu(root: Path = ROOT, machine: str | None = None) -> Device:
    """This machine's CPU: architecture by its vector and matrix units, name, and main memory in bytes."""
    machine = machine or platform.machine()
    cpuinfo = read_text(root / "proc/cpuinfo")
    flags = set(_field(cpuinfo, "flags").split())
    if machine in ("aarch64", "arm64"):
        arch = "neon"
    elif "amx_tile" in flags and "avx512f" in flags:
        arch = "amx"
    elif "avx512f" in flags:
        arch = "avx512"
    elif "avx2" in flags:
        arch = "avx2"
    else:
        arch = "generic"
    name = _field(cpuinfo, "model name") or platform.processor() or machine
    versions = {found: text for found, text in installed_versions(("torch", "numpy", "ml-dtypes")).items() if text}
    return Device("cpu", arch, name=name, memory=_main_memory(root), described=False, versions=versions)


def _field(cpuinfo: str, key: str) -> str:
    match = re.search(rf"^{key}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else ""


def _main_memory(root: Path) -> int:
    match = re.search(r"^MemTotal:\s*(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    if match:
        return int(match[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
