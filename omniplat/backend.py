"""BackendSpec: what a backend plugin exports through the entry-point group `omniplat.backends`."""

from __future__ import annotations

from dataclasses import dataclass, field

from omniplat.capability import Capability
from omniplat.device import Device

#: Interface versions of backend plugins that this omniplat speaks.
SUPPORTED_API_VERSIONS: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class NotSupported:
    """A combination that a backend will not run: `status` is "never", "upstream" or "todo"; reason required."""

    pattern: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class Quirk:
    """What a vendor's library does otherwise than one would expect, and this backend works around.

    `kernels` are patterns (fnmatch) of the names of the capabilities that it concerns; a plan that uses one, on one of
    `archs` (empty: any), says `text`. `source` is a link to where the library shows it.
    """

    kernels: tuple[str, ...]
    text: str
    source: str
    archs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Declared data of one backend. Loading it imports neither torch nor a vendor library.

    `kinds`         device kinds it serves ("cuda").
    `probe`         "module:function" returning a `BackendProbe`; called only when the backend is examined. It raises
                    BackendUnavailableError where a device is here and its driver does not answer.
    `install`       the pip line that installs its runtime.
    `distributions` vendor distributions, as requirement strings, that the backend's extra brings.
    `optional`      others that kernels can use where they are installed. No plan for a described device assumes them.
    """

    name: str
    api_version: int
    kinds: tuple[str, ...]
    capabilities: tuple[Capability, ...]
    probe: str = ""
    install: str = ""
    distributions: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    quirks: tuple[Quirk, ...] = ()
    not_supported: tuple[NotSupported, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendProbe:
    """What examining a backend on this machine found.

    `available`  a device is here and the runtime that drives it loads.
    `reason`     why not, when it is not.
    `devices`    names of the devices, as `kind:arch` strings the planner takes. They may be here and not usable.
    `versions`   distribution -> installed version ("" where it is missing).
    `installed`  the distributions without which no device can be driven are installed. A device that is here
                 and not available is an error of that backend when True, and merely not set up when False.
    `found`      the devices again, with name and memory, where the probe can tell.
    """

    available: bool
    reason: str = ""
    devices: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    installed: bool = True
    found: tuple[Device, ...] = ()
