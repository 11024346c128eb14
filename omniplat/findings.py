"""Findings: what a plan reports about a checkpoint's metadata and tensors, under stable codes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: code -> (severity that it has unless the place that finds it says otherwise, when it is reported).
_CODES: dict[str, tuple[str, str]] = {
    "rule-matches-nothing": (
        "warning",
        "an entry of a list names no module under any reading; an error when no entry of its list does",
    ),
    "rule-readings-differ": (
        "warning",
        "an entry means different things to its producer and to engines; the tensors decided",
    ),
    "rule-overreach": (
        "warning",
        "an entry also matches modules that it does not name on a dot boundary, and the tensors say otherwise",
    ),
    "tensors-contradict-config": (
        "error",
        "declared and stored disagree; a warning where the tensors decide beyond doubt",
    ),
    "missing-tensor": (
        "error",
        "a role that the scheme needs is in no shard; a warning for a KV cache's scales, which engines take as 1.0",
    ),
    "index-names-absent-tensor": ("error", "the index lists a tensor that its shard lacks"),
    "unexpected-tensor": ("warning", "quantization tensors that no role explains"),
    "mixed-fused-shards": (
        "note",
        "parts of one fused layer differ and are planned apart; an error for the experts of one layer",
    ),
    "group-not-divisible": ("error", "K is not a multiple of the group size"),
    "inferred-from-headers": ("note", "there is no metadata that can be used; the tensors show the scheme"),
    "tp-not-divisible": ("error", "the asked tensor-parallel size would cut a group, a block or a packed byte"),
    "ep-not-divisible": ("error", "the asked expert-parallel size does not divide the experts"),
    "metadata-conflict": ("warning", "two metadata files disagree; says which was used"),
    "metadata-unreadable": ("error", "metadata of the wrong type or form, with file and key"),
    "unknown-format": ("error", "the metadata names a method that no installed format knows"),
    "unsupported-option": ("error", "the metadata asks for something that is understood and cannot be honoured"),
    "activation-upgraded": ("note", "executes with a more precise activation than declared"),
    "weight-only": ("note", "executes with unquantized activations where quantized ones are declared"),
    "activation-regrouped": ("note", "executes with activations of another granularity than declared"),
    "unsupported-combination": ("error", "no kernel accepts the layer; the trace has one reason per kernel"),
    "scale-not-finite": ("error", "a scale is NaN or infinite, or 0 above codes that are not"),
    "reencode-refused": (
        "warning",
        "scales span too many binades for the planned re-encoding; an error without another",
    ),
    "engine-cannot-load": ("error", "the named engine's loader cannot deliver a tensor"),
    "unknown-family": ("note", "no packing table for this model: planned unfused"),
    "model-advice": ("warning", "a known sensitivity of the model, with its source"),
    "device-default": ("note", "the cpu was chosen because no accelerator is usable here"),
    "faster-option": ("note", "what another preference would gain and cost"),
    "kept-larger": ("note", "a layer is kept in more bytes than it is stored in, under either preference"),
    "known-quirk": ("note", "a vendor or version quirk of this path was worked around"),
}
DEFAULT_SEVERITY: dict[str, str] = {code: severity for code, (severity, _) in _CODES.items()}
MEANING: dict[str, str] = {code: meaning for code, (_, meaning) in _CODES.items()}
#: The worst first.
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
