"""NVFP4 and MXFP8 of single-file diffusion checkpoints: block scales in tiles of 128 rows x 4 columns.

ComfyUI writes the tiles always, rows and columns padded, and the even column of fp4 into the high nibble; modelopt
writes them on request and keeps the even column in the low nibble. Where nothing is padded the shapes are those of
plain rows, so only metadata tells the layouts apart.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import E8M0_DTYPES, Draft, Stored, misfit
from omniplat.scheme import TensorQuant, parse_weight_id

#: Packing of a `Declared` whose tensors lie as ComfyUI lays them, and of one whose codes cannot be decoded here.
COMFY = "comfy"
COMFY_OPAQUE = "comfy_opaque"

_NIBBLES_UNKNOWN = "block scales lie in tiles, and no metadata says whether the even column is in the high nibble"


def padded_tiles(rows: int, groups: int) -> tuple[int, int]:
    """Shape of block scales in tiles."""
    return -(-rows // 128) * 128, -(-groups // 4) * 4


def is_tiled(leaves_scale: TensorInfo | None, rows: int, groups: int) -> bool:
    """True where a scale's shape can only be that of tiles."""
    if leaves_scale is None or leaves_scale.shape in ((rows, groups), (rows, groups, 1)):
        return False
    shape = padded_tiles(rows, groups)
    return leaves_scale.shape in (shape, (prod(shape),))


def comfy(draft: Draft, weight: TensorInfo) -> Stored | None:
    """A module that ComfyUI's metadata names; None where its tensors are no different from others'."""
    hint = draft.hint
    quant = draft.hinted
    if hint is None or quant is None or len(weight.shape) != 2:
        return None
    if hint.packing == COMFY_OPAQUE:
        draft.take("scale", "weight_scale", required=True)
        n, columns = weight.shape
        if quant.element == "int8":
            return draft.finish(quant, "plain", weight.dtype, n, columns)
        return draft.finish(quant, "nibbles_k", weight.dtype, n, 2 * columns)
    if hint.packing != COMFY:
        return None
    if quant == parse_weight_id("nvfp4") and weight.dtype == "U8":
        return tiled_fp4(draft, weight, high_first=True)
    if quant == parse_weight_id("mxfp8") and weight.dtype == "F8_E4M3":
        return _tiled_fp8(draft, weight, quant)
    return None


def tiled_fp4(draft: Draft, weight: TensorInfo, *, high_first: bool) -> Stored:
    n, k = weight.shape[0], weight.shape[1] * 2
    scale = draft.take("scale", "weight_scale", required=True)
    draft.take("global_scale", "weight_scale_2", required=True)
    packing = "nibbles_k_high" if high_first else "nibbles_k"
    stored = draft.finish(
        parse_weight_id("nvfp4"), packing, weight.dtype, n, k, problem=_misfit(scale, "F8_E4M3", n, k, 16)
    )
    return replace(stored, storage=replace(stored.storage, scale_layout="tiles"))


def undetermined_fp4(draft: Draft, weight: TensorInfo) -> Stored:
    """Tiles without metadata: NVFP4 beyond doubt, but the order of its nibbles is anybody's guess."""
    return replace(tiled_fp4(draft, weight, high_first=False), unsupported=_NIBBLES_UNKNOWN)


def _tiled_fp8(draft: Draft, weight: TensorInfo, quant: TensorQuant) -> Stored:
    n, k = weight.shape
    scale = draft.take("scale", "weight_scale", required=True)
    problem = _misfit(scale, E8M0_DTYPES, n, k, 32)
    stored = draft.finish(quant, "plain", weight.dtype, n, k, problem=problem)
    return replace(stored, storage=replace(stored.storage, scale_layout="tiles"))


def _misfit(scale: TensorInfo | None, dtypes: str | tuple[str, ...], n: int, k: int, group: int) -> str:
    if scale is None:
        return ""
    shape = padded_tiles(n, -(-k // group))
    fits = scale.dtype in dtypes and scale.shape in (shape, (prod(shape),))
    return "" if fits else f"{misfit(scale, n, k)} in tiles, needed {list(shape)}"
