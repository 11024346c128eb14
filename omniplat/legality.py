"""Which tensor- and expert-parallel sizes a layer allows, from shapes and schemes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omniplat.scheme import Scheme, TensorQuant

#: Tensor-parallel sizes that are examined.
TP_SIZES = (1, 2, 3, 4, 6, 8, 16)

#: GGUF's types whose blocks hold 32 values; those of the others hold 256.
_GGUF_SMALL = frozenset({"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "iq4_nl", "mxfp4"})


@dataclass(frozen=True, slots=True)
class Cut:
    """Why a shard of a layer is impossible, in words; empty when it is possible."""

    problem: str = ""

    @property
    def legal(self) -> bool:
        return not self.problem


LEGAL = Cut()


def cut_rows(scheme: Scheme, parts: Sequence[int], tp: int, *, columns: int = 0, what: str = "N") -> Cut:
    """Column-parallel: every fused part's rows are split by `tp`. 2-D blocks must not be cut.

    With `columns` (K), formats whose blocks run on from row to row are checked too.
    """
    if tp == 1:
        return LEGAL
    for rows in parts:
        if rows % tp:
            return Cut(f"{what} = {rows} is not a multiple of tp = {tp}")
        if problem := _rows_problem(scheme, rows // tp, columns):
            return Cut(f"{what} / tp = {rows // tp} cuts {problem}")
    return LEGAL


def cut_heads(kv_heads: int, heads: int, tp: int) -> Cut:
    """QKV: query heads are split; KV heads are split, or replicated when there are fewer than ranks."""
    if heads % tp:
        return Cut(f"{heads} attention heads are not a multiple of tp = {tp}")
    if kv_heads % tp and tp % kv_heads:
        return Cut(f"{kv_heads} KV heads are neither a multiple nor a divisor of tp = {tp}")
    return LEGAL


def rank_rows(rows: int, kv_heads: int, tp: int, *, is_kv: bool) -> int:
    """Rows of one part of QKV that a rank holds: keys and values are replicated where ranks outnumber KV heads."""
    return rows // min(tp, kv_heads) if is_kv else rows // tp


def cut_qkv(scheme: Scheme, parts: Sequence[int], kv: Sequence[bool], kv_heads: int, heads: int, tp: int) -> Cut:
    """Column-parallel attention: whole heads to every rank, and no 2-D block cut between two heads.

    `kv[i]` is True where `parts[i]` are the rows of keys or values.
    """
    cut = cut_heads(kv_heads, heads, tp)
    if tp == 1 or not cut.legal:
        return cut
    for rows, is_kv in zip(parts, kv, strict=True):
        groups = min(tp, kv_heads) if is_kv else tp
        if rows % groups:
            return Cut(f"N = {rows} is not a multiple of {groups} ranks")
        if problem := _rows_problem(scheme, rows // groups, 0):
            return Cut(f"N per rank = {rows // groups} cuts {problem}")
    return LEGAL


def cut_columns(scheme: Scheme, columns: int, tp: int, *, what: str = "K") -> Cut:
    """Row-parallel: K is split by `tp`. Groups, blocks, packed bytes and activation groups must not be cut."""
    if tp == 1:
        return LEGAL
    if columns % tp:
        return Cut(f"{what} = {columns} is not a multiple of tp = {tp}")
    shard = columns // tp
    for unit, name in column_units(scheme):
        if shard % unit:
            return Cut(f"{what} / tp = {shard} cuts a {name} of {unit}")
    return LEGAL


def _rows_problem(scheme: Scheme, rows: int, columns: int) -> str:
    """What a shard of so many rows cuts; empty when nothing."""
    weight = scheme.weight
    if weight.granularity == "block" and rows % weight.block[0]:
        return f"a block of {weight.block[0]} rows"
    # bitsandbytes' blocks follow each other through the whole matrix.
    if columns and weight.element in ("nf4", "fp4_bnb") and (rows * columns) % weight.group_size:
        return f"a block of {weight.group_size} values that runs on into the next row"
    return ""


def column_units(scheme: Scheme) -> list[tuple[int, str]]:
    """(values along K, what they are): a shard's K must be a multiple of each."""
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
        if quant.element.startswith("gguf_"):
            small = quant.element.removeprefix("gguf_") in _GGUF_SMALL
            units.append((32 if small else 256, f"{whose} block"))
    return units
