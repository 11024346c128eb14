"""`omniplat plan`: the plan of a checkpoint, for people (grouped) or as the JSON document."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from omniplat.api import plan as make
from omniplat.cli.output import escape, human_bytes, make_console, print_json
from omniplat.device import Device
from omniplat.document import Plan, PlanLayer, PlanTrace
from omniplat.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
#: From this many columns on, the deciding rule has a column of its own.
_WIDE = 130
_MAX_NAMES = 4
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def plan_command(
    checkpoint: str,
    device: str | Device | None,
    *,
    backend: str | None,
    tp: int,
    ep: int,
    component: str | None,
    allow: Sequence[str],
    prefer: str | None,
    engine: str | None,
    revision: str | None,
    method: str | None,
    show_all: bool,
    explain: str | None,
    scan_scales: bool,
    json_output: bool,
) -> int:
    """Body of the command. Returns 0, or 1 when the plan has an error finding."""
    plan = make(
        checkpoint,
        device,
        backend=backend,
        tp=tp,
        ep=ep,
        component=component,
        allow=allow,
        prefer=prefer,
        engine=engine,
        revision=revision,
        method=method,
        scan_scales=scan_scales,
    )
    layer = _layer_of(plan, explain) if explain is not None else None
    if json_output:
        print_json(plan.to_dict())
    elif layer is not None:
        explain_layer(plan, layer, make_console())
    else:
        print_plan(plan, make_console(), show_all=show_all)
    return 0 if plan.ok else 1


def print_plan(plan: Plan, console: Console, *, show_all: bool = False) -> None:
    """The plan as a table grouped by repeated block, then its findings and sizes."""
    from rich.table import Table

    device = f"{plan.device.kind}:{plan.device.arch}"
    named = f" ({plan.device.name})" if plan.device.name else ""
    formats = ", ".join(plan.checkpoint.formats) or "no quantization metadata"
    console.print(f"[bold]{escape(plan.checkpoint.path)}[/]  {formats}  on {device}{escape(named)}", highlight=False)
    shown = plan.layers if show_all else [layer for layer in plan.layers if layer.status != "unquantized"]
    wide = console.width >= _WIDE
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("layer", "n", "declared", "stored", "executes", "kernel", *(("why",) if wide else ())):
        fixed = column in ("n", "declared", "stored", "executes")
        table.add_column(column, justify="right" if column == "n" else "left", overflow="fold", no_wrap=fixed)
    for names, layers in _rows(shown, show_all):
        first = layers[0]
        runs = first.executes or f"[red]{first.status}[/]"
        why = escape(_why(first))
        table.add_row(
            escape(names) if wide else f"{escape(names)}\n  [dim]{why}[/]",
            str(len(layers)),
            first.declared or "-",
            first.stored,
            runs if first.status != "unquantized" else "[dim]unquantized[/]",
            f"{first.backend}/{first.kernel}" if first.kernel else "",
            *((why,) if wide else ()),
        )
    console.print(table)
    if not show_all:
        _print_unquantized([layer for layer in plan.layers if layer.status == "unquantized"], console)
    _print_findings(plan, console)
    _print_spans(plan, console)
    summary = plan.summary
    console.print(
        f"{summary.layers} layers: {summary.ok} quantized, {summary.unquantized} unquantized, "
        f"{summary.unsupported} unsupported, {summary.invalid} invalid; "
        f"{human_bytes(summary.stored_bytes)} stored, {human_bytes(summary.resident_bytes)} resident "
        f"per {summary.per}; "
        f"legal tp {_listed(summary.legal_tp)}" + (f", ep {_listed(summary.legal_ep)}" if summary.legal_ep else ""),
        highlight=False,
    )


def _print_spans(plan: Plan, console: Console) -> None:
    """How far scales span, where they were read: the layers of each span, the largest first."""
    by_span: dict[tuple[int, str], list[PlanLayer]] = defaultdict(list)
    for layer in plan.layers:
        for weight, span in layer.scale_spans.items():
            by_span[span, weight].append(layer)
    for (span, weight), layers in sorted(by_span.items(), reverse=True):
        names = [text for text, _ in _rows(layers, False)]
        more = f" and {len(names) - _MAX_NAMES} more patterns" if len(names) > _MAX_NAMES else ""
        console.print(
            f"[dim]scales[/] of a row span up to {span} binades in {len(layers)} {weight} layers: "
            f"{escape(', '.join(names[:_MAX_NAMES]))}{more}",
            highlight=False,
        )


def _print_unquantized(layers: Sequence[PlanLayer], console: Console) -> None:
    """What stays in 16 or 32 bit, grouped by the rule that leaves it there."""
    groups: dict[str, list[PlanLayer]] = defaultdict(list)
    for layer in layers:
        groups[_why(layer)].append(layer)
    for why, members in groups.items():
        names = [text for text, _ in _rows(members, False)]
        more = f" and {len(names) - _MAX_NAMES} more patterns" if len(names) > _MAX_NAMES else ""
        console.print(
            f"[dim]unquantized[/] {len(members)} by {escape(why)}: {escape(', '.join(names[:_MAX_NAMES]))}{more}",
            highlight=False,
        )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(str(size) for size in sizes) or "none"


def _why(layer: PlanLayer) -> str:
    """The rule; one that quotes the module's own name is shortened to its list."""
    rule = layer.decided_by.rule
    for module in layer.modules:
        rule = rule.replace(f"'{module}'", "<its name>")
    return f"{rule} ({layer.decided_by.reading})" if layer.decided_by.reading else rule


