"""`omniplat matrix`: which kernels run a method on a device, and what proves it."""

from __future__ import annotations

import sys

from omniplat.backend import BackendSpec
from omniplat.cli.output import escape, make_console, print_json, visible
from omniplat.conformance.catalog import WEIGHTS
from omniplat.conformance.matrix import Row, committed_reports, concerning, method_ids, support_rows
from omniplat.device import parse_device
from omniplat.errors import OmniplatError, UsageError
from omniplat.registry import BACKENDS, default_registry

SCHEMA = "omniplat.matrix/1"


def matrix_command(device: str | None, method: str | None, *, json_output: bool) -> int:
    """Body of the command. Returns 0, or 1 where no kernel is declared for what was asked."""
    specs = _installed()
    ids: tuple[str, ...] = ()
    if method is not None:
        ids = method_ids(method, specs)
        if not ids:
            stems = dict.fromkeys(text.partition("-")[0] for text in WEIGHTS)
            raise UsageError(f"no weight scheme is called {method!r}; known: {', '.join(stems)}, and what follows them")
    rows = concerning(
        support_rows(specs, committed_reports()), specs, parse_device(device) if device is not None else None, ids
    )
    if json_output:
        print_json({"schema": SCHEMA, "device": device, "method": method, "rows": [row.to_dict() for row in rows]})
    else:
        _print(rows)
    return 0 if rows else 1


def _installed() -> tuple[BackendSpec, ...]:
    """Every backend that loads; what does not is said on stderr."""
    registry, specs = default_registry(), []
    for name in registry.names(BACKENDS):
        try:
            specs.append(registry.load(BACKENDS, name))
        except OmniplatError as error:
            print(visible(f"backend {name} is left out: {error.message}"), file=sys.stderr)
    return tuple(specs)


def _print(rows: tuple[Row, ...]) -> None:
    from rich.table import Table

    if not rows:
        print("no kernel is declared for that")
        return
    table = Table("backend", "kernel", "op", "weights", "executes", "architectures", "evidence")
    for row in rows:
        item = row.capability
        cells = (
            row.backend,
            item.name,
            item.op,
            ", ".join(item.weights),
            item.executes or "as declared",
            ", ".join(item.archs) or "all",
            row.shown,
        )
        table.add_row(*map(escape, cells))
    make_console().print(table)
