"""The support matrix: what backends declare, and what committed reports prove of it.

Reports lie beside this module, unmodified, so that an installed package answers too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omniplat.backend import BackendSpec
from omniplat.capability import Capability
from omniplat.conformance.catalog import declared_weights, weight_ids
from omniplat.conformance.render import device_text
from omniplat.conformance.report import read_report
from omniplat.device import Device

REPORTS = Path(__file__).parent / "reports"


@dataclass(frozen=True, slots=True)
class Row:
    """One capability of one backend. `evidence` is "declared", "emulated", "verified on <device>" or "failing".

    `archs` are those that it is declared for, `emulated_archs` those that a full run has emulated.
    """

    backend: str
    capability: Capability
    evidence: str
    archs: tuple[str, ...]
    emulated_archs: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The evidence for people, who must not take a declaration without a kernel for one with it, nor a run of one
        architecture for runs of all."""
        is_emulated = self.evidence == "emulated" and self.emulated_archs
        text = f"emulated as {', '.join(self.emulated_archs)}" if is_emulated else self.evidence
        return text if self.capability.impl else f"{text}; plans only"

    def to_dict(self) -> dict[str, Any]:
        """A row of `omniplat matrix --json`."""
        item = self.capability
        return {
            "backend": self.backend,
            "kernel": item.name,
            "op": item.op,
            "weights": list(item.weights),
            "activations": list(item.activations),
            "executes": item.executes or None,
            "archs": list(self.archs),
            "evidence": self.evidence,
            "loads": bool(item.impl),
        }


def committed_reports(folder: Path = REPORTS) -> tuple[dict[str, Any], ...]:
    """All reports of the package, by file name."""
    return tuple(read_report(path) for path in sorted(folder.glob("*.json")))


def support_rows(specs: Iterable[BackendSpec], reports: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
    """Every capability with the best evidence of any report: only whole runs count, and a failure outweighs all."""
    found = []
    for spec in specs:
        own = [item for item in reports if item["backend"]["name"] == spec.name and item["profile"] == "full"]
        for capability in spec.capabilities:
            entries = [
                (item["device"]["arch"], entry["evidence"])
                for item in own
                for entry in item["capabilities"]
                if _same(entry, capability)
            ]
            evidence = _best([capability.evidence, *(text for _, text in entries)])
            emulated = tuple(sorted({arch for arch, text in entries if text == "emulated"}))
            found.append(Row(spec.name, capability, evidence, capability.archs, emulated))
    return tuple(found)


def method_ids(method: str, specs: Iterable[BackendSpec]) -> tuple[str, ...]:
    """The weight ids that `method` stands for: an id ("nvfp4"), a pattern ("int4-*") or the stem of ids ("fp8")."""
    known = dict.fromkeys(text for spec in specs for text in weight_ids(spec))
    return tuple(text for text in known if text.partition("-")[0] == method or fnmatchcase(text, method))


def concerning(
    rows: Iterable[Row], specs: Iterable[BackendSpec], device: Device | None, methods: Sequence[str]
) -> tuple[Row, ...]:
    """The rows about one device (None: any) and one of these weight ids (none: any)."""
    kinds = {spec.name: spec.kinds for spec in specs}
    return tuple(
        row
        for row in rows
        if (device is None or (device.kind in kinds[row.backend] and (not row.archs or device.arch in row.archs)))
        and (not methods or declared_weights(row.capability, methods))
    )


def _same(entry: Mapping[str, Any], capability: Capability) -> bool:
    """True where a report's entry is about the capability as it is declared now."""
    return (
        entry["name"] == capability.name
        and tuple(entry["weights"]) == capability.weights
        and tuple(entry["activations"]) == capability.activations
        and entry["executes"] == capability.executes
        and entry.get("scale_format", "") == capability.scale_format
        and _covers(entry.get("scale_rules", ()), capability.scale_rules)
        and _covers(entry.get("roundings", ()), capability.roundings)
    )


def _covers(proven: Sequence[str], declared: Sequence[str]) -> bool:
    """Whether rules that were proven (none named: every one) are at least those that are declared."""
    return not proven or (bool(declared) and set(declared) <= set(proven))


def _best(texts: Sequence[str]) -> str:
    if "failing" in texts:
        return "failing"
    verified = sorted({text for text in texts if text.startswith("verified on ")})
    if verified:
        return "; ".join(verified)
    return "emulated" if "emulated" in texts else "declared"


def matrix_page(specs: Iterable[BackendSpec], reports: Sequence[Mapping[str, Any]]) -> str:
    """The page docs/support-matrix.md."""
    lines = [
        "# Support matrix",
        "",
        "Generated by `python docs/generate.py` from the backends' capabilities and the reports of",
        "`omniplat conformance` in `omniplat/conformance/reports`. `declared`: no run proves it. `emulated as`: full",
        "runs passed with the vendor's operators emulated on a CPU, as these architectures and no other; kernels that",
        "call none (`portable_*`) compute there in plain torch, not in Triton. `verified on`: a full run on that",
        "device passed. `plans only`: this version has no kernel behind the declaration, and loading such a plan",
        "raises `BackendUnavailableError`.",
        "",
        "| backend | kernel | op | weights | executes | architectures | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in support_rows(specs, reports):
        item = row.capability
        weights = ", ".join(f"`{text}`" for text in item.weights[:8])
        weights += f" and {len(item.weights) - 8} more" if len(item.weights) > 8 else ""
        executes = f"`{item.executes}`" if item.executes else "as declared"
        cells = (row.backend, f"`{item.name}`", item.op, weights, executes, ", ".join(row.archs) or "all", row.shown)
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Reports",
        "",
        "| backend | device | result | profile | omniplat | date | checks |",
        "|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        counts = ", ".join(f"{n} {name}" for name, n in report["counts"].items() if n)
        lines.append(
            f"| {report['backend']['name']} | {device_text(report)} | {report['result']} | {report['profile']} | "
            f"{report['omniplat']} | {report['date'][:10]} | {counts} |"
        )
    return "\n".join(lines) + "\n"
