"""Which tensor- and expert-parallel sizes a layer allows, from shapes and schemes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omniplat.scheme import Scheme, TensorQuant

#: Tensor-parallel sizes that are examined.
TP_SIZES = (1, 2, 3, 4, 6, 8, 16)


@dataclass(frozen=True, slots=True)
class Cut:
    """Why a shard of a layer is impossible, in words; empty when it is possible."""

    problem: str = ""

    @property
    def legal(self) -> bool:
        return not self.problem


LEGAL = Cut()


def cut_rows(scheme: Scheme, parts: Sequence[int], tp: int, *, what: str = "N") -> Cut:
    """Column-parallel: every fused part's rows are split by `tp`. 2-D blocks must not be cut."""
    if tp == 1:
        return LEGAL
    for rows in parts:
        if rows % tp:
            return Cut(f"{what} = {rows} is not a multiple of tp = {tp}")
        block = scheme.weight.block[0] if scheme.weight.granularity == "block" else 1
        if (rows // tp) % block:
            return Cut(f"{what} / tp = {rows // tp} cuts a block of {block} rows")
    return LEGAL


def cut_heads(kv_heads: int, heads: int, tp: int) -> Cut:
    """QKV: query heads are split; KV heads are split, or replicated when there are fewer than ranks."""
    if heads % tp:
        return Cut(f"{heads} attention heads are not a multiple of tp = {tp}")
    if kv_heads % tp and tp % kv_heads:
        return Cut(f"{kv_heads} KV heads are neither a multiple nor a divisor of tp = {tp}")
    return LEGAL


def cut_columns(scheme: Scheme, columns: int, tp: int, *, what: str = "K") -> Cut:
    """Row-parallel: K is split by `tp`. Groups, blocks, packed bytes and activation groups must not be cut."""
    if tp == 1:
        return LEGAL
    if columns % tp:
        return Cut(f"{what} = {columns} is not a multiple of tp = {tp}")
    shard = columns // tp
    for unit, name in _column_units(scheme):
        if shard % unit:
            return Cut(f"{what} / tp = {shard} cuts a {name} of {unit}")
    return LEGAL


def _column_units(scheme: Scheme) -> list[tuple[int, str]]:
    units: list[tuple[int, str]] = []
    quants: list[tuple[TensorQuant, str]] = [(scheme.weight, "weight")]
    if scheme.activation is not None:
        quants.append((scheme.activation, "activation"))
    for quant, whose in quants:
        if quant.granularity == "group" and quant.element != "bf16":
            units.append((quant.group_size, f"{whose} group"))
        if quant.granularity == "block":
            units.append((quant.block[1], f"{whose} block"))
        if quant.second_scale == "dual":
            units.append((512, f"{whose} second-level group"))
        if quant.element in ("nf4", "fp4_bnb") or quant.element.endswith("4"):
            units.append((2, f"{whose} byte"))
    return units
