"""Machines that are not here, as a registry whose backends see what a test says."""

from __future__ import annotations

from typing import Any, TypeVar

from omniplat.backend import BackendProbe, BackendSpec
from omniplat.capability import Capability
from omniplat.device import Device
from omniplat.errors import BackendLoadError, BackendUnavailableError
from omniplat.registry import BACKENDS, Plugin, PluginGroup, Registry

T = TypeVar("T")

KERNEL = Capability(name="some", op="linear", weights=("*",), activations=("*",))


def sees_cuda() -> BackendProbe:
    return BackendProbe(True, found=(Device("cuda", "sm90", "H200", 1 << 37, False),))


def sees_npu() -> BackendProbe:
    return BackendProbe(True, devices=("npu:a2", "npu:a2"), versions={"torch-npu": "2.13.0", "torch": ""})


def sees_nothing() -> BackendProbe:
    return BackendProbe(False, "no device is here")


def lacks_runtime() -> BackendProbe:
    return BackendProbe(False, "torch 2.13.0+cpu is not a CUDA build", devices=("cuda:sm90",), installed=False)


def does_not_run() -> BackendProbe:
    return BackendProbe(False, "the CANN toolkit is not found", devices=("npu:a2",))


def does_not_answer() -> BackendProbe:
    raise BackendUnavailableError("cuda", "an NVIDIA device is here, but nvidia-smi lists none")


def breaks() -> BackendProbe:
    raise OSError("no such file")


def returns_no_probe() -> str:
    return "fine"


def backend(name: str, kind: str, probe: str = "", kernels: int = 1) -> BackendSpec:
    function = f"tests.registry.machines:{probe}" if probe else ""
    return BackendSpec(name, 1, (kind,), (KERNEL,) * kernels, function, f'pip install "omniplat[{name}]"')


class Machine(Registry):
    """A registry that holds these backends; a name that maps to None fails to load."""

    def __init__(self, *specs: BackendSpec, broken: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.specs: dict[str, BackendSpec | None] = {spec.name: spec for spec in (backend("cpu", "cpu"), *specs)}
        self.specs.update(dict.fromkeys(broken))

    def plugins(self, group: PluginGroup[Any]) -> tuple[Plugin, ...]:
        if group.name != BACKENDS.name:
            return ()
        return tuple(
            Plugin(group.name, name, "", (f"omniplat-{name} 1",), f"pip install {name}") for name in sorted(self.specs)
        )

    def load(self, group: PluginGroup[T], name: str) -> T:
        spec = self.specs[name]
        if spec is None:
            raise BackendLoadError(name, "RuntimeError: driver and runtime disagree", distribution=f"omniplat-{name} 1")
        assert group.accepts(spec)
        return spec
