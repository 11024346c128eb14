"""SVDQuant: 4-bit residual, low-rank pair and smoothing vector, under the names of nunchaku and of vllm-omni."""

from __future__ import annotations

from dataclasses import replace

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import Draft, Stored, misfit
from omniplat.scheme import parse_weight_id

#: Packings: rows as every other 4-bit format (vllm-omni), or tiles of a warp's matrix instruction (nunchaku).
ROWS, WARP_TILES = "svdquant_rows", "svdquant_tiles"

#: Leaves that no other format puts beside a `qweight`.
SVDQUANT_MARKS = frozenset({"wscales", "proj_down", "lora_down", "smooth_factor"})

_LAYOUT_UNKNOWN = "no metadata says whether the codes lie in rows or in tiles of matrix instructions"
#: (dtypes of the scale) -> (weight id, columns of a group)
_KINDS = {"F8_E4M3": ("svdq-nvfp4", 16), "BF16": ("svdq-int4-g64", 64), "F16": ("svdq-int4-g64", 64)}


def low_rank(draft: Draft, qweight: TensorInfo) -> Stored:
    """`qweight` [N, K/2], `wscales` [K/g, N], `proj_down` [K, R], `proj_up` [N, R], `smooth_factor` [K]."""
    draft.roles["codes"] = "qweight"
    scale = draft.take("scale", "wscales", required=True)
    down = draft.take("low_rank_down", "proj_down", "lora_down", required=True)
    up = draft.take("low_rank_up", "proj_up", "lora_up", required=True)
    smooth = draft.take("smooth_factor", "smooth_factor", "smooth", required=True)
    draft.take("smooth_factor_orig", "smooth_factor_orig", "smooth_orig")
    if qweight.dtype not in ("I8", "U8") or len(qweight.shape) != 2:
        return draft.finish(
            None, ROWS, qweight.dtype, *_two(qweight), problem=f"qweight is {qweight.dtype} {list(qweight.shape)}"
        )
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    name, group = _KINDS.get(scale.dtype if scale is not None else "F8_E4M3", ("", 0))
    if name == "svdq-nvfp4":
        draft.take("channel_scale", "wcscales", required=True)
        draft.take("tensor_scale", "wtscale", required=True)
    packing = draft.hint.packing if draft.hint is not None and draft.hint.packing in (ROWS, WARP_TILES) else ""
    if not name:
        return draft.finish(
            None, packing or ROWS, qweight.dtype, n, k, problem=f"wscales are {scale.dtype}" if scale else ""
        )
    problem = ""
    if scale is not None and scale.shape != (-(-k // group), n):
        problem = misfit(scale, n, k)
    for tensor, rows in ((down, k), (up, n)):
        if tensor is not None and (len(tensor.shape) != 2 or tensor.shape[0] != rows):
            problem = misfit(tensor, n, k)
    if smooth is not None and smooth.shape != (k,):
        problem = misfit(smooth, n, k)
    stored = draft.finish(parse_weight_id(name), packing or ROWS, qweight.dtype, n, k, problem=problem)
    return replace(stored, pre_scale=smooth is not None, unsupported="" if packing else _LAYOUT_UNKNOWN)


def _two(tensor: TensorInfo) -> tuple[int, int]:
    shape = (*tensor.shape, 0, 0)
    return shape[0], shape[1]
