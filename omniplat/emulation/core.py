"""Switching an emulation on and off: registering a vendor's operators on the CPU for as long as a context lasts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version

from omniplat.device import Device, parse_device
from omniplat.emulation.schemas import OpSchema, of_version
from omniplat.errors import UsageError


class VendorError(RuntimeError):
    """What the vendor's library refuses. A RuntimeError, as torch's own checks raise it."""

    def __init__(self, op: str, problem: str) -> None:
        super().__init__(f"{op}: {problem}")
        self.op = op
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Violation:
    """A call that the vendor's library accepts and computes something else with, without a word.

    `rule` is a short name ("bias-dropped"), `detail` one sentence.
    """

    op: str
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.op}: {self.rule}: {self.detail}"


@dataclass(slots=True)
class Emulation:
    """A device whose operators run on the CPU.

    `device` is what to plan for and load onto; tensors lie on the CPU. `version` is that of the vendor's library.
    `violations` grows by what calls would silently get wrong; the conformance suite asserts that it stays empty.
    `laid_out` holds what functions that lay weights out have returned, as (layout, digest of the bytes): bytes survive
    copies, views and state dicts, which attributes of a tensor do not.
    """

    device: Device
    version: Version
    violations: list[Violation] = field(default_factory=list)
    laid_out: set[tuple[tuple[int, ...], bytes]] = field(default_factory=set, repr=False)

    @property
    def arch(self) -> str:
        return self.device.arch

    def require(self, op: str, condition: bool, problem: str) -> None:
        """Raise VendorError where the vendor's check of a call fails."""
        if not condition:
            raise VendorError(op, problem)

    def record(self, op: str, rule: str, detail: str) -> None:
        """Remember a call that the vendor would silently get wrong."""
        self.violations.append(Violation(op, rule, detail))


#: An emulated operator: the emulation, then the arguments of its schema.
Implementation = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Vendor:
    """How one kind of device is emulated.

    `library`       the distribution whose schemas these are; `version` the one that is emulated unless another is
                    asked for, `known` all that may be.
    `loaded_as`     modules that are in `sys.modules` where the real library is loaded.
    `operators`     qualified name of a schema -> its implementation.
    `modules`       Python modules that the vendor has instead of operators: name -> what makes a stand-in of it.
    `functions`     the signatures of what is in them.
    """

    kind: str
    library: str
    version: str
    known: tuple[str, ...]
    loaded_as: tuple[str, ...]
    schemas: tuple[OpSchema, ...] = ()
    operators: Mapping[str, Implementation] = field(default_factory=dict)
    modules: Mapping[str, Callable[[Emulation], ModuleType]] = field(default_factory=dict)
    functions: tuple[OpSchema, ...] = ()


#: kind of device -> "module:attribute" of its Vendor.
VENDORS: Mapping[str, str] = {
    "cuda": "omniplat.emulation.cuda:VENDOR",
    "npu": "omniplat.emulation.ascend:VENDOR",
    "rocm": "omniplat.emulation.rocm:VENDOR",
    "xpu": "omniplat.emulation.xpu:VENDOR",
}


def vendor_of(kind: str) -> Vendor:
    """How devices of that kind are emulated; raises UsageError where they are not."""
    if kind not in VENDORS:
        raise UsageError(f"nothing emulates {kind} devices; emulated are: {', '.join(VENDORS)}")
    module, _, name = VENDORS[kind].partition(":")
    vendor = getattr(import_module(module), name)
    assert isinstance(vendor, Vendor)
    return vendor


@contextmanager
def emulate(device: str, *, version: str = "") -> Iterator[Emulation]:
    """Emulate `device` ("npu:a5") until the context is left; `version` is that of the vendor's library.

    Raises UsageError where nothing emulates that kind or version, and where the real library is loaded or its
    operators are registered: what runs would not be known.
    """
    described = parse_device(device)
    vendor = vendor_of(described.kind)
    used = version or vendor.version
    if used not in vendor.known:
        raise UsageError(f"nothing emulates {vendor.library} {used}; emulated are: {', '.join(vendor.known)}")
    schemas = of_version(vendor.schemas, used)
    _refuse_the_real_one(vendor, schemas)
    name = f"emulated, {vendor.library} {used}"
    versions = {vendor.library: used}
    target = Device(described.kind, described.arch, name, described=False, versions=versions, emulated=True)
    emulation = Emulation(target, Version(used))
    with ExitStack() as stack:
        for namespace in sorted({schema.namespace for schema in schemas}):
            library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
            stack.callback(library._destroy)
            for schema in schemas:
                if schema.namespace == namespace:
                    _register(library, schema, vendor, emulation)
        for name, make in vendor.modules.items():
            sys.modules[name] = make(emulation)
            stack.callback(sys.modules.pop, name)
        yield emulation


def _register(library: torch.library.Library, schema: OpSchema, vendor: Vendor, emulation: Emulation) -> None:
    library.define(schema.text)  # type: ignore[no-untyped-call]
    if schema.archs and emulation.arch not in schema.archs:
        call = partial(_not_here, emulation, schema)
    else:
        call = partial(vendor.operators[schema.qualified], emulation)
    library.impl(schema.name, call, "CPU")  # type: ignore[no-untyped-call]


def _not_here(emulation: Emulation, schema: OpSchema, *args: Any, **kwargs: Any) -> Any:
    raise VendorError(schema.qualified, f"is for {', '.join(schema.archs)}, the device is {emulation.arch}")


def _refuse_the_real_one(vendor: Vendor, schemas: tuple[OpSchema, ...]) -> None:
    loaded = [name for name in (*vendor.loaded_as, *vendor.modules) if name in sys.modules]
    if loaded:
        raise UsageError(f"{', '.join(loaded)} is loaded: the real library and its emulation exclude each other")
    registered = set(torch._C._dispatch_get_all_op_names())
    taken = sorted({schema.qualified for schema in schemas} & registered)
    if taken:
        raise UsageError(
            f"{taken[0]} is registered already: a device can be emulated once, and not beside the real one"
        )
