"""Recognising how a module is stored from dtypes, shapes and tensor names alone.

Metadata comes in only as a hint for what headers cannot show: whether GPTQ zero points carry an offset, that
an int8 tensor holds 4-bit values, how many bits a packed word holds when nothing else tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from omniplat.checkpoint.tensors import FLOAT_DTYPES, TensorInfo
from omniplat.formats.declared import Declared
from omniplat.formats.recognise.bitsandbytes import STATE, flat_four_bit, llm_int8, state_leaf
from omniplat.formats.recognise.draft import CODE_SCALES, QUANT_LEAVES, Draft, Leaves, Stored, unknown
from omniplat.formats.recognise.families import of_another_family
from omniplat.formats.recognise.hqq import STATE_LEAVES, half_quadratic
from omniplat.formats.recognise.nibbles import packed_bytes, packed_nibbles
from omniplat.formats.recognise.stacked import (
    as_in_columns,
    blocks,
    is_stacked,
    lies_in_columns,
    of_one_expert,
    turned,
)
from omniplat.formats.recognise.subclasses import data_leaf, subclass
from omniplat.formats.recognise.unpacked import FLOAT8, float8, int8
from omniplat.formats.recognise.words import SHAPE_LEAF, integer_columns, integer_rows, packed_words, shape_is_needed
from omniplat.scheme import UNQUANTIZED

__all__ = ["CODE_SCALES", "QUANT_LEAVES", "SHAPE_LEAF", "Stored", "recognise", "small_values"]


def small_values(leaves: Leaves, read: Callable[[TensorInfo], bytes]) -> tuple[tuple[str, bytes], ...]:
    """The bytes of the tensors that describe others: what recognition needs beyond headers, () for most modules.

    `read` raises ValueError for a tensor that is too large to be one.
    """
    names = [leaf for leaf in leaves if leaf.startswith(STATE)]
    if "W_q" in leaves:
        names += [leaf for leaf in STATE_LEAVES if leaf in leaves]
    elif "SCB" in leaves and "weight_format" in leaves:
        names.append("weight_format")
    elif shape_is_needed(leaves):
        names.append(SHAPE_LEAF)
    found = []
    for name in names:
        try:
            found.append((name, read(leaves[name])))
        except ValueError:
            continue
    return tuple(found)


def recognise(leaves: Leaves, hint: Declared | None = None, values: Mapping[str, bytes] | None = None) -> Stored | None:
    """How a module with these leaves is stored; None when it has no matrix that could be a layer.

    `values` is what `small_values` found.
    """
    draft = Draft(leaves, hint, values or {})
    if (stored := of_another_family(draft)) is not None:
        return stored
    if "qweight" in leaves:
        return integer_rows(draft, leaves["qweight"])
    if "weight_packed" in leaves:
        packed = leaves["weight_packed"]
        return packed_words(draft, packed) if packed.dtype == "I32" else packed_nibbles(draft, packed)
    if "W_q" in leaves:
        return half_quadratic(draft, leaves["W_q"])
    if "_blocks" in leaves:
        return blocks(draft, leaves["_blocks"])
    if codes := data_leaf(leaves):
        return subclass(draft, codes)
    weight = leaves.get("weight")
    if weight is None:
        return None
    if state := state_leaf(leaves):
        return flat_four_bit(draft, weight, state)
    if is_stacked(weight):
        expert = of_one_expert(leaves, weight.shape[0])
        in_columns = lies_in_columns(leaves)
        one = recognise(turned(expert) if in_columns else expert, hint, values)
        if one is not None and in_columns:
            one = as_in_columns(one, leaves)
        return replace(one, experts=weight.shape[0]) if one is not None else None
    draft.roles["codes"] = "weight"
    if weight.dtype in FLOAT_DTYPES:
        return _unquantized(draft, weight)
    if len(weight.shape) != 2:
        return unknown(draft, weight, f"weight is {weight.dtype} of shape {list(weight.shape)}")
    if weight.dtype in FLOAT8:
        return float8(draft, weight)
    if weight.dtype == "I8":
        return llm_int8(draft, weight) if "SCB" in leaves else int8(draft, weight)
    if weight.dtype == "I32":
        return integer_columns(draft, weight)
    if weight.dtype == "U8":
        return packed_bytes(draft, weight)
    return unknown(draft, weight, f"a weight of dtype {weight.dtype} fits no known storage")


def _unquantized(draft: Draft, weight: TensorInfo) -> Stored | None:
    if len(weight.shape) != 2:
        return None
    return draft.finish(UNQUANTIZED.weight, "plain", weight.dtype, weight.shape[0], weight.shape[1])
