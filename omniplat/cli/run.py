"""`omniplat run`: load every quantized layer of a checkpoint, run it, report fidelity and time."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniplat.api import load_layers, make_planned, require_files, require_torch
from omniplat.checkpoint.folder import Component, open_checkpoint
from omniplat.checkpoint.reader import ShardReader
from omniplat.cli.output import answering_no, escape, human_bytes, make_console, print_json
from omniplat.cli.plan import collapse, group_names, print_plan
from omniplat.device import Device
from omniplat.errors import UsageError
from omniplat.planner import Planned

if TYPE_CHECKING:
    from rich.console import Console

    from omniplat.tools.fidelity import LayerFidelity, OriginalWeights, SchemeFidelity
    from omniplat.tools.fidelity_moe import MoeFidelity

SCHEMA = "omniplat.run/1"


def run_command(
    checkpoint: str,
    device: str | Device | None,
    *,
    backend: str | None,
    reference: Path | None,
    component: str | None,
    allow: Sequence[str],
    prefer: str | None,
    tokens: int,
    seed: int,
    json_output: bool,
) -> int:
    """Body of the command. Returns 1 when the plan has an error or a layer's output is not finite."""
    require_files(checkpoint)
    planned = make_planned(
        checkpoint, device, backend=backend, component=component, allow=allow, prefer=prefer, scan="needed", runs=True
    )
    if not planned.plan.ok:
        _show_refusal(planned, json_output)
        return 1
    require_torch()
    originals = _originals(planned, reference)
    start = time.perf_counter()
    with answering_no(json_output=json_output):
        results, whole = _measure(planned, originals, tokens, seed, quiet=json_output)
    seconds = time.perf_counter() - start
    if reference is not None and results and all(item.weight is None for _, item in results):
        raise UsageError(f"{reference} has none of the modules of {checkpoint}")
    report = _report(planned, reference, tokens, seed, seconds, results, whole)
    if json_output:
        print_json(report)
    else:
        _print(results, report)
    return 0 if all(item["finite"] for item in (*report["layers"], *report["moe"])) else 1


def _show_refusal(planned: Planned, json_output: bool) -> None:
    if json_output:
        print_json(planned.plan.to_dict())
    else:
        print_plan(planned.plan, make_console())


def _originals(planned: Planned, reference: Path | None) -> dict[str, OriginalWeights]:
    """The unquantized weights by component; empty without a reference."""
    if reference is None:
        return {}
    from omniplat.tools.fidelity import OriginalWeights

    opened = open_checkpoint(reference)
    found: dict[str, Component] = {item.name: item for item in opened.components}
    names = [item.component.name for item in planned.resolutions]
    if len(found) == 1 and len(names) == 1:
        found = {names[0]: opened.components[0]}
    return {
        name: OriginalWeights(item.tensors, ShardReader(item.root)) for name, item in found.items() if name in names
    }


def _measure(
    planned: Planned, originals: dict[str, OriginalWeights], tokens: int, seed: int, *, quiet: bool
) -> tuple[list[tuple[str, LayerFidelity]], list[tuple[str, MoeFidelity]]]:
    """Every quantized layer, and every mixture-of-experts layer with its router."""
    from omniplat.tools.fidelity import input_dtype, measure
    from omniplat.tools.fidelity_moe import measure_moe

    readers = {item.component.name: ShardReader(item.component.root) for item in planned.resolutions}
    total = sum(item.layer.status == "ok" for item in planned.layers)
    results: list[tuple[str, LayerFidelity]] = []
    mixtures: list[tuple[str, MoeFidelity]] = []
    for name, item, layer in load_layers(planned):
        part = item.layer.component
        reader, original = readers[part], originals.get(part)
        if item.layer.op == "moe":
            found, whole = measure_moe(planned, item, layer, reader, original, rows=tokens, seed=seed)
            if whole is not None:
                mixtures.append((f"{part}/{whole.name}" if part else whole.name, whole))
        else:
            found = measure(layer, item.packed, reader, original, rows=tokens, seed=seed, dtype=input_dtype(item))
        results.append((name, found))
        if not quiet and sys.stderr.isatty():
            print(f"\r{len(results)} of {total} layers", end="", file=sys.stderr)
    if not quiet and sys.stderr.isatty():
        print(file=sys.stderr)
    return results, mixtures


