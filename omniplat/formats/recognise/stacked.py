"""Experts stacked into one tensor: gpt-oss' blocks, and 3-D parameters that are one matrix per expert."""

from __future__ import annotations

from dataclasses import replace

from omniplat.checkpoint.modules import COLUMN_STACK_SUFFIXES
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import E8M0_DTYPES, Draft, Leaves, Stored, misfit, unknown
from omniplat.scheme import parse_weight_id


def is_stacked(weight: TensorInfo) -> bool:
    """True for a 3-D parameter of an experts module; a convolution's 3-D weight is called `weight`."""
    return len(weight.shape) == 3 and not weight.name.endswith(".weight")


def of_one_expert(leaves: Leaves, experts: int) -> Leaves:
    """The leaves as one expert sees them: without the leading dimension that all of them share."""

    def peel(info: TensorInfo) -> TensorInfo:
        if info.shape[:1] != (experts,):
            return info
        return TensorInfo(info.name, info.dtype, info.shape[1:], info.shard, info.start, info.end)

    return {leaf: peel(info) for leaf, info in leaves.items()}


def lies_in_columns(leaves: Leaves) -> bool:
    """True for modelopt's stacks, of which every expert is [K, N]: packed along K, group scales [K / g, N]."""
    return not leaves.keys().isdisjoint(COLUMN_STACK_SUFFIXES)


def turned(one_expert: Leaves) -> Leaves:
    """The leaves of an expert that lies in columns as they would be in rows, under the names of a linear layer."""

    def turn(info: TensorInfo) -> TensorInfo:
        return TensorInfo(info.name, info.dtype, info.shape[::-1], info.shard, info.start, info.end)

    return {_row_name(leaf): turn(info) for leaf, info in one_expert.items()}


def _row_name(leaf: str) -> str:
    return leaf.removeprefix("_") if leaf in COLUMN_STACK_SUFFIXES else leaf


def as_in_columns(stored: Stored, leaves: Leaves) -> Stored:
    """What was recognised of `turned` leaves, under the names and in the layout that they have."""
    names = {_row_name(leaf): leaf for leaf in leaves}
    named = {role: names[leaf] for role, leaf in stored.leaves.items()}
    scale = leaves.get(named.get("scale", ""))
    layout = "columns" if scale is not None and len(scale.shape) == 3 else "rows"
    return replace(
        stored,
        storage=replace(stored.storage, codes_in_columns=True, scale_layout=layout),
        leaves=named,
        missing=tuple(names.get(leaf, f"_{leaf}") for leaf in stored.missing),
        unexplained=tuple(names[leaf] for leaf in stored.unexplained),
    )


def blocks(draft: Draft, packed: TensorInfo) -> Stored:
    """`_blocks` U8 [E, N, G, 16] and `_scales` U8 [E, N, G]: MXFP4 of gpt-oss."""
    draft.roles["codes"] = "_blocks"
    if packed.dtype != "U8" or len(packed.shape) != 4 or packed.shape[3] != 16:
        return unknown(draft, packed, f"_blocks is {packed.dtype} {list(packed.shape)}, expected U8 [E, N, K/32, 16]")
    experts, n, groups, _ = packed.shape
    scale = draft.take("scale", "_scales", required=True)
    fits = scale is None or (scale.dtype in E8M0_DTYPES and scale.shape == (experts, n, groups))
    problem = "" if fits or scale is None else misfit(scale, n, groups * 32)
    stored = draft.finish(parse_weight_id("mxfp4"), "nibbles_k", "U8", n, groups * 32, problem=problem)
    return replace(stored, experts=experts)
