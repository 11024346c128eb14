"""The report of a run: what was tested on what, and what came out. JSON with a schema of its own version.

`result` is "success" (everything that applies to this device ran and passed), "failure", or "partial": something that
belongs to the claim did not run, or is known to fail. No device is partial, never success, also where it is emulated.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from omniplat._version import __version__
from omniplat.conformance.checks import GROUPS
from omniplat.conformance.subject import Subject, environment
from omniplat.errors import UsageError
from omniplat.host import installed_version

SCHEMA = "omniplat.conformance/1"
OUTCOMES = ("passed", "failed", "skipped", "known")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check that was collected. `outcome` is one of OUTCOMES; "known": it failed, and that is declared.

    `capability` is "" for a check of the backend itself. `gap` is True for a skip that leaves the run partial.
    `measured` holds figures that the check recorded.
    """

    id: str
    group: str
    capability: str
    outcome: str
    reason: str = ""
    gap: bool = False
    seconds: float = 0.0
    measured: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """What fails a run beside a failed check: an entry of known failures that is wrong, a foreign fixture."""

    code: str
    message: str


def result_of(
    outcomes: Sequence[Outcome], problems: Sequence[Problem], left_out: int, *, emulated: bool = False
) -> str:
    """The verdict. `left_out`: checks that were collected and deselected, or never ran."""
    if problems or any(item.outcome == "failed" for item in outcomes):
        return "failure"
    is_partial = emulated or left_out or not outcomes or any(o.gap or o.outcome == "known" for o in outcomes)
    return "partial" if is_partial else "success"


def suite_digest() -> str:
    """SHA-256 over the suite's own files: a report of a changed suite shows it."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def make_report(
    subject: Subject,
    profile: str,
    outcomes: Sequence[Outcome],
    problems: Sequence[Problem],
    *,
    left_out: int,
    seconds: float,
    plugins: Sequence[str],
    commit: str = "",
) -> dict[str, Any]:
    """The whole document."""
    spec, device = subject.spec, subject.device
    versions = {"torch": installed_version("torch"), **subject.versions}
    return {
        "schema": SCHEMA,
        "result": result_of(outcomes, problems, left_out, emulated=device.emulated),
        "profile": profile,
        "backend": {"name": spec.name, "distribution": subject.distribution, "api_version": spec.api_version},
        "device": {
            "kind": device.kind,
            "arch": device.arch,
            "name": device.name,
            "present": subject.has_device,
            "reason": "the vendor's operators are emulated on the CPU" if device.emulated else subject.missing,
            "emulated": device.emulated,
        },
        "omniplat": __version__,
        "suite": suite_digest(),
        "commit": commit,
        "versions": {name: text for name, text in sorted(versions.items()) if text},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "environment": environment(),
        "plugins": sorted(plugins),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds": round(seconds, 2),
        "counts": {**_counts(outcomes), "left_out": left_out},
        "groups": {group: _counts([o for o in outcomes if o.group == group]) for group in GROUPS},
        "capabilities": [_capability(subject, name, outcomes) for name in _names(subject)],
        "skipped": _skipped(outcomes),
        "failed": [_failure(item) for item in outcomes if item.outcome == "failed"],
        "known": [_failure(item) for item in outcomes if item.outcome == "known"],
        "problems": [{"code": item.code, "message": item.message} for item in problems],
    }


def _names(subject: Subject) -> list[str]:
    return [capability.name for capability in subject.spec.capabilities]


def _counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    found = Counter(item.outcome for item in outcomes)
    return {name: found[name] for name in OUTCOMES}


def _capability(subject: Subject, name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One capability's counts and the evidence that they are: declared, emulated, verified on a device or failing."""
    own = [item for item in outcomes if item.capability == name]
    counts = _counts(own)
    capability = next(item for item in subject.spec.capabilities if item.name == name)
    ran = [item for item in own if item.group not in ("manifest", "undeclared") and item.outcome == "passed"]
    obstacle = subject.obstacle(capability)
    evidence = "declared"
    if counts["failed"] or counts["known"]:
        evidence = "failing"
    elif ran and obstacle is None and not any(item.gap for item in own):
        # what needs no kernel passes for other architectures too, and proves nothing of them
        evidence = "emulated" if subject.device.emulated else f"verified on {subject.device}"
    return {
        "name": name,
        "op": capability.op,
        "evidence": evidence,
        "obstacle": obstacle.reason if obstacle is not None else "",
        "weights": list(capability.weights),
        "activations": list(capability.activations),
        "executes": capability.executes,
        "scale_rules": list(capability.scale_rules),
        "roundings": list(capability.roundings),
        "scale_format": capability.scale_format,
        "archs": list(capability.archs),
        **counts,
        "measured": _worst(own),
    }


def _worst(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The largest of each recorded figure (for ratios of noise: the largest and the smallest)."""
    found: dict[str, float] = {}
    for item in outcomes:
        for key, value in (item.measured or {}).items():
            pick = min if key.endswith("_min") else max
            found[key] = pick(found[key], value) if key in found else value
    return {key: float(f"{value:.4g}") for key, value in sorted(found.items())}


def _skipped(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Reasons, with how many checks each kept from running."""
    reasons = Counter((item.reason, item.gap) for item in outcomes if item.outcome == "skipped")
    return [{"reason": text, "count": n, "leaves_partial": gap} for (text, gap), n in sorted(reasons.items())]


def _failure(item: Outcome) -> dict[str, Any]:
    return {"id": item.id, "group": item.group, "capability": item.capability, "reason": item.reason}


def report_schema() -> dict[str, Any]:
    """The JSON Schema of reports."""
    path = Path(__file__).parents[1] / "schemas" / "conformance-1.schema.json"
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_report(path: Path) -> dict[str, Any]:
    """A report from a file. Raises UsageError for another schema or no report at all."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise UsageError(f"report {path}: {exc}") from exc
    found = report.get("schema") if isinstance(report, dict) else None
    if found != SCHEMA:
        raise UsageError(f"report {path}: schema {found!r} is not {SCHEMA}")
    assert isinstance(report, dict)
    return report