def _report(
    planned: Planned,
    reference: Path | None,
    tokens: int,
    seed: int,
    seconds: float,
    results: Sequence[tuple[str, LayerFidelity]],
    whole: Sequence[tuple[str, MoeFidelity]],
) -> dict[str, Any]:
    from omniplat.tools.fidelity import aggregate

    plan = planned.plan
    return {
        "schema": SCHEMA,
        "omniplat": plan.omniplat,
        "checkpoint": plan.checkpoint.path,
        "device": {"kind": plan.device.kind, "arch": plan.device.arch, "name": plan.device.name},
        "reference": str(reference) if reference is not None else None,
        "tokens": tokens,
        "seed": seed,
        "seconds": seconds,
        "layers": [_layer(name, item) for name, item in results],
        "by_scheme": [_scheme(item) for item in aggregate(item for _, item in results)],
        "moe": [_mixture(name, item) for name, item in whole],
    }


def _mixture(name: str, item: MoeFidelity) -> dict[str, Any]:
    return {
        "name": name,
        "router": item.router,
        "top_k": item.top_k,
        "shared": list(item.shared),
        "output_error": item.output.relative if item.output else None,
        "seconds": item.seconds,
        "finite": item.finite,
    }


def _layer(name: str, item: LayerFidelity) -> dict[str, Any]:
    return {
        "name": name,
        "scheme": item.scheme,
        "kernel": item.kernel,
        "weight_error": item.weight.relative if item.weight else None,
        "output_error": item.output.relative if item.output else None,
        "seconds": item.seconds,
        "resident_bytes": item.nbytes,
        "finite": item.finite,
    }


def _scheme(item: SchemeFidelity) -> dict[str, Any]:
    return {
        "scheme": item.scheme,
        "layers": item.layers,
        "compared": item.compared,
        "weight_error": item.weight.relative if item.weight else None,
        "output_error": item.output.relative if item.output else None,
        "seconds": item.seconds,
        "resident_bytes": item.nbytes,
    }


def _print(results: Sequence[tuple[str, LayerFidelity]], report: dict[str, Any]) -> None:
    from rich.table import Table

    console = make_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("layer", "n", "scheme", "kernel", "weight rel. L2", "output rel. L2", "ms per call", "resident")
    for column in columns:
        table.add_column(column, justify="left" if column in ("layer", "scheme", "kernel") else "right")
    by_layer = dict(results)
    for names in group_names(list(by_layer), lambda name: (by_layer[name].scheme, by_layer[name].kernel)):
        members = [by_layer[name] for name in names]
        table.add_row(
            escape(collapse(names)),
            str(len(members)),
            members[0].scheme,
            members[0].kernel,
            _range([item.weight.relative for item in members if item.weight]),
            _range([item.output.relative for item in members if item.output]),
            f"{1e3 * sum(item.seconds for item in members) / len(members):.2f}",
            human_bytes(sum(item.nbytes for item in members)),
        )
    console.print(table)
    for scheme in report["by_scheme"]:
        console.print(
            f"[bold]{scheme['scheme']}[/]: {scheme['layers']} layers, {scheme['compared']} compared with the original; "
            f"relative L2 of weights {_figure(scheme['weight_error'])}, of outputs {_figure(scheme['output_error'])}; "
            f"{1e3 * scheme['seconds']:.1f} ms for one call of each with {report['tokens']} tokens; "
            f"{human_bytes(scheme['resident_bytes'])} resident",
            highlight=False,
        )
    _print_mixtures(report["moe"], console)
    not_finite = [item["name"] for item in (*report["layers"], *report["moe"]) if not item["finite"]]
    for name in not_finite:
        console.print(f"[bold red]error[/] {escape(name)}: the output is not finite", highlight=False)
    console.print(f"{len(results)} layers loaded and run in {report['seconds']:.2f} s", highlight=False)


def _print_mixtures(mixtures: Sequence[dict[str, Any]], console: Console) -> None:
    from rich.markup import escape

    by_name = {item["name"]: item for item in mixtures}
    for names in group_names(list(by_name), lambda name: (by_name[name]["top_k"], len(by_name[name]["shared"]))):
        members = [by_name[name] for name in names]
        errors = [item["output_error"] for item in members if item["output_error"] is not None]
        shared = ", with a shared expert" if members[0]["shared"] else ""
        console.print(
            f"[bold]{escape(collapse(names))}[/]: {len(members)} whole, each row to {members[0]['top_k']} experts by "
            f"the checkpoint's router{shared}; relative L2 of outputs {_range(errors) or 'not compared'}; "
            f"{1e3 * sum(item['seconds'] for item in members) / len(members):.2f} ms per call",
            highlight=False,
        )


def _figure(value: float | None) -> str:
    return f"{value:.4f}" if value is not None else "not compared"


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = _figure(min(values)), _figure(max(values))
    return low if low == high else f"{low}..{high}"
