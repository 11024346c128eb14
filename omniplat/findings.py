"""Findings: what a plan reports about a checkpoint's metadata and tensors, under stable codes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: code -> severity that it has unless the place that finds it says otherwise.
DEFAULT_SEVERITY: dict[str, str] = {
    "rule-matches-nothing": "warning",
    "rule-readings-differ": "warning",
    "rule-overreach": "warning",
    "tensors-contradict-config": "error",
    "missing-tensor": "error",
    "index-names-absent-tensor": "error",
    "unexpected-tensor": "warning",
    "mixed-fused-shards": "note",
    "group-not-divisible": "error",
    "inferred-from-headers": "note",
    "tp-not-divisible": "error",
    "ep-not-divisible": "error",
    "metadata-conflict": "warning",
    "metadata-unreadable": "error",
    "unknown-format": "error",
    "unsupported-option": "error",
    "activation-upgraded": "note",
    "weight-only": "note",
    "activation-regrouped": "note",
    "unsupported-combination": "error",
    "scale-not-finite": "error",
    "reencode-refused": "warning",
    "engine-cannot-load": "error",
    "unknown-family": "note",
    "model-advice": "warning",
    "device-default": "note",
    "faster-option": "note",
    "known-quirk": "note",
}
SEVERITIES = ("error", "warning", "note")

#: How many module names a finding carries; `modules_total` has the full count.
MAX_MODULES = 20


@dataclass(frozen=True, slots=True)
class Where:
    """The place in the metadata that a finding is about."""

    file: str = ""
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `modules` are the first names, sorted, of `modules_total`; `fix` says what would settle it."""

    severity: str
    code: str
    message: str
    component: str = ""
    where: Where = Where()
    modules: tuple[str, ...] = ()
    modules_total: int = 0
    fix: str = ""


def finding(
    code: str,
    message: str,
    *,
    severity: str = "",
    component: str = "",
    file: str = "",
    rule: str = "",
    modules: Iterable[str] = (),
    fix: str = "",
) -> Finding:
    """A finding with its code's default severity, its modules sorted and cut to `MAX_MODULES`."""
    names = sorted(modules)
    return Finding(
        severity or DEFAULT_SEVERITY[code],
        code,
        message,
        component,
        Where(file, rule),
        tuple(names[:MAX_MODULES]),
        len(names),
        fix,
    )
