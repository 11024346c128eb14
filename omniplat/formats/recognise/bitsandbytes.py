"""bitsandbytes: 4-bit codes flattened row by row, whose shape stands in a JSON tensor, and LLM.int8 weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

import msgspec

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import Draft, Stored, misfit, unknown
from omniplat.scheme import TensorQuant, parse_weight_id

#: The JSON tensor that describes a 4-bit weight; what follows names its element.
STATE = "weight.quant_state.bitsandbytes__"
_ELEMENTS = {"nf4": "nf4", "fp4": "fp4_bnb"}
_ROW_MAJOR = b"\0"
#: Blocks are cut into runs no shorter than this: each has an f32 scale of its own.
_SHORTEST_RUN = 8


class _State(msgspec.Struct):
    """The fields of the state that are used. `shape` is [N, K]."""

    shape: tuple[int, int]
    blocksize: int = 64
    nested_blocksize: int = 256
    nested_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How many blocks of values and, with double quantization, of scales a weight has."""

    outer: int
    nested: int


def state_leaf(leaves: object) -> str:
    """The leaf that describes a 4-bit weight among `leaves` (an iterable of names); "" where there is none."""
    return next((name for name in leaves if name.startswith(STATE)), "")  # type: ignore[attr-defined]


def flat_four_bit(draft: Draft, weight: TensorInfo, leaf: str) -> Stored:
    """`weight` [numel / 2, 1] in any container dtype, `absmax` per block; all shapes are of the state's [N, K]."""
    draft.roles["codes"] = "weight"
    element = _ELEMENTS.get(leaf.removeprefix(STATE))
    if element is None:
        return unknown(draft, weight, f"{leaf} names no 4-bit type of bitsandbytes")
    try:
        state = msgspec.json.decode(draft.values.get(leaf, b""), type=_State)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        return unknown(draft, weight, f"{leaf} does not describe the weight: {exc}")
    n, k = state.shape
    if min(n, k, state.blocksize, state.nested_blocksize) <= 0 or weight.nbytes * 2 != n * k:
        return unknown(draft, weight, f"weight holds {weight.nbytes * 2} codes of 4 bits, {leaf} says {[n, k]}")
    outer = -(-n * k // state.blocksize)
    problem = _take_scales(draft, _Blocks(outer, -(-outer // state.nested_blocksize)), n, k)
    # Row ends and block ends are multiples of this: a run of so many values lies in one block.
    run = gcd(k, state.blocksize)
    group = run if run % 2 == 0 and run >= _SHORTEST_RUN else state.blocksize
    stored = draft.finish(TensorQuant(element, "group", group), "nibbles_flat", weight.dtype, n, k, problem=problem)
    nested = "nested_scale" in draft.roles
    storage = replace(
        stored.storage,
        nested_block=state.nested_blocksize if nested else 0,
        scale_offset=state.nested_offset if nested else 0.0,
        flat_block=state.blocksize if group != state.blocksize else 0,
    )
    return replace(stored, storage=storage)


def _take_scales(draft: Draft, blocks: _Blocks, n: int, k: int) -> str:
    """Roles of the scales; words for one that does not fit, "" where all do."""
    draft.take("codebook", "weight.quant_map")
    absmax = draft.take("scale", "weight.absmax", required=True)
    if absmax is None:
        return ""
    if prod(absmax.shape) != blocks.outer:
        return misfit(absmax, n, k)
    if absmax.dtype == "F32":
        return ""
    nested = draft.take("nested_scale", "weight.nested_absmax", required=True)
    draft.take("nested_codebook", "weight.nested_quant_map", required=True)
    if absmax.dtype != "U8" or (nested is not None and prod(nested.shape) != blocks.nested):
        return misfit(absmax if nested is None else nested, n, k)
    return ""


def llm_int8(draft: Draft, weight: TensorInfo) -> Stored:
    """`weight` I8 [N, K] and `SCB` F32 [N], the largest magnitude of each row."""
    n, k = weight.shape
    scale = draft.take("scale", "SCB", required=True)
    problem = misfit(scale, n, k) if scale is not None and scale.shape not in ((n,), (n, 1)) else ""
    order = draft.values.get("weight_format", _ROW_MAJOR)
    stored = draft.finish(parse_weight_id("int8-bnb"), "plain", weight.dtype, n, k, problem=problem)
    if order != _ROW_MAJOR:
        reason = f"weight_format {order[0] if order else 0} is an order of rows and columns that a GPU kernel defines"
        stored = replace(stored, unsupported=reason)
    return stored
