"""A report as text, as Markdown for a table of documentation, and as JUnit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import quoteattr

FORMATS = ("text", "markdown", "junit")
#: How many failed checks text and Markdown list; one fault of a kernel easily fails them all.
_LISTED = 20


def render(report: Mapping[str, Any], form: str) -> str:
    """The report in one of FORMATS."""
    if form == "markdown":
        return "\n".join(markdown_lines(report)) + "\n"
    if form == "junit":
        return "\n".join(_junit_lines(report)) + "\n"
    return "\n".join(summary_lines(report)) + "\n"


def device_text(report: Mapping[str, Any]) -> str:
    """The device of a report, with its name; "(emulated)" or "(described)" where none was here."""
    device = report["device"]
    text = f"{device['kind']}:{device['arch']}"
    if not device["present"]:
        return f"{text} (emulated)" if device["emulated"] else f"{text} (described)"
    return f"{text} ({device['name']})" if device["name"] else text


def summary_lines(report: Mapping[str, Any]) -> Iterable[str]:
    """What a terminal shows."""
    counts = report["counts"]
    name = report["backend"]["name"]
    yield f"{report['result'].upper()}: {name} on {device_text(report)}, profile {report['profile']}"
    yield _counted(counts) + (f", {counts['left_out']} left out" if counts["left_out"] else "")
    for group, found in report["groups"].items():
        if any(found.values()):
            yield f"  {group:<11}{_counted(found)}"
    for item in report["skipped"]:
        mark = " (leaves the run partial)" if item["leaves_partial"] else ""
        yield f"  skipped {item['count']}: {item['reason']}{mark}"
    for item in report["known"]:
        yield f"  known   {item['id']}: {item['reason']}"
    yield from (f"  failed  {line}" for line in _failures(report))
    for item in report["problems"]:
        yield f"  problem {item['code']}: {item['message']}"


def _counted(found: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{found[name]} {name}" for name in ("passed", "failed", "skipped", "known") if found[name])
        or "nothing ran"
    )


def markdown_lines(report: Mapping[str, Any]) -> Iterable[str]:
    """A section of a page: the verdict, then one row per capability."""
    versions = ", ".join(f"{name} {text}" for name, text in report["versions"].items())
    yield f"### {report['backend']['name']} on {device_text(report)}"
    yield ""
    yield (
        f"Result: **{report['result']}** · profile {report['profile']} · {_counted(report['counts'])} · "
        f"{report['date'][:10]} · omniplat {report['omniplat']} · {versions}"
    )
    yield ""
    yield "| kernel | op | weights | executes | evidence | passed | failed | skipped |"
    yield "|---|---|---|---|---|--:|--:|--:|"
    for item in report["capabilities"]:
        yield _row(
            (
                f"`{item['name']}`",
                item["op"],
                _patterns(item["weights"]),
                f"`{item['executes']}`" if item["executes"] else "as declared",
                item["evidence"],
                str(item["passed"]),
                str(item["failed"] + item["known"]),
                str(item["skipped"]),
            )
        )
    if report["skipped"]:
        yield ""
        yield from (f"- {item['count']} skipped: {item['reason']}" for item in report["skipped"])
    if report["failed"]:
        yield ""
        yield from (f"- failed {line}" for line in _failures(report))


def _failures(report: Mapping[str, Any]) -> Iterable[str]:
    """The first failed checks, by the ids that lists of known failures use, each with one line of its reason."""
    failed = report["failed"]
    for item in failed[:_LISTED]:
        yield f"{item['id']}: {item['reason'].partition(chr(10))[0]}"
    if len(failed) > _LISTED:
        yield f"and {len(failed) - _LISTED} more: the JSON report lists all"


def _patterns(texts: Sequence[str]) -> str:
    shown = ", ".join(f"`{text}`" for text in texts[:6])
    return shown + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _junit_lines(report: Mapping[str, Any]) -> Iterable[str]:
    """One suite per group; passed checks are counted in the attributes, the others are listed."""
    name = report["backend"]["name"]
    yield '<?xml version="1.0" encoding="utf-8"?>'
    yield f"<testsuites name={quoteattr('omniplat conformance ' + name)}>"
    for group, counts in report["groups"].items():
        tests = sum(counts.values())
        skipped = counts["skipped"] + counts["known"]
        yield (
            f'<testsuite name={quoteattr(group)} tests="{tests}" failures="{counts["failed"]}" '
            f'skipped="{skipped}" errors="0">'
        )
        for key, tag in (("failed", "failure"), ("known", "skipped")):
            for item in report[key]:
                if item["group"] == group:
                    identity = f"classname={quoteattr(f'{name}.{group}')} name={quoteattr(item['id'])}"
                    yield f"<testcase {identity}><{tag} message={quoteattr(item['reason'])}/></testcase>"
        yield "</testsuite>"
    yield "</testsuites>"
