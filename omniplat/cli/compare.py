"""`omniplat compare`: two checkpoints by their weights, or two images (folders of images) by what one sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite, isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniplat.api import require_files, require_torch
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.cli.output import answering_no, escape, make_console, print_json
from omniplat.cli.plan import collapse, group_names
from omniplat.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from omniplat.tools.compare import Unmatched
    from omniplat.tools.compare_images import ImageDistance
    from omniplat.tools.compare_weights import WeightDistance

SCHEMA = "omniplat.compare/1"


def compare_command(
    a: Path,
    b: Path,
    *,
    component: str | None,
    max_weight_error: float | None,
    min_psnr: float | None,
    min_ssim: float | None,
    json_output: bool,
) -> int:
    """Body of the command. Returns 1 where a bound is missed, a value is not finite or something has no counterpart."""
    if _is_image(a) != _is_image(b):
        raise UsageError(f"{a} and {b} are an image and something else: two checkpoints or two images are compared")
    if _is_image(a):
        if component is not None or max_weight_error is not None:
            raise UsageError("--component and --max-weight-error are for checkpoints; these are images")
        return _images(a, b, min_psnr, min_ssim, json_output)
    if min_psnr is not None or min_ssim is not None:
        raise UsageError("--min-psnr and --min-ssim are for images; these are checkpoints")
    return _weights(a, b, component, max_weight_error, json_output)


def _is_image(path: Path) -> bool:
    """A file with an image's ending, or a folder that holds images and no checkpoint."""
    from omniplat.tools.compare_images import SUFFIXES, image_files

    if not path.is_dir():
        return path.suffix.lower() in SUFFIXES
    markers = ("config.json", "model_index.json", "*.safetensors", "*.gguf")
    return not any(any(path.glob(marker)) for marker in markers) and any(image_files(path))


# --- images ----------------------------------------------------------------------------------------------------------


def _images(a: Path, b: Path, min_psnr: float | None, min_ssim: float | None, json_output: bool) -> int:
    from omniplat.tools.compare_images import compare_images

    found = compare_images(a, b)
    missed = [
        *_missed("psnr", min_psnr, ((item.name, item.psnr) for item in found.items), at_least=True),
        *_missed("ssim", min_ssim, ((item.name, item.ssim[1]) for item in found.items), at_least=True),
    ]
    rows = {"images": [_image(item) for item in found.items]}
    return _answer("images", a, b, rows, found.unmatched, missed, json_output, lambda: _image_table(found.items))


def _image(item: ImageDistance) -> dict[str, Any]:
    """`psnr` is null for equal images: it is infinite."""
    ssim = {str(scale): value for scale, value in item.ssim.items()}
    return {"name": item.name, "equal": isinf(item.psnr), "psnr": _finite(item.psnr), "ssim": ssim}


def _image_table(items: Sequence[ImageDistance]) -> Table:
    from omniplat.tools.compare_images import SCALES

    table = _table("image", "PSNR dB", *(f"SSIM 1/{scale}" if scale > 1 else "SSIM" for scale in SCALES))
    for item in items:
        ssim = (f"{item.ssim[scale]:.4f}" if scale in item.ssim else "too small" for scale in SCALES)
        table.add_row(escape(item.name), "equal" if isinf(item.psnr) else f"{item.psnr:.2f}", *ssim)
    return table


# --- weights ---------------------------------------------------------------------------------------------------------


def _weights(a: Path, b: Path, component: str | None, largest: float | None, json_output: bool) -> int:
    for path in (a, b):
        require_files(path)
    first, second = open_checkpoint(a), open_checkpoint(b)
    require_torch()
    from omniplat.tools.compare_weights import compare_weights

    with answering_no(json_output=json_output):
        found = compare_weights(first, second, component)
    missed = [f"{item.name}: not finite" for item in found.items if not item.finite]
    finite = [(item.name, item.error) for item in found.items if item.finite]
    missed += _missed("relative L2", largest, finite, at_least=False)
    rows = {"weights": [_weight(item) for item in found.items]}
    return _answer("weights", a, b, rows, found.unmatched, missed, json_output, lambda: _weight_table(found.items))


def _weight(item: WeightDistance) -> dict[str, Any]:
    return {"name": item.name, "a": item.scheme_a, "b": item.scheme_b, "relative_l2": _finite(item.error)}


def _weight_table(items: Sequence[WeightDistance]) -> Table:
    by_name = {item.name: item for item in items}
    table = _table("tensor", "n", "A", "B", "rel. L2, least", "largest")
    for names in group_names(list(by_name), lambda name: (by_name[name].scheme_a, by_name[name].scheme_b)):
        members = [by_name[name] for name in names]
        errors = [item.error for item in members]
        figures = (f"{value:.3e}" if value else "0" for value in (min(errors), max(errors)))
        table.add_row(escape(collapse(names)), str(len(members)), members[0].scheme_a, members[0].scheme_b, *figures)
    return table


# --- both ------------------------------------------------------------------------------------------------------------


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _missed(what: str, bound: float | None, values: Iterable[tuple[str, float]], *, at_least: bool) -> list[str]:
    """A line for everything that is out of `bound`."""
    if bound is None:
        return []
    sign = "<" if at_least else ">"
    out = ((name, value) for name, value in values if (value < bound if at_least else value > bound))
    return [f"{name}: {what} {value:.4g} {sign} {bound:g}" for name, value in out]


def _answer(
    kind: str,
    a: Path,
    b: Path,
    rows: dict[str, list[dict[str, Any]]],
    unmatched: Sequence[Unmatched],
    missed: Sequence[str],
    json_output: bool,
    table: Callable[[], Table],
) -> int:
    if not any(rows.values()) and not unmatched:
        raise UsageError(f"{a} and {b} hold nothing that can be compared")
    if json_output:
        others = [{"name": item.name, "reason": item.reason} for item in unmatched]
        document = {"schema": SCHEMA, "kind": kind, "a": str(a), "b": str(b), **rows}
        print_json({**document, "unmatched": others, "out_of_bounds": list(missed)})
    else:
        console = make_console()
        console.print(table())
        reasons = {item.name: item.reason for item in unmatched}
        for names in group_names(list(reasons), lambda name: (reasons[name],)):
            text = f"{escape(collapse(names))}: {escape(reasons[names[0]])}"
            console.print(f"[bold red]not compared[/] {text}", highlight=False)
        for line in missed:
            console.print(f"[bold red]out of bounds[/] {escape(line)}", highlight=False)
    return 1 if unmatched or missed else 0


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in ("A", "B") else "right")
    return table
