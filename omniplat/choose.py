"""Which backend runs, on which device: explicit argument > OMNIPLAT_BACKEND > the one available accelerator.

Several available accelerators are an error that names them. None is the CPU, and the reason says so. A device that
is here while its backend fails is an error, never a reason to use the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omniplat.backend import BackendProbe, BackendSpec
from omniplat.device import Device, parse_device
from omniplat.errors import BackendLoadError, BackendUnavailableError, OmniplatError, UsageError
from omniplat.host import detect_cpu, kinds_with_nodes
from omniplat.registry import BACKENDS, PluginRecord, Registry, probe_backend

#: The environment variable that names a backend.
VARIABLE = "OMNIPLAT_BACKEND"
#: The backend of every machine.
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """The backend, the device it will run on, and why, as one sentence.

    `is_default` is True where nobody asked for it and no accelerator is usable here.
    """

    spec: BackendSpec
    device: Device
    reason: str
    is_default: bool = False


def choose_backend(
    device: Device | None, explicit: str | None, registry: Registry, environ: Mapping[str, str]
) -> ChosenBackend:
    """Apply the rule above. `device` None means this machine; a given device is kept.

    Raises BackendUnavailableError, BackendLoadError or another error of the registry, or UsageError where several
    backends could be meant.
    """
    for name, origin in ((explicit, "asked for"), (environ.get(VARIABLE), f"named by {VARIABLE}")):
        if name:
            return _named(name, device, registry, f"backend {name} was {origin}")
    return _automatic(registry) if device is None else _for_device(device, registry)


def backend_devices(spec: BackendSpec, probe: BackendProbe) -> tuple[Device, ...]:
    """The devices that a probe found, detected; the CPU where a backend of that kind does not say."""
    if probe.found:
        return probe.found
    if probe.devices:
        versions = {name: text for name, text in probe.versions.items() if text}
        return tuple(replace(parse_device(text), described=False, versions=versions) for text in probe.devices)
    return (detect_cpu(),) if CPU in spec.kinds else ()


def require_present(spec: BackendSpec, device: Device) -> None:
    """Raise BackendUnavailableError unless the backend's probe finds a usable device of this kind and architecture."""
    probe = probe_backend(spec)
    found = backend_devices(spec, probe)
    if not any((item.kind, item.arch) == (device.kind, device.arch) for item in found):
        here = ", ".join(map(str, found))
        problem = f"{device} is not here" + (f", but {here}" if here else f": {probe.reason}" if probe.reason else "")
        raise BackendUnavailableError(spec.name, problem)
    if not probe.available:
        raise BackendUnavailableError(spec.name, probe.reason)


def _named(name: str, device: Device | None, registry: Registry, reason: str) -> ChosenBackend:
    spec = registry.load(BACKENDS, name)
    if device is not None:
        if device.kind not in spec.kinds:
            raise BackendUnavailableError(name, f"it serves {', '.join(spec.kinds)}, and the device is {device}")
        return ChosenBackend(spec, device, reason)
    probe = probe_backend(spec)
    devices = backend_devices(spec, probe)
    if not devices or not (probe.available or CPU in spec.kinds):
        raise BackendUnavailableError(name, probe.reason or f"no {' or '.join(spec.kinds)} device is here")
    return ChosenBackend(spec, devices[0], reason)


def _for_device(device: Device, registry: Registry) -> ChosenBackend:
    records = registry.examine(BACKENDS)
    serving = [record.loaded for record in records if record.loaded and device.kind in record.loaded.kinds]
    if device.kind == CPU:
        # The built-in backend stands for the CPU however many plugins serve that kind too.
        return ChosenBackend(registry.load(BACKENDS, CPU), device, "the cpu backend serves cpu devices")
    if len(serving) > 1:
        raise UsageError(*_several([(spec.name, str(device)) for spec in serving]))
    if not serving:
        _raise_broken(records, device.kind)
        raise BackendUnavailableError(device.kind, f"no installed backend serves {device.kind} devices")
    return ChosenBackend(serving[0], device, f"{serving[0].name} is the backend that serves {device.kind} devices")


def _automatic(registry: Registry) -> ChosenBackend:
    records = registry.examine(BACKENDS)
    remarks = [f"backend {record.plugin.name} is {record.state}" for record in records if record.loaded is None]
    accelerators = [record.loaded for record in records if record.loaded and CPU not in record.loaded.kinds]
    usable: list[tuple[BackendSpec, Device]] = []
    failures: list[tuple[BackendSpec, OmniplatError]] = []
    for spec in accelerators:
        try:
            probe = probe_backend(spec)
        except OmniplatError as error:
            failures.append((spec, error))
            continue
        for device in backend_devices(spec, probe)[:1]:
            if not probe.installed:
                remarks.append(f"{device} is here but not set up: {probe.reason}; {spec.install}")
            elif not probe.available:
                raise BackendUnavailableError(spec.name, probe.reason)
            elif not spec.capabilities:
                remarks.append(f"{device} is here but backend {spec.name} has no kernels yet")
            else:
                usable.append((spec, device))
    if len(usable) > 1:
        raise UsageError(*_several([(spec.name, str(device)) for spec, device in usable]))
    if usable:
        spec, device = usable[0]
        return ChosenBackend(spec, device, f"{device} is the one available accelerator")
    _refuse_cpu(kinds_with_nodes(), accelerators, failures, records)
    remarks += [error.message for _, error in failures]
    spec = registry.load(BACKENDS, CPU)
    device = backend_devices(spec, probe_backend(spec))[0]
    reason = "; ".join(["no accelerator is available here, so the CPU", *remarks])
    return ChosenBackend(spec, device, reason, is_default=True)


def _refuse_cpu(
    kinds_here: tuple[str, ...],
    accelerators: list[BackendSpec],
    failures: list[tuple[BackendSpec, OmniplatError]],
    records: tuple[PluginRecord[BackendSpec], ...],
) -> None:
    """Raise where an accelerator's device nodes are here and what should drive them fails."""
    for spec, error in failures:
        if any(kind in kinds_here for kind in spec.kinds):
            raise error
    for kind in kinds_here:
        if not any(kind in spec.kinds for spec in accelerators):
            _raise_broken(records, kind)


def _several(choices: list[tuple[str, str]]) -> tuple[str, dict[str, object]]:
    names = ", ".join(f"{name} ({device})" for name, device in choices)
    message = f"several backends are available: {names}; choose one with --device, --backend or {VARIABLE}"
    return message, {"available": [name for name, _ in choices]}


def _raise_broken(records: tuple[PluginRecord[BackendSpec], ...], kind: str) -> None:
    """A device of `kind` is wanted and no backend that works serves it: one that does not load may be the one."""
    for record in records:
        if record.error is not None:
            problem = f"{record.problem} (a {kind} device may be its own)"
            raise BackendLoadError(
                record.plugin.name, problem, distribution=record.plugin.distribution
            ) from record.error
