"""Storages of diffusion engines, of Ascend and of GGUF: which of them a module has, if any."""

from __future__ import annotations

from omniplat.checkpoint.tensors import FLOAT_DTYPES, GGUF_PREFIX
from omniplat.formats.recognise.ascend import MARKS, container8, numbers, transformation
from omniplat.formats.recognise.draft import E8M0_DTYPES, Draft, Stored
from omniplat.formats.recognise.svdquant import SVDQUANT_MARKS, low_rank
from omniplat.formats.recognise.tiles import comfy, is_tiled, tiled_fp4, undetermined_fp4
from omniplat.formats.recognise.unpacked import FLOAT8, float8
from omniplat.scheme import TensorQuant, parse_weight_id

#: Packing of a `Declared` whose weights may be numbers in a wider container.
NUMBERS = "numbers"


def of_another_family(draft: Draft) -> Stored | None:
    """How the module is stored where one of these families wrote it; None otherwise."""
    leaves = draft.leaves
    if "qweight" in leaves:
        return None if SVDQUANT_MARKS.isdisjoint(leaves) else low_rank(draft, leaves["qweight"])
    weight = leaves.get("weight")
    if weight is None or len(weight.shape) != 2:
        return None
    if weight.dtype.startswith(GGUF_PREFIX):
        draft.roles["codes"] = "weight"
        quant = TensorQuant(weight.dtype.lower(), "opaque")
        return draft.finish(quant, "gguf", weight.dtype, *weight.shape)
    draft.roles["codes"] = "weight"
    stored = _of_weight(draft)
    if stored is None:
        draft.roles.clear()
    return stored


def _of_weight(draft: Draft) -> Stored | None:
    leaves, weight = draft.leaves, draft.leaves["weight"]
    scale = leaves.get("weight_scale")
    if (stored := comfy(draft, weight)) is not None:
        return stored
    hinted = draft.hinted
    is_hinted = draft.hint is not None and draft.hint.packing == NUMBERS
    e8m0 = scale is not None and scale.dtype in E8M0_DTYPES
    if "weight_dual_scale" in leaves and weight.dtype not in FLOAT_DTYPES:
        return numbers(draft, weight)
    if is_hinted and e8m0 and hinted is not None and hinted.scale_format == "e8m0":
        # an fp8 container of mxfp8 is no container: the plain recogniser knows it
        if weight.dtype != "F8_E4M3" or hinted.element == "fp4_e2m1":
            return numbers(draft, weight)
        return None
    if weight.dtype == "I8" and (MARKS & leaves.keys() or transformation(draft)):
        return container8(draft, weight)
    if weight.dtype in FLOAT8 and "weight_offset" in leaves:
        # msModelSlim's fp8 spells out an offset of 0; unpacking checks that it is
        draft.take("zero_point", "weight_offset")
        return float8(draft, weight)
    if weight.dtype == "U8" and "weight_scale_2" in leaves and scale is not None and scale.dtype == "F8_E4M3":
        n, groups = weight.shape[0], weight.shape[1] // 8
        if is_tiled(scale, n, groups):
            is_declared = hinted == parse_weight_id("nvfp4")
            return tiled_fp4(draft, weight, high_first=False) if is_declared else undetermined_fp4(draft, weight)
    return None
