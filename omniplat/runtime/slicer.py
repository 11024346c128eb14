"""Cutting a canonical weight for one rank of a tensor- or expert-parallel group.

Cuts fall between rows, or between columns on the boundaries of groups, blocks and bytes: a slice is again a
canonical weight of the same scheme. Arrays of a slice are views of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from omniplat.canonical import ROW_ROLES, Array, CanonicalWeight
from omniplat.errors import UsageError
from omniplat.legality import DUAL_COLUMNS, quant_units
from omniplat.packed import Split
from omniplat.scheme import low_rank_base


@dataclass(frozen=True, slots=True)
class Rank:
    """Which part of every layer this process holds. Raises UsageError for a rank that is not below its size."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (("tp", self.tp_rank, self.tp_size), ("ep", self.ep_rank, self.ep_size)):
            if not 0 <= rank < size:
                raise UsageError(f"{name}_rank {rank} is not one of 0..{size - 1}")


#: A process that holds everything.
WHOLE = Rank()


def row_ranges(parts: Sequence[int], split: Split, rank: Rank) -> tuple[range, ...]:
    """For each part the rows, counted from the part's first one, that a rank of a column-parallel layer holds.

    Keys and values are held by several ranks where there are fewer heads than ranks. Every part whole for the
    other styles.
    """
    if split.style != "column" or rank.tp_size == 1:
        return tuple(range(rows) for rows in parts)
    ranges = []
    for rows, is_kv in zip(parts, split.kv or (False,) * len(parts), strict=True):
        shares = min(rank.tp_size, split.kv_heads) if is_kv else rank.tp_size
        held = rows // shares
        index = rank.tp_rank // (rank.tp_size // shares)
        ranges.append(range(index * held, (index + 1) * held))
    return tuple(ranges)


def column_range(columns: int, rank: Rank) -> range:
    """The columns that a rank of a row-parallel layer holds."""
    held = columns // rank.tp_size
    return range(rank.tp_rank * held, (rank.tp_rank + 1) * held)


def expert_range(experts: int, rank: Rank) -> range:
    """The experts that a rank holds: runs of equal length."""
    held = experts // rank.ep_size
    return range(rank.ep_rank * held, (rank.ep_rank + 1) * held)


def take_rows(weight: CanonicalWeight, rows: range) -> CanonicalWeight:
    """Rows of a weight [N, K]. Raises UsageError where a 2-D block would be cut."""
    if rows == range(weight.out_features):
        return weight
    height = weight.scheme.weight.block[0] if weight.scheme.weight.granularity == "block" else 1
    _check(rows, weight.out_features, height, f"rows, in a block of {height}")
    blocks = slice(rows.start // height, -(-rows.stop // height))
    tensors = dict(weight.tensors)
    for role, array in weight.tensors.items():
        if role in ROW_ROLES:
            tensors[role] = array[blocks if role in ("scale", "zero_point") else slice(rows.start, rows.stop)]
    return replace(weight, out_features=len(rows), tensors=tensors)


def take_columns(weight: CanonicalWeight, columns: range) -> CanonicalWeight:
    """Columns of a weight [N, K], bias included. Raises UsageError where a group, block or byte would be cut.

    With a `group_index` the columns of a group may lie anywhere: the slice keeps all scales of its rows.
    """
    if columns == range(weight.in_features):
        return weight
    if weight.scheme.is_transformed:
        raise UsageError("columns of a transformed input cannot be cut: every one of them depends on all")
    for unit, what in quant_units(weight.scheme.weight):
        if what != "group" or "group_index" not in weight.tensors:
            _check(columns, weight.in_features, unit, f"columns, in a {what} of {unit}")
    _check(columns, weight.in_features, 1, "columns")
    tensors = {role: _columns_of(role, array, weight, columns) for role, array in weight.tensors.items()}
    return replace(weight, in_features=len(columns), tensors=tensors)


def without_bias(weight: CanonicalWeight) -> CanonicalWeight:
    """The weight without its bias: of row-parallel ranks, whose outputs are added up, only the first has one."""
    return replace(weight, tensors={role: array for role, array in weight.tensors.items() if role != "bias"})


def _columns_of(role: str, array: Array, weight: CanonicalWeight, columns: range) -> Array:
    quant = low_rank_base(weight.scheme.weight) or weight.scheme.weight
    if role == "codes":
        # Whatever a row of codes holds, bytes of pairs and blocks with their scales among it, it holds evenly.
        return array[:, _part(columns.start, array, weight) : _part(columns.stop, array, weight)]
    if role in ("group_index", "pre_scale", "low_rank_down"):
        return array[columns.start : columns.stop]
    unit = {"group": quant.group_size, "block": quant.block[1]}.get(quant.granularity, 0)
    if role == "scale2":
        unit = DUAL_COLUMNS
    elif role not in ("scale", "zero_point") or "group_index" in weight.tensors:
        unit = 0
    return array[:, columns.start // unit : -(-columns.stop // unit)] if unit else array


def _part(column: int, codes: Array, weight: CanonicalWeight) -> int:
    per_row: int = codes.shape[1]
    return column * per_row // weight.in_features


def _check(cut: range, size: int, unit: int, what: str) -> None:
    """A cut starts on a boundary, and ends on one or at the end of the weight."""
    inside = 0 <= cut.start < cut.stop <= size
    if not inside or cut.start % unit or (cut.stop % unit and cut.stop != size):
        raise UsageError(f"a slice {cut.start}..{cut.stop} of {size} {what}: nothing can be cut there")
