"""Planning: checkpoint -> resolved modules -> layers -> a kernel for each, before any weight is read."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from packaging.requirements import Requirement

from omniplat._version import __version__
from omniplat.checkpoint.folder import Checkpoint, Component
from omniplat.checkpoint.reader import ShardReader
from omniplat.device import Device
from omniplat.document import Plan, PlanCheckpoint, PlanDevice, PlanLayer, PlanSummary
from omniplat.findings import SEVERITIES, Finding, finding
from omniplat.formats.base import Format
from omniplat.formats.detect import read_metadata
from omniplat.formats.resolve import Resolution, resolve_component
from omniplat.layer_planner import LayerPlanner, PlannedLayer, Target
from omniplat.models.advice import refusals
from omniplat.models.builtin import UNKNOWN
from omniplat.models.family import Family
from omniplat.packed import PackedLayer
from omniplat.packing import HeadCounts, Packed, family_of, pack
from omniplat.preflight import Preflight, Scales, Scan

__all__ = ["Divide", "Planned", "PlannedLayer", "Target", "make_plan", "plan_layers", "plan_resolved"]

#: What one layer of an engine is to another runtime: the layers that it has in its place.
Divide = Callable[[PackedLayer], Sequence[PackedLayer]]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its layers as objects; `resolutions` has the resolved modules of every component."""

    plan: Plan
    device: Device
    layers: tuple[PlannedLayer, ...]
    resolutions: tuple[Resolution, ...]


def make_plan(
    checkpoint: Checkpoint,
    target: Target,
    formats: Sequence[Format],
    families: Sequence[Family],
    component: str | None = None,
    divide: Divide | None = None,
    scan: Scan = "none",
) -> Planned:
    """Plan every layer of a checkpoint, or of one of its components.

    `divide` says what a layer is to a runtime that does not fuse as the family's engines do. `scan` says of which
    layers the scales are read; of a checkpoint that is not on disk they cannot be.
    """
    findings: list[Finding] = []
    resolutions: list[Resolution] = []
    for name in checkpoint.missing_components:
        message = f"model_index.json lists {name}, and there is no such folder: nothing of it is planned"
        findings.append(
            finding("index-names-absent-tensor", message, severity="warning", component=name, file="model_index.json")
        )
    for file in checkpoint.unread_files:
        message = f"{file} holds quantization metadata of no component: it is not read"
        fix = "move it into the folder of the component that it is about"
        findings.append(finding("known-quirk", message, severity="warning", file=file, fix=fix))
    for part in checkpoint.components:
        if component is not None and part.name != component:
            continue
        family = family_of(part.config, families)
        read = read_metadata(part, formats, family.parts_on(target.device.kind))
        resolutions.append(resolve_component(part, read, family.floats))
    return plan_resolved(checkpoint, resolutions, target, families, divide, scan, findings)


def plan_resolved(
    checkpoint: Checkpoint,
    resolutions: Sequence[Resolution],
    target: Target,
    families: Sequence[Family],
    divide: Divide | None = None,
    scan: Scan = "none",
    findings: Sequence[Finding] = (),
) -> Planned:
    """Plan components whose modules are resolved; `findings` are what is known of the checkpoint already."""
    layers: list[PlannedLayer] = []
    found = [finding("device-default", target.reason)] if target.is_default else []
    found += findings
    for resolution in resolutions:
        part = resolution.component
        packed = pack(resolution, family_of(part.config, families))
        if divide is not None:
            packed = replace(packed, layers=tuple(item for layer in packed.layers for item in divide(layer)))
        preflight = Preflight(ShardReader(part.root), scan) if scan != "none" else None
        planner = LayerPlanner(packed, target, part, preflight)
        layers += [planner.plan(layer) for layer in packed.layers]
        found += [*resolution.findings, *packed.findings, *planner.findings(), *_advice(packed, target, part)]
    source = PlanCheckpoint(
        os.fsencode(checkpoint.path).decode(errors="backslashreplace"),
        tuple(dict.fromkeys(item.format for item in resolutions if item.format)),
        tuple(item.component.name for item in resolutions),
        checkpoint.revision,
    )
    return Planned(_document(source, target, layers, found), target.device, tuple(layers), tuple(resolutions))


def _advice(packed: Packed, target: Target, part: Component) -> list[Finding]:
    """What is known against the checkpoint's schemes for its model."""
    used: dict[str, list[str]] = defaultdict(list)
    for layer in packed.layers:
        for module in layer.modules:
            used[module.scheme.activation_id].append(module.name)
    allowed = "model-advice" in target.policy.allow
    return refusals(part.config, used, allowed=allowed, component=part.name)


def plan_layers(
    source: PlanCheckpoint,
    layers: Sequence[PackedLayer],
    target: Target,
    findings: Sequence[Finding] = (),
    scales: Scales | None = None,
) -> Planned:
    """Plan layers that come from no checkpoint; `findings` are what is known of them already, `scales` what is of the
    values of their scales."""
    found = list(findings)
    if target.is_default:
        found.append(finding("device-default", target.reason))
    planned: list[PlannedLayer] = []
    for component in dict.fromkeys(layer.spec.component for layer in layers):
        own = tuple(layer for layer in layers if layer.spec.component == component)
        planner = LayerPlanner(Packed(own, UNKNOWN, HeadCounts({}), (), {}), target, preflight=scales)
        planned += [planner.plan(layer) for layer in own]
        found += planner.findings()
    return Planned(_document(source, target, planned, found), target.device, tuple(planned), ())


def _document(
    source: PlanCheckpoint, target: Target, layers: Sequence[PlannedLayer], findings: Iterable[Finding]
) -> Plan:
    return Plan(
        source,
        PlanDevice(target.device.kind, target.device.arch, target.device.name, target.device.described),
        tuple(item.layer for item in layers),
        tuple(sorted(findings, key=lambda item: SEVERITIES.index(item.severity))),
        _summary([item.layer for item in layers]),
        _assumptions(target),
        __version__,
    )


def _assumptions(target: Target) -> dict[str, str]:
    """Versions a described device is assumed to have: those that the backend's extra asks for."""
    if not target.device.described:
        return {}
    needed = [Requirement(text) for text in target.spec.distributions]
    return {item.name: str(item.specifier) for item in needed}


def _summary(layers: Sequence[PlanLayer]) -> PlanSummary:
    status = Counter(layer.status for layer in layers)
    runs = [layer for layer in layers if layer.executes is not None]
    tp = [set(layer.legal_tp) for layer in layers]
    ep = [set(layer.legal_ep) for layer in layers if layer.legal_ep]
    return PlanSummary(
        len(layers),
        status["ok"],
        status["unquantized"],
        status["unsupported"],
        status["invalid"],
        dict(sorted(Counter(str(layer.executes) for layer in runs).items())),
        sum(layer.stored_bytes for layer in layers),
        sum(layer.resident_bytes for layer in layers),
        "rank",
        tuple(sorted(set.intersection(*tp))) if tp else (),
        tuple(sorted(set.intersection(*ep))) if ep else (),
    )
