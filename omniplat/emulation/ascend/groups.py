"""Rows that are sorted by expert: how many each has, and what is computed of them group by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from omniplat.emulation.core import Emulation

#: What the schemas call `Tensor[]?`.
TensorList = Sequence[torch.Tensor] | None


def group_counts(
    emulation: Emulation, op: str, group_list: torch.Tensor, kind: int, experts: int, rows: int, *, whole: bool
) -> list[int]:
    """Rows of each expert; they cover all rows where `whole`, and never more."""
    require = emulation.require
    require(op, group_list.dtype == torch.int64, f"group_list is {group_list.dtype}")
    require(op, tuple(group_list.shape) == (experts,), f"group_list is {list(group_list.shape)} for {experts} weights")
    if kind not in (0, 1):
        raise NotImplementedError(f"{op}: group_list_type {kind} is not emulated")
    numbers = [int(value) for value in group_list]
    counts = numbers if kind == 1 else [b - a for a, b in zip([0, *numbers], numbers, strict=False)]
    require(op, min(counts) >= 0, "group_list is negative or decreases")
    total = sum(counts)
    fits = total == rows if whole else total <= rows
    require(op, fits, f"group_list covers {total} of {rows} rows")
    return counts


def only(emulation: Emulation, op: str, name: str, tensors: TensorList) -> torch.Tensor | None:
    if tensors is None or len(tensors) == 0:
        return None
    emulation.require(op, len(tensors) == 1, f"{name} is a list of {len(tensors)}, needed one tensor")
    return tensors[0]


def by_group(
    x: torch.Tensor, counts: list[int], columns: int, product: Callable[[int, slice], torch.Tensor]
) -> torch.Tensor:
    """f32 [rows, columns]: `product(expert, rows)` of every group, NaN behind the last one."""
    y = torch.full((x.shape[0], columns), torch.nan)
    start = 0
    for expert, count in enumerate(counts):
        part = slice(start, start + count)
        if count:
            y[part] = product(expert, part)
        start += count
    return y


def owners(counts: list[int]) -> torch.Tensor:
    """int64 [rows]: the expert of every row that a group covers."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
