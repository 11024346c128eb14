"""Recognising how a module is stored from dtypes, shapes and tensor names alone.

Metadata comes in only as a hint for what headers cannot show: whether GPTQ zero points carry an offset, that
an int8 tensor holds 4-bit values, how many bits a packed word holds when nothing else tells.
"""

from __future__ import annotations

from omniplat.checkpoint.tensors import FLOAT_DTYPES, TensorInfo
from omniplat.formats.declared import Declared
from omniplat.formats.recognise.draft import QUANT_LEAVES, Draft, Leaves, Stored, unknown
from omniplat.formats.recognise.nibbles import packed_bytes, packed_nibbles
from omniplat.formats.recognise.unpacked import FLOAT8, float8, int8
from omniplat.formats.recognise.words import integer_rows, packed_words
from omniplat.scheme import UNQUANTIZED

__all__ = ["QUANT_LEAVES", "Stored", "recognise"]


def recognise(leaves: Leaves, hint: Declared | None = None) -> Stored | None:
    """How a module with these leaves is stored; None when it has no matrix that could be a layer."""
    draft = Draft(leaves, hint)
    if "qweight" in leaves:
        return integer_rows(draft, leaves["qweight"])
    if "weight_packed" in leaves:
        packed = leaves["weight_packed"]
        return packed_words(draft, packed) if packed.dtype == "I32" else packed_nibbles(draft, packed)
    weight = leaves.get("weight")
    if weight is None:
        return None
    draft.roles["codes"] = "weight"
    if weight.dtype in FLOAT_DTYPES:
        return _unquantized(draft, weight)
    if len(weight.shape) != 2:
        return unknown(draft, weight, f"weight is {weight.dtype} of shape {list(weight.shape)}")
    if weight.dtype in FLOAT8:
        return float8(draft, weight)
    if weight.dtype == "I8":
        return int8(draft, weight)
    if weight.dtype == "U8":
        return packed_bytes(draft, weight)
    return unknown(draft, weight, f"a weight of dtype {weight.dtype} fits no known storage")


def _unquantized(draft: Draft, weight: TensorInfo) -> Stored | None:
    if len(weight.shape) != 2:
        return None
    return draft.finish(UNQUANTIZED.weight, "plain", weight.dtype, weight.shape[0], weight.shape[1])
