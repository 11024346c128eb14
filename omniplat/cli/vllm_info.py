"""`omniplat info --vllm`: which hooks are active inside vLLM and vllm-omni, and who would run a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from omniplat.cli.output import escape
from omniplat.integrations.vllm_info import CheckpointReport, VllmInfo, collect_vllm_info

if TYPE_CHECKING:
    from rich.console import Console


def vllm_info(checkpoint: str | None, json_output: bool, console: Console | None = None) -> int:
    """Body of the command. Returns the exit code: 1 where nobody runs the checkpoint."""
    report = collect_vllm_info(checkpoint)
    if json_output:
        print(json.dumps({"schema": "omniplat.vllm-info/1", **asdict(report)}, indent=1))
    else:
        from rich.console import Console

        _print(report, console or Console())
    return int(report.checkpoint is not None and report.checkpoint.runs == "nobody")


def _print(report: VllmInfo, console: Console) -> None:
    from rich.table import Table

    def line(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    for engine in report.engines:
        if not engine.version:
            line(f"{engine.package}: not installed (tested: {engine.tested})")
        else:
            known = "tested" if engine.known else f"not tested, {engine.tested} is"
            line(f"{engine.package} {engine.version} ({engine.distribution}): {known}")
    line(f"OMNIPLAT_DISPATCH: {report.dispatch}")
    hooks = Table("group", "hook", "state", "for", title="hooks", title_justify="left")
    for hook in report.hooks:
        hooks.add_row(hook.group, hook.name, escape(hook.state), escape(hook.purpose))
    console.print(hooks)
    if report.checkpoint is not None:
        for text in _verdict(report.checkpoint):
            line(text)


def _verdict(report: CheckpointReport) -> list[str]:
    lines = [f"{report.checkpoint}: run by {report.runs}"]
    engine = "vLLM" if report.engine == "vllm" else report.engine
    if report.engine_method:
        lines.append(f"  {engine}'s own method: {report.engine_method}")
    if report.engine_problem:
        lines.append(f"  {engine} does not run it: {report.engine_problem}")
    if report.problem:
        lines.append(f"  omniplat does not run it: {report.problem}")
    return lines
