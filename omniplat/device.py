"""Devices: a kind, an architecture and what is known of one; detected here or described by a string."""

from __future__ import annotations

from dataclasses import dataclass, field

from omniplat.errors import InvalidDeviceError

#: kind -> architectures, least capable first; and the one a bare kind stands for when none is detected.
ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "cpu": ("avx2", "avx512", "amx", "neon", "generic"),
    "cuda": ("sm75", "sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"),
    "rocm": ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1200", "gfx1201"),
    "xpu": ("bmg", "pvc", "lnl", "acm"),
    "npu": ("310p", "a2", "a3", "a5"),
}
DEFAULT_ARCH: dict[str, str] = {"cpu": "avx2", "cuda": "sm90", "rocm": "gfx950", "xpu": "bmg", "npu": "a5"}


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or the CPU.

    `described` is True when nobody looked at hardware. `memory` is in bytes, 0 when unknown. `versions` maps
    distribution names to versions for a detected device. `emulated` is True where the vendor's operators run on the
    CPU in place of the device: what such a device runs is evidence of its own kind, and needs no vendor distribution.
    """

    kind: str
    arch: str
    name: str = ""
    memory: int = 0
    described: bool = True
    versions: dict[str, str] = field(default_factory=dict, hash=False)
    emulated: bool = False

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" + (f" ({self.name})" if self.name else "")


def parse_device(text: str) -> Device:
    """A described device from `kind` or `kind:arch`; raises InvalidDeviceError."""
    kind, colon, arch = text.strip().partition(":")
    if kind not in ARCHITECTURES:
        raise InvalidDeviceError(text, f"kind {kind!r} is none of {', '.join(ARCHITECTURES)}")
    if not colon:
        arch = DEFAULT_ARCH[kind]
    if arch not in ARCHITECTURES[kind]:
        index = f", and devices have no index here: {kind!r} is the one of this machine" if arch.isdecimal() else ""
        known = ", ".join(ARCHITECTURES[kind])
        raise InvalidDeviceError(text, f"{kind} has no architecture {arch!r}{index}; known: {known}")
    return Device(kind, arch)
