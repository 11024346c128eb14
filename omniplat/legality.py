"""Which tensor- and expert-parallel sizes a layer allows, from shapes and schemes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from omniplat.layer import LayerSpec
from omniplat.packed import PackedLayer, Split
from omniplat.scheme import Scheme, TensorQuant, low_rank_base, with_cut_blocks

#: Tensor-parallel sizes that are examined.
TP_SIZES = (1, 2, 3, 4, 6, 8, 16)

#: Columns that share one second-level scale of the dual-level format.
DUAL_COLUMNS = 512

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


def cut_layer(layer: PackedLayer, tp: int) -> Cut:
    """Whether `tp` ranks can share a layer: what the plan says, and what loading refuses."""
    spec, split = layer.spec, layer.split
    if spec.moe is not None:
        down = spec.moe.w2_scheme or spec.scheme
        rows = cut_rows(spec.scheme, (spec.moe.intermediate,), tp, columns=spec.in_features, what="I")
        return rows if not rows.legal else cut_columns(down, spec.moe.intermediate, tp, what="I")
    if split.style == "row":
        return cut_columns(spec.scheme, spec.in_features, tp)
    if split.style == "column":
        if split.heads:
            return cut_qkv(spec.scheme, spec.parts, split.kv, split.kv_heads, split.heads, tp)
        return cut_rows(spec.scheme, spec.parts, tp, columns=spec.in_features)
    return LEGAL


def rank_spec(spec: LayerSpec, split: Split, tp: int, ep: int) -> LayerSpec:
    """The layer as one of the ranks holds it; all of them hold the same shape."""
    if spec.moe is not None:
        intermediate = spec.moe.intermediate // tp
        moe = replace(spec.moe, intermediate=intermediate, experts=spec.moe.experts // ep)
        return replace(spec, moe=moe, parts=(intermediate, intermediate))
    if tp == 1 or split.style == "replicated":
        return spec
    if split.style == "row":
        return replace(spec, in_features=spec.in_features // tp)
    rows = spec.parts or (spec.out_features,)
    kv = split.kv or (False,) * len(rows)
    parts = tuple(rank_rows(n, split.kv_heads, tp, is_kv=is_kv) for n, is_kv in zip(rows, kv, strict=True))
    return replace(spec, out_features=sum(parts), parts=parts)


def assembled_spec(layer: PackedLayer, tp: int, ep: int) -> LayerSpec:
    """`rank_spec` with the blocks that the weight has once its parts are put together."""
    spec = rank_spec(layer.spec, layer.split, tp, ep)
    fused = len(layer.parts) > 1 if spec.moe is None else tp > 1 or any(len(group) > 1 for group in layer.w13)
    if not fused or spec.scheme.weight.granularity != "block":
        return spec
    starts = accumulate(spec.parts[:-1])
    return replace(spec, scheme=replace(spec.scheme, weight=with_cut_blocks(spec.scheme.weight, starts)))


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
    if scheme.is_transformed:
        return Cut(f"{what} = {columns} is transformed as a whole")
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
    units = [(unit, f"weight {what}") for unit, what in quant_units(scheme.weight)]
    if scheme.activation is not None:
        units += [(unit, f"activation {what}") for unit, what in quant_units(scheme.activation)]
    return units


def quant_units(quant: TensorQuant) -> list[tuple[int, str]]:
    """(values along K, what they are) of one quantized tensor."""
    units: list[tuple[int, str]] = []
    quant = low_rank_base(quant) or quant
    if quant.granularity == "group" and quant.element != "bf16":
        units.append((quant.group_size, "group"))
    if quant.granularity == "block":
        units.append((quant.block[1], "block"))
    if quant.second_scale == "dual":
        units.append((DUAL_COLUMNS, "second-level group"))
    if quant.element in ("nf4", "fp4_bnb") or quant.element.endswith("4"):
        units.append((2, "byte"))
    if quant.element.startswith("gguf_"):
        small = quant.element.removeprefix("gguf_") in _GGUF_SMALL
        units.append((32 if small else 256, "block"))
    return units
