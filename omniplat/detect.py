"""The devices of this machine, and what `--device` means."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from omniplat.choose import backend_devices, choose_backend
from omniplat.device import Device, parse_device
from omniplat.errors import InvalidDeviceError, OmniplatError
from omniplat.host import detect_cpu
from omniplat.registry import BACKENDS, Registry, default_registry, probe_backend

INFO_SCHEMA = "omniplat.info/1"


def detect_devices(registry: Registry | None = None) -> tuple[Device, ...]:
    """The CPU and every accelerator that some backend's probe sees. A backend that fails contributes none."""
    registry = registry or default_registry()
    devices = [detect_cpu()]
    for record in registry.examine(BACKENDS):
        if record.loaded is None:
            continue
        try:
            found = backend_devices(record.loaded, probe_backend(record.loaded))
        except OmniplatError:
            continue
        devices += [device for device in found if device.kind != "cpu"]
    return tuple(devices)


def resolve_device(
    text: str | None, registry: Registry | None = None, environ: Mapping[str, str] | None = None
) -> Device:
    """The device that `--device TEXT` names.

    None          this machine: the device of the backend that would be chosen
    `kind:arch`   described; nobody looks at hardware
    `kind`        the detected device of that kind, else its most common architecture, described
    a .json file  the device that `omniplat info --json` reported on another machine

    Raises InvalidDeviceError, or for None what `choose_backend` raises.
    """
    registry = registry or default_registry()
    if text is None:
        return choose_backend(None, None, registry, os.environ if environ is None else environ).device
    text = text.strip()
    if text.endswith(".json") or os.sep in text:
        return read_device(Path(text))
    described = parse_device(text)
    if ":" in text:
        return described
    if described.kind == "cpu":
        return detect_cpu()
    return next((device for device in detect_devices(registry) if device.kind == described.kind), described)


def detected(device: Device, registry: Registry) -> Device:
    """The device of this machine that a described one of the same kind and architecture stands for, with its name,
    memory and versions; the described one where there is none."""
    if not device.described:
        return device
    wanted = (device.kind, device.arch)
    return next((found for found in detect_devices(registry) if (found.kind, found.arch) == wanted), device)


class _DeviceRecord(msgspec.Struct, frozen=True):
    kind: str
    arch: str
    name: str = ""
    memory: int = 0
    versions: dict[str, str] = {}


class _InfoFile(msgspec.Struct, frozen=True):
    """What is read of an `omniplat info --json` document; its other keys are ignored."""

    schema: str
    devices: list[_DeviceRecord]
    default_device: str = ""


def read_device(path: Path) -> Device:
    """The default device of a machine that `omniplat info --json` described; raises InvalidDeviceError."""
    try:
        info = msgspec.json.decode(path.read_bytes(), type=_InfoFile)
    except OSError as error:
        raise InvalidDeviceError(str(path), f"cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise InvalidDeviceError(str(path), f"is not the output of `omniplat info --json`: {error}") from error
    if info.schema != INFO_SCHEMA:
        raise InvalidDeviceError(str(path), f"has schema {info.schema!r}, needs {INFO_SCHEMA!r}")
    devices = [
        Device(
            parse_device(f"{found.kind}:{found.arch}").kind, found.arch, found.name, found.memory, False, found.versions
        )
        for found in info.devices
    ]
    chosen = [device for device in devices if f"{device.kind}:{device.arch}" == info.default_device]
    if not devices:
        raise InvalidDeviceError(str(path), "lists no device")
    return (chosen or devices)[0]
