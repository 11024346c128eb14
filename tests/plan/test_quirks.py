"""Every quirk that a backend knows is told by a plan that uses one of its kernels, where it concerns the device."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from omniplat.backend import BackendSpec, Quirk
from omniplat.capability import Capability, matches
from omniplat.conformance.canonical_file import plan_canonical
from omniplat.conformance.cases import schemes_once
from omniplat.conformance.checks import Named
from omniplat.conformance.files import write_model
from omniplat.conformance.subject import Subject, equipped
from omniplat.device import ARCHITECTURES

PACKAGES = {"cuda": "omniplat_cuda", "rocm": "omniplat_rocm", "xpu": "omniplat_xpu", "npu": "omniplat_ascend"}
SPECS: dict[str, BackendSpec] = {kind: import_module(f"{name}.spec").SPEC for kind, name in PACKAGES.items()}


def told(quirk: Quirk, arch: str, capability: Capability) -> bool:
    return matches(quirk.kernels, capability.name) and (not quirk.archs or arch in quirk.archs)


def architectures(kind: str, capability: Capability) -> tuple[str, ...]:
    """One that a kernel runs on for every set of quirks that it has somewhere."""
    every = capability.archs or ARCHITECTURES[kind]
    sets = {tuple(told(quirk, arch, capability) for quirk in SPECS[kind].quirks): arch for arch in every}
    return tuple(arch for told_here, arch in sets.items() if any(told_here))


#: Kind of device, architecture, capability.
USES = [
    (kind, arch, capability)
    for kind, spec in SPECS.items()
    for capability in spec.capabilities
    for arch in architectures(kind, capability)
]


@pytest.mark.parametrize(("kind", "arch", "capability"), USES, ids=[f"{k}:{a}-{c.name}" for k, a, c in USES])
def test_quirks_are_told(kind: str, arch: str, capability: Capability, tmp_path: Path) -> None:
    spec = SPECS[kind]
    subject = Subject(spec, equipped(kind, arch))
    scheme = next(iter(schemes_once(subject, capability, "quick")))
    written = write_model(tmp_path, Named("", capability, scheme), experts=3 if capability.op == "moe" else 0)
    planned = plan_canonical(written, subject, capability)
    assert capability.name in {item.layer.kernel for item in planned.layers}
    found = [item.message for item in planned.plan.findings if item.code == "known-quirk"]
    wanted = [
        f"{capability.name}: {quirk.text} ({quirk.source})" for quirk in spec.quirks if told(quirk, arch, capability)
    ]
    assert sorted(text for text in found if "https://" in text) == sorted(wanted)


def test_every_quirk_is_told_somewhere() -> None:
    for kind, spec in SPECS.items():
        for quirk in spec.quirks:
            assert any(told(quirk, arch, capability) for name, arch, capability in USES if name == kind), quirk.text
