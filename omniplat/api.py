"""The Python interface: `plan` and `load`. The command line is a thin skin over these functions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omniplat.capability import matches
from omniplat.checkpoint.folder import Checkpoint, open_checkpoint
from omniplat.choose import CPU, choose_backend, require_present
from omniplat.detect import detected, resolve_device
from omniplat.device import Device
from omniplat.document import Plan, PlanLayer
from omniplat.engines import ENGINES
from omniplat.errors import (
    BackendNotInstalledError,
    InvalidCheckpointError,
    InvalidDeviceError,
    UnknownFormatError,
    UnsupportedCombinationError,
    UsageError,
)
from omniplat.match import ALLOWANCES, PREFERENCES, Policy
from omniplat.planner import Divide, Planned, PlannedLayer, Target, make_plan
from omniplat.preflight import Scan
from omniplat.registry import BACKENDS, FORMATS, MODELS, Registry, default_registry, is_installed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from omniplat.runtime.slicer import Rank

#: The environment variable behind `--prefer`.
PREFER_VARIABLE = "OMNIPLAT_PREFER"


def plan(
    checkpoint: str | os.PathLike[str],
    device: str | Device | None = None,
    *,
    backend: str | None = None,
    tp: int = 1,
    ep: int = 1,
    component: str | None = None,
    allow: Iterable[str] = (),
    prefer: str | None = None,
    engine: str | None = None,
    revision: str | None = None,
    method: str | None = None,
    scan_scales: bool = False,
) -> Plan:
    """What runs every layer of `checkpoint` on `device`, and why. Reads headers, and scales where they alone decide
    whether a layer of a checkpoint on disk runs at all; needs no torch.

    `checkpoint` is a path or, where no such path exists, an id of the Hugging Face Hub (`org/name`, extra `hub`), of
    which `revision` is a branch, tag or commit. `method` (a dialect, a weight id or its stem) confirms what is stored:
    it changes nothing, and another one is a UsageError. With `scan_scales` the scales are read as well, of a checkpoint
    on disk: those that are not finite are findings, and layers of MX weights have `scale_spans`. `device` is "kind",
    "kind:arch", a Device or None for this machine; with `engine` ("vllm") the plan also says what that engine's own
    loader cannot deliver. Raises InvalidCheckpointError for files that cannot be read, InvalidDeviceError, UsageError,
    or a Backend...Error; what is wrong with the metadata or unsupported is in the plan.
    """
    if scan_scales:
        require_files(checkpoint)
    planned = make_planned(
        checkpoint,
        device,
        backend=backend,
        tp=tp,
        ep=ep,
        component=component,
        allow=allow,
        prefer=prefer,
        engine=engine,
        revision=revision,
        scan="all" if scan_scales else "decisive" if os.path.lexists(checkpoint) else "none",
    )
    if method is not None:
        require_method(planned.plan, method)
    return planned.plan


def require_method(plan: Plan, method: str) -> None:
    """Raise UsageError where a checkpoint is neither of this dialect nor of this weight id or its stem."""
    stored = {text for layer in plan.layers if layer.status != "unquantized" for text in layer.stored.split("+")}
    formats = plan.checkpoint.formats
    if method not in {*formats, *stored, *(text.partition("-")[0] for text in stored)}:
        found = ", ".join((*formats, *sorted(stored))) or "unquantized"
        raise UsageError(
            f"the checkpoint is {found}, not {method}: a method confirms what is stored, it changes nothing"
        )


def load(
    checkpoint: str | os.PathLike[str],
    device: str | Device | None = None,
    *,
    backend: str | None = None,
    component: str | None = None,
    allow: Iterable[str] = (),
    prefer: str | None = None,
    rank: Rank | None = None,
    compile_for: Iterable[int] | None = None,
) -> dict[str, nn.Module]:
    """Plan `checkpoint`, then load every quantized layer: {layer name: module}, in a pipeline `component/name`.

    Kernels that are compiled here are compiled for calls with the numbers of tokens in `compile_for`: powers of two up
    to 4096 when None, nothing before its first call when empty (`omniplat.portable.ahead.compile_kernels`).

    With `rank` (`omniplat.runtime.slicer.Rank`) layers are what one rank of a tensor- or expert-parallel group holds:
    outputs of column-parallel layers lie side by side, those of row-parallel layers and experts are to be added up.
    Raises, before any weight is read, UnsupportedCombinationError when a layer has no kernel and
    InvalidCheckpointError when metadata and tensors contradict each other, or for an id of the Hub: nothing is
    downloaded here.
    """
    require_files(checkpoint)
    tp, ep = (rank.tp_size, rank.ep_size) if rank is not None else (1, 1)
    planned = make_planned(
        checkpoint,
        device,
        backend=backend,
        tp=tp,
        ep=ep,
        component=component,
        allow=allow,
        prefer=prefer,
        scan="needed",
        runs=True,
    )
    layers = {name: module for name, _, module in load_layers(planned, rank)}
    from omniplat.portable.ahead import TOKENS, compile_kernels

    compile_kernels(layers.values(), TOKENS if compile_for is None else compile_for)
    return layers


def load_layers(planned: Planned, rank: Rank | None = None) -> Iterable[tuple[str, PlannedLayer, Any]]:
    """Load the quantized layers of a plan one by one, or what `rank` holds of them: (name, planned layer, module)."""
    from omniplat.checkpoint.reader import ShardReader

    require_runnable(planned.plan)
    require_torch()
    from omniplat.runtime.kernel import Workspaces, load_kernel
    from omniplat.runtime.load import load_layer
    from omniplat.runtime.slicer import WHOLE

    device = runtime_device(planned)
    workspaces = Workspaces()
    readers = {item.component.name: ShardReader(item.component.root) for item in planned.resolutions}
    for item in planned.layers:
        if item.layer.status != "ok" or item.capability is None:
            continue
        kernel = load_kernel(item.impl)
        name = f"{item.layer.component}/{item.layer.name}" if item.layer.component else item.layer.name
        reader = readers[item.layer.component]
        layer = load_layer(item.packed, kernel, reader, rank=rank or WHOLE, device=device, workspaces=workspaces)
        yield name, item, layer


def runtime_device(planned: Planned) -> torch.device:
    """Where layers of a plan lie. A plan may describe a device that is elsewhere, and its kernels are for that one:
    raises BackendUnavailableError where no such device is here. Kernels for CPUs run on every CPU.
    """
    from omniplat.runtime.tensors import device_of

    device = planned.device
    backend = next((layer.backend for layer in planned.plan.layers if layer.backend), None)
    if backend is not None and device.kind != CPU and not device.emulated:
        require_present(default_registry().load(BACKENDS, backend), device)
    return device_of(device)


def require_files(checkpoint: str | os.PathLike[str]) -> None:
    """Raise InvalidCheckpointError, with the line that downloads it, for an id of the Hub."""
    if not os.path.lexists(checkpoint):
        from omniplat.checkpoint.hub import require_local

        require_local(checkpoint)


def require_torch() -> None:
    """Raise BackendNotInstalledError, with the pip line, where torch is missing."""
    if not is_installed("torch"):
        raise BackendNotInstalledError("cpu", "torch", 'pip install "omniplat[cpu]"')


def require_runnable(plan: Plan) -> None:
    """Raise what stands in the way of loading a plan; do nothing when nothing does."""
    unsupported = [layer for layer in plan.layers if layer.status == "unsupported"]
    if unsupported:
        raise _unsupported(plan, unsupported)
    require_loadable(plan)


def require_loadable(plan: Plan) -> None:
    """Raise what makes the checkpoint itself unusable, whatever the device."""
    for item in plan.findings:
        if item.severity != "error" or item.code in _ABOUT_THE_DEVICE:
            continue
        if item.code == "model-advice":
            raise UsageError(f"{item.message}; {item.fix}")
        if item.code == "unknown-format":
            raise UnknownFormatError(item.message)
        raise InvalidCheckpointError(item.message, file=item.where.file, key=item.where.rule or item.code)


#: Findings about a combination with a device, not about the checkpoint.
_ABOUT_THE_DEVICE = frozenset({"unsupported-combination", "tp-not-divisible", "ep-not-divisible", "engine-cannot-load"})


#: Of these, what somebody asked for beside the device.
_OF_THE_ASKED = frozenset({"tp-not-divisible", "ep-not-divisible", "engine-cannot-load"})


def _unsupported(plan: Plan, layers: list[PlanLayer]) -> UnsupportedCombinationError:
    first = layers[0]
    device = f"{plan.device.kind}:{plan.device.arch}" + (f" ({plan.device.name})" if plan.device.name else "")
    reasons = [
        f"{trace.kernel}  needs {trace.rejected['rule']} {trace.rejected['needed']}, found {trace.rejected['found']}"
        for trace in first.trace
        if trace.rejected is not None
    ]
    reasons += [item.message for item in plan.findings if item.code in _OF_THE_ASKED]
    same = [layer.name for layer in layers if layer.details == first.details and layer.op == first.op]
    suggestions = ["--device cpu (reference)"] if plan.device.kind != CPU and _runs_on_cpu(first) else []
    suggestions += dict.fromkeys(
        item.fix for item in plan.findings if item.code == "unsupported-combination" and item.fix
    )
    scheme = f"{first.stored}/{(first.declared or '/a16').rpartition('/')[2]}"
    return UnsupportedCombinationError(device, first.op, scheme, same, reasons, suggestions)


def _runs_on_cpu(layer: PlanLayer) -> bool:
    capabilities = default_registry().load(BACKENDS, CPU).capabilities
    return all(
        any(item.op == layer.op and matches(item.weights, weight) for item in capabilities)
        for weight in layer.stored.split("+")
    )


def make_planned(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    device: str | Device | None = None,
    *,
    backend: str | None = None,
    tp: int = 1,
    ep: int = 1,
    component: str | None = None,
    allow: Iterable[str] = (),
    prefer: str | None = None,
    engine: str | None = None,
    revision: str | None = None,
    registry: Registry | None = None,
    environ: Mapping[str, str] | None = None,
    divide: Divide | None = None,
    scan: Scan = "none",
    runs: bool = False,
) -> Planned:
    """`plan`, with the resolved modules and chosen capabilities that loading and converting need.

    `divide` is for a runtime whose layers are not the family's engines', `scan` for one that needs what only the values
    of scales tell (`make_plan`). `runs` is as in `make_target`.
    """
    registry = registry or default_registry()
    target = make_target(
        device, backend=backend, tp=tp, ep=ep, allow=allow, prefer=prefer, registry=registry, environ=environ, runs=runs
    )
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else _open(checkpoint, revision)
    if component is not None and component not in {item.name for item in opened.components}:
        names = ", ".join(item.name or "(the checkpoint itself)" for item in opened.components)
        raise UsageError(f"no component {component!r}; the checkpoint has: {names}")
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"no engine {engine!r}; known: {', '.join(ENGINES)}")
    target = replace(target, engine=engine or "")
    formats = [registry.load(FORMATS, name) for name in registry.names(FORMATS)]
    families = [family for name in registry.names(MODELS) for family in registry.load(MODELS, name)]
    return make_plan(opened, target, formats, families, component, divide, scan)


def make_target(
    device: str | Device | None = None,
    *,
    backend: str | None = None,
    tp: int = 1,
    ep: int = 1,
    allow: Iterable[str] = (),
    prefer: str | None = None,
    registry: Registry | None = None,
    environ: Mapping[str, str] | None = None,
    runs: bool = False,
) -> Target:
    """Where to run and what is allowed, from what a caller says; raises UsageError and errors of backends.

    With `runs` a described device means the one that is here, where one is: what is installed counts then, and not what
    a plan for another machine assumes.
    """
    registry = registry or default_registry()
    environ = os.environ if environ is None else environ
    policy = _policy(allow, prefer or environ.get(PREFER_VARIABLE) or "memory")
    if tp < 1 or ep < 1:
        raise UsageError(f"tp and ep must be positive, found {tp} and {ep}")
    if not isinstance(device, (str, Device, type(None))):
        raise InvalidDeviceError(
            str(device), f"is {type(device).__name__}, needs a string such as 'cpu' or 'cuda:sm90'"
        )
    asked = resolve_device(device, registry, environ) if isinstance(device, str) else device
    if runs and asked is not None:
        asked = detected(asked, registry)
    chosen = choose_backend(asked, backend, registry, environ)
    return Target(chosen.spec, chosen.device, tp, ep, policy, chosen.is_default, chosen.reason)


def _open(checkpoint: str | os.PathLike[str], revision: str | None) -> Checkpoint:
    if revision is None and os.path.lexists(checkpoint):
        return open_checkpoint(checkpoint)
    from omniplat.checkpoint.hub import open_named

    return open_named(checkpoint, revision)


def _policy(allow: Iterable[str], prefer: str) -> Policy:
    if isinstance(allow, str):
        raise UsageError(f"allow is a list: [{allow!r}]")
    allowed = frozenset(allow)
    unknown = sorted(allowed - set(ALLOWANCES))
    if unknown:
        raise UsageError(f"cannot allow {', '.join(unknown)}; known: {', '.join(ALLOWANCES)}")
    if prefer not in PREFERENCES:
        raise UsageError(f"cannot prefer {prefer!r}; known: {', '.join(PREFERENCES)}")
    return Policy(allowed, prefer)
