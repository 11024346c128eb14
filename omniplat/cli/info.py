"""`omniplat info`: what is here, what loads, what does not and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from omniplat.cli.output import escape
from omniplat.info import BackendReport, Info, PluginReport, collect_info

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"available": "green", "loads": "green", "unavailable": "yellow", "not-installed": "yellow"}


def info(json_output: bool, console: Console | None = None) -> int:
    """Body of the command. Prints the report and returns the exit code, which is 0: bad news is an answer too."""
    report = collect_info()
    if json_output:
        print(json.dumps(report.to_dict(), indent=1))
        return 0
    from rich.console import Console

    _print(report, console or Console())
    return 0


def _print(report: Info, console: Console) -> None:
    from rich.table import Table

    document = report.to_dict()
    versions = ", ".join(f"{name} {text}" for name, text in report.versions.items())
    console.print(f"omniplat {document['omniplat']} on Python {report.python}, {report.platform}", highlight=False)
    console.print(escape(versions), highlight=False)

    devices = Table("device", "name", "memory", title="devices", title_justify="left")
    for device in report.devices:
        memory = f"{device.memory / 2**30:.1f} GiB" if device.memory else "?"
        devices.add_row(f"{device.kind}:{device.arch}", escape(device.name), memory)
    console.print(devices)
    chosen = report.default
    where = f"backend {chosen.backend} on {chosen.device}" if chosen.backend else "none"
    console.print(f"default: {where}", highlight=False)
    console.print(f"  {escape(chosen.reason)}", highlight=False)

    backends = Table("backend", "from", "state", "kernels", "runtime", title="backends", title_justify="left")
    for backend in report.backends:
        backends.add_row(
            backend.name,
            escape(backend.distribution),
            _styled(backend.state),
            str(backend.capabilities),
            escape(_runtime(backend)),
        )
    console.print(backends)
    for backend in report.backends:
        if backend.state != "available":
            console.print(f"{backend.name}: {escape(backend.reason)}", highlight=False, soft_wrap=True)
            if backend.install:
                console.print(f"  {escape(backend.install)}", highlight=False, soft_wrap=True)
    _print_plugins("formats", report.formats, console)
    _print_plugins("models", report.models, console)


def _print_plugins(title: str, plugins: tuple[PluginReport, ...], console: Console) -> None:
    words = [f"{escape(plugin.name)} [dim]({escape(plugin.distribution)})[/dim]" for plugin in plugins]
    console.print(f"{title}: {', '.join(words) or 'none'}", highlight=False)
    for plugin in plugins:
        if plugin.state != "loads":
            console.print(
                f"  {escape(plugin.name)} {_styled(plugin.state)}: {escape(plugin.reason)}",
                highlight=False,
                soft_wrap=True,
            )


def _runtime(backend: BackendReport) -> str:
    return ", ".join(f"{name} {text or '-'}" for name, text in backend.versions.items())


def _styled(state: str) -> str:
    style = STYLES.get(state, "red")
    return f"[{style}]{state}[/{style}]"