def _rows(layers: Sequence[PlanLayer], show_all: bool) -> Iterable[tuple[str, list[PlanLayer]]]:
    """(name or name pattern, layers); layers that differ only in their indices share a row."""
    if show_all:
        yield from ((_full_name(layer), [layer]) for layer in layers)
        return
    by_name = {_full_name(layer): layer for layer in layers}

    def kind(name: str) -> tuple[object, ...]:
        layer = by_name[name]
        return layer.declared, layer.stored, layer.executes, layer.kernel, layer.status, _why(layer)

    for names in group_names(list(by_name), kind):
        yield collapse(names), [by_name[name] for name in names]


def group_names(names: Sequence[str], kind: Callable[[str], tuple[object, ...]]) -> list[list[str]]:
    """Names that differ in their indices only and are of one kind, together; groups in order of appearance."""
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in names:
        groups[(_INDEX.sub("{}", name), kind(name))].append(name)
    return list(groups.values())


def _full_name(layer: PlanLayer) -> str:
    return f"{layer.component}/{layer.name}" if layer.component else layer.name


def collapse(names: Sequence[str]) -> str:
    """One pattern for names that differ in indices only: `model.layers.{0..31}.mlp.experts`."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(_INDEX.findall(name) for name in names), strict=True)
    texts = iter([_ranges(sorted({int(value) for value in column})) for column in columns])
    return _INDEX.sub(lambda _: next(texts), names[0])


def _ranges(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"


def _print_findings(plan: Plan, console: Console) -> None:
    for item in plan.findings:
        where = f"{item.where.file}: " if item.where.file and not item.message.startswith(item.where.file) else ""
        console.print(
            f"[{_STYLES[item.severity]}]{item.severity}[/] {item.code}: {escape(where + item.message)}", highlight=False
        )
        if item.modules_total:
            more = f" and {item.modules_total - 1} more" if item.modules_total > 1 else ""
            console.print(f"    {escape(item.modules[0])}{more}", highlight=False)
        if item.fix:
            console.print(f"    fix: {escape(item.fix)}", highlight=False)


def explain_layer(plan: Plan, layer: PlanLayer, console: Console) -> None:
    """One layer's whole story: modules, declaration, storage, every kernel's answer, findings about it."""
    lines = [
        f"[bold]{escape(_full_name(layer))}[/]  {layer.op}  "
        + "  ".join(f"{key} {value}" for key, value in layer.shape.items()),
        f"  declared  {layer.declared or 'nothing'}   by {escape(layer.decided_by.file)} {escape(_why(layer))}",
        f"  stored    {layer.stored} in {layer.container}, {human_bytes(layer.stored_bytes)}",
        f"  executes  {layer.executes or layer.status}"
        + (f"   on {layer.backend}/{layer.kernel}" if layer.kernel else ""),
        f"  legal     tp {_listed(layer.legal_tp)}" + (f", ep {_listed(layer.legal_ep)}" if layer.legal_ep else ""),
        f"  modules   {escape(', '.join(layer.modules[:6]))}"
        + (f" and {len(layer.modules) - 6} more" if len(layer.modules) > 6 else ""),
    ]
    lines += [f"  scales    span up to {span} binades ({weight})" for weight, span in layer.scale_spans.items()]
    lines += [f"  kernel    {escape(_trace_line(trace))}" for trace in layer.trace]
    for item in plan.findings:
        if set(item.modules) & set(layer.modules):
            lines.append(f"  {item.severity:8}  {item.code}: {escape(item.message)}")
    for line in lines:
        console.print(line, highlight=False)


def _layer_of(plan: Plan, name: str) -> PlanLayer:
    """The layer of a name; raises UsageError, with names like it, where none has it."""
    try:
        return plan.layer(name)
    except KeyError:
        raise UsageError(f"no layer or module {name!r} in this plan{_similar(plan, name)}") from None


def _similar(plan: Plan, name: str) -> str:
    """What an unknown name may stand for: part of a name, a row of the table (`{0..3}`), a slip."""
    layers = [_full_name(layer) for layer in plan.layers]
    names = list(dict.fromkeys([*layers, *(module for layer in plan.layers for module in layer.modules)]))
    part = re.sub(r"\\\{[^{}]*\\\}", r"\\d+", re.escape(name))
    found = [full for full in names if re.search(part, full)] or get_close_matches(name, names, _MAX_NAMES)
    more = f" and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
    return f"; similar: {', '.join(found[:_MAX_NAMES])}{more}" if found else ""


def _trace_line(trace: PlanTrace) -> str:
    if trace.rejected is not None:
        rule, needed, found = (trace.rejected[key] for key in ("rule", "needed", "found"))
        return f"{trace.kernel}: needs {rule} {needed}, found {found}"
    return f"{trace.kernel}: would execute {(trace.accepted or {}).get('executes', '')}"
