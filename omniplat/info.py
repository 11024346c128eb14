"""What `omniplat info` reports: devices, backends, formats and versions of this machine, as frozen data."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from omniplat._version import __version__
from omniplat.backend import BackendProbe, BackendSpec
from omniplat.choose import choose_backend
from omniplat.detect import INFO_SCHEMA, detect_devices
from omniplat.device import Device
from omniplat.errors import OmniplatError
from omniplat.host import installed_versions
from omniplat.registry import (
    BACKENDS,
    FORMATS,
    MODELS,
    PluginGroup,
    PluginRecord,
    Registry,
    default_registry,
    probe_backend,
)

#: Distributions whose versions decide what runs, beside those that backends name.
CORE_DISTRIBUTIONS = ("torch", "numpy", "ml-dtypes", "safetensors", "stevedore", "vllm", "vllm-omni")


@dataclass(frozen=True, slots=True)
class BackendReport:
    """One backend on this machine.

    `state`   "available", "unavailable" (loads, cannot run here), "not-installed", "broken", "conflict" or
              "incompatible"; `reason` says why it is not available.
    `capabilities`   how many kernels it declares.
    """

    name: str
    distribution: str
    state: str
    reason: str = ""
    kinds: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    capabilities: int = 0
    install: str = ""
    versions: dict[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class PluginReport:
    """A plugin of another group: `state` is "loads", "not-installed", "broken" or "conflict"."""

    name: str
    distribution: str
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DefaultChoice:
    """What runs when nothing is asked for; `backend` and `device` are empty when `reason` is an error."""

    backend: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class Info:
    """The whole report."""

    python: str
    platform: str
    versions: Mapping[str, str]
    devices: tuple[Device, ...]
    default: DefaultChoice
    backends: tuple[BackendReport, ...]
    formats: tuple[PluginReport, ...]
    models: tuple[PluginReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `omniplat info --json`; `--device FILE.json` reads it back."""
        return {
            "schema": INFO_SCHEMA,
            "omniplat": __version__,
            "python": self.python,
            "platform": self.platform,
            "versions": dict(self.versions),
            "devices": [asdict(device) for device in self.devices],
            "default_device": self.default.device,
            "default_backend": self.default.backend,
            "default_reason": self.default.reason,
            "backends": [asdict(backend) for backend in self.backends],
            "formats": [asdict(plugin) for plugin in self.formats],
            "models": [asdict(plugin) for plugin in self.models],
        }


def collect_info(registry: Registry | None = None, environ: Mapping[str, str] | None = None) -> Info:
    """Examine this machine. A plugin or probe that fails is part of the answer; nothing is raised for it."""
    registry = registry or default_registry()
    versions = installed_versions(CORE_DISTRIBUTIONS)
    return Info(
        python=platform.python_version(),
        platform=platform.platform(),
        versions={name: text for name, text in versions.items() if text},
        devices=detect_devices(registry),
        default=_default_choice(registry, os.environ if environ is None else environ),
        backends=backend_reports(registry),
        formats=_plugin_reports(registry, FORMATS),
        models=_plugin_reports(registry, MODELS),
    )


def backend_reports(registry: Registry | None = None) -> tuple[BackendReport, ...]:
    """Every installed backend, sorted by name, with what it can do here and why not."""
    records = (registry or default_registry()).examine(BACKENDS)
    return tuple(_report(record) for record in records)


def _report(record: PluginRecord[BackendSpec]) -> BackendReport:
    plugin, spec = record.plugin, record.loaded
    if spec is None:
        return BackendReport(plugin.name, plugin.distribution, record.state, record.problem, install=plugin.install)
    try:
        probe = probe_backend(spec)
    except OmniplatError as error:
        probe = BackendProbe(available=False, reason=error.message)
    return BackendReport(
        name=plugin.name,
        distribution=plugin.distribution,
        state="available" if probe.available else "unavailable",
        reason=probe.reason,
        kinds=spec.kinds,
        devices=probe.devices,
        capabilities=len(spec.capabilities),
        install=spec.install or plugin.install,
        versions=probe.versions,
    )


def _plugin_reports(registry: Registry, group: PluginGroup[Any]) -> tuple[PluginReport, ...]:
    return tuple(
        PluginReport(record.plugin.name, record.plugin.distribution, record.state, record.problem)
        for record in registry.examine(group)
    )


def _default_choice(registry: Registry, environ: Mapping[str, str]) -> DefaultChoice:
    try:
        chosen = choose_backend(None, None, registry, environ)
    except OmniplatError as error:
        return DefaultChoice("", "", error.message)
    return DefaultChoice(chosen.spec.name, f"{chosen.device.kind}:{chosen.device.arch}", chosen.reason)
