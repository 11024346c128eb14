"""The plan document: what runs every layer of a checkpoint on a device, why, and what was found on the way.

A plan is data. It is built without torch and without a device, and survives a round trip through JSON
(`schema` names the version of its layout; the JSON Schema is in `omniplat/schemas`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from omniplat.findings import Finding

SCHEMA = "omniplat.plan/1"


@dataclass(frozen=True, slots=True)
class PlanCheckpoint:
    path: str
    formats: tuple[str, ...]
    components: tuple[str, ...]
    revision: str = ""


@dataclass(frozen=True, slots=True)
class PlanDevice:
    kind: str
    arch: str
    name: str = ""
    described: bool = True


@dataclass(frozen=True, slots=True)
class PlanRule:
    """The rule that decided: its file, its text, and the reading under which it applied ("" when all agree)."""

    file: str = ""
    rule: str = ""
    reading: str = ""


@dataclass(frozen=True, slots=True)
class PlanTrace:
    """One kernel that was asked: why it refused, or what it would have executed."""

    kernel: str
    rejected: Mapping[str, str] | None = None
    accepted: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PlanLayer:
    """One layer. `shape` has `out` and `in`, for moe also `intermediate` and `experts`; sizes are bytes per rank.

    `declared`, `stored` and `executes` of experts whose w13 and w2 differ are both ids, joined by "+", w13 first.
    `stored` is "unknown" where a layer is invalid because its tensors fit no scheme.

    `scale_spans`: where scales were read, for MX weights: weight id -> binades between the largest and the smallest
    group exponent of a row, the largest over all rows; groups of zeros do not count.
    """

    name: str
    component: str
    op: str
    modules: tuple[str, ...]
    shape: Mapping[str, int]
    declared: str | None
    stored: str
    executes: str | None
    details: Mapping[str, Any]
    status: str
    container: str
    stored_dtype: str
    legal_tp: tuple[int, ...]
    legal_ep: tuple[int, ...]
    decided_by: PlanRule
    backend: str | None = None
    kernel: str | None = None
    via: str | None = None
    variants: tuple[str, ...] = ()
    alternative: str | None = None
    trace: tuple[PlanTrace, ...] = ()
    stored_bytes: int = 0
    resident_bytes: int = 0
    peak_load_bytes: int = 0
    scale_spans: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Counts over all layers; `by_scheme` counts what executes. Sizes are bytes per rank."""

    layers: int = 0
    ok: int = 0
    unquantized: int = 0
    unsupported: int = 0
    invalid: int = 0
    by_scheme: Mapping[str, int] = field(default_factory=dict)
    stored_bytes: int = 0
    resident_bytes: int = 0
    per: str = "rank"
    legal_tp: tuple[int, ...] = ()
    legal_ep: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole document."""

    checkpoint: PlanCheckpoint
    device: PlanDevice
    layers: tuple[PlanLayer, ...]
    findings: tuple[Finding, ...]
    summary: PlanSummary
    assumes: Mapping[str, str] = field(default_factory=dict)
    omniplat: str = ""
    schema: str = SCHEMA

    @property
    def ok(self) -> bool:
        """True when nothing stands in the way of running it: no finding of severity error."""
        return not any(item.severity == "error" for item in self.findings)

    def layer(self, name: str) -> PlanLayer:
        """The layer of that name (`component/name` in a pipeline), or the one that packs that module.

        Raises KeyError.
        """
        for layer in self.layers:
            full = f"{layer.component}/{layer.name}" if layer.component else layer.name
            if name in (layer.name, full) or name in layer.modules:
                return layer
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """The document as JSON types, `schema` first."""
        document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        head = {"schema": document.pop("schema"), "omniplat": document.pop("omniplat")}
        return head | document

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self.to_dict()), indent=1).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """The inverse of `to_json`; raises msgspec.ValidationError for another layout."""
        plan = msgspec.json.decode(text, type=Plan)
        if plan.schema != SCHEMA:
            raise msgspec.ValidationError(f"schema is {plan.schema!r}, expected {SCHEMA!r}")
        return plan
