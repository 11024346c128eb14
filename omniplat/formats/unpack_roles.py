"""Stored roles and layouts that only some dialects have, turned into the roles of the canonical form.

`canonicalise` calls this first, so that everything after it sees scales per row or group, codes in a known packing,
and one bias. What is decided here:

* msModelSlim's static int8 keeps `deq_scale` = input_scale * weight_scale (as an int64 bit pattern for fp16 models)
  and `quant_bias`, which holds the bias and the correction for the input's zero point in units of `deq_scale`:
  y = (q_x . q_w + quant_bias) * deq_scale. Its canonical bias is deq_scale * (quant_bias + offset * sum(q_w)).
* Two-stage int4 multiplies a scale per row with one per group; `scale_bias` is a copy of 8 * sum(w) for one kernel.
* ComfyUI and NVIDIA's products want block scales in tiles of 128 rows x 4 columns; ComfyUI's fp4 has the even column
  in the high nibble.
* SVDQuant stores scales transposed, two global factors, and the vector by which the input is divided.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from omniplat.canonical import Array
from omniplat.formats.unpack_codes import StoredModule
from omniplat.formats.unpack_flat import hqq, quanto
from omniplat.formats.unpack_tinygemm import tinygemm

_TILE_ROWS, _TILE_COLUMNS = 128, 4
#: Packings whose codes, scales and zero points are laid out together.
_FLAT = {"hqq": hqq, "quanto": quanto, "tinygemm": tinygemm}
#: Relative difference up to which `deq_scale` and `weight_scale` x `input_scale` count as the same: devices keep the
#: top 19 bits of a dequantization scale.
_SAME_SCALE = 2.0**-9


def standardised(m: StoredModule) -> StoredModule:
    """`m` with canonical roles and known layouts only; `m` itself where it has nothing else. Raises as `m.error`."""
    unpack = _FLAT.get(m.storage.packing)
    if unpack is not None:
        return unpack(m)
    m = with_scale_in_rows(m)
    arrays, storage = dict(m.arrays), m.storage
    if storage.codes_in_columns:
        arrays = _stack_in_rows(m)
        storage = replace(storage, codes_in_columns=False)
    if storage.packing.startswith("nibbles") and storage.container == "I8" and m.get("codes").dtype == np.int8:
        # DeepSeek-V4 and Ascend's tools keep the bytes in a signed tensor
        arrays["codes"] = arrays["codes"].view(np.uint8)
    if storage.packing == "nibbles_k_high":
        codes = arrays["codes"]
        arrays["codes"] = (codes >> 4) | (codes << 4)
        storage = replace(storage, packing="nibbles_k")
    if m.quant.element == "fp4_e2m1" and storage.packing == "plain" and m.get("codes").dtype == np.int8:
        # whole numbers in an int8 container: the engine reads them as numbers, never as codes
        arrays["codes"] = arrays["codes"].astype(np.float32)
    if "deq_scale" in arrays:
        _settle_dequantization(m, arrays)
    if "scale_second" in arrays:
        _settle_second_scale(m, arrays)
    arrays.pop("scale_bias", None)
    if arrays.keys() == m.arrays.keys() and all(arrays[role] is m.arrays[role] for role in arrays):
        return m
    return replace(m, arrays=arrays, storage=storage)


def _stack_in_rows(m: StoredModule) -> dict[str, Array]:
    """Codes as [..., N, K]; what all experts of a stack share, once for each."""
    arrays = dict(m.arrays)
    codes = arrays["codes"] = np.ascontiguousarray(m.get("codes").swapaxes(-1, -2))
    for role, array in m.arrays.items():
        if codes.ndim == 3 and array.size == 1:
            arrays[role] = np.broadcast_to(array.reshape(1), codes.shape[:1])
    return arrays


def with_scale_in_rows(m: StoredModule) -> StoredModule:
    """`m` with its scale as [rows, groups], whatever layout the file has it in; `m` itself where that is so."""
    scale = m.arrays.get("scale")
    if m.storage.scale_layout == "rows" or scale is None:
        return m
    if m.storage.scale_layout == "columns":
        scale = np.ascontiguousarray(scale.swapaxes(-1, -2))
    else:
        scale = from_tiles(m, scale, m.n, m.k // m.quant.group_size)
    return replace(m, arrays={**m.arrays, "scale": scale}, storage=replace(m.storage, scale_layout="rows"))


def from_tiles(m: StoredModule, scale: Array, rows: int, columns: int) -> Array:
    """Block scales out of tiles of 128 x 4: [rows, columns]. Within a tile, 32 runs of 4 x 4 interleave four rows."""
    tall, wide = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    if scale.size != tall * wide * _TILE_ROWS * _TILE_COLUMNS:
        raise m.shape_error("scale", [tall * _TILE_ROWS, wide * _TILE_COLUMNS], scale.shape)
    tiles = scale.reshape(tall, wide, 32, 4, 4)
    flat = tiles.transpose(0, 3, 2, 1, 4).reshape(tall * _TILE_ROWS, wide * _TILE_COLUMNS)
    return np.ascontiguousarray(flat[:rows, :columns])


# --- msModelSlim --------------------------------------------------------------------------------------------------


def _settle_dequantization(m: StoredModule, arrays: dict[str, Array]) -> None:
    """`deq_scale` and `quant_bias` to `scale` and `bias`; `weight_scale` must agree with them where it is there."""
    deq = arrays.pop("deq_scale")
    quant_bias = arrays.pop("quant_bias", None)
    if deq.dtype.kind in "iu" and deq.dtype.itemsize == 8:
        deq = (deq.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
    if deq.size != m.n:
        raise m.shape_error("deq_scale", [m.n], deq.shape)
    wide = deq.reshape(m.n).astype(np.float64)
    if not np.isfinite(wide).all():
        raise m.error("scale not finite: deq_scale has NaN or Inf")
    input_scale = _scalar(m, arrays, "input_scale")
    if not np.isfinite(input_scale) or input_scale == 0:
        raise m.error(f"scale not finite: input_scale is {input_scale}")
    weight_scale = wide / input_scale
    given = arrays.get("scale")
    if given is None:
        arrays["scale"] = weight_scale.astype(np.float32).reshape(m.n, 1)
    elif given.size != m.n or not np.allclose(given.reshape(m.n), weight_scale, rtol=_SAME_SCALE, atol=0):
        raise m.error("weight_scale x input_scale is not deq_scale: the two describe different weights")
    activation = m.scheme.activation
    if activation is None or activation.dynamic:
        return
    offset = _scalar(m, arrays, "input_zero_point")
    if offset != int(offset):
        raise m.error(f"input_offset is {offset}, needed a whole number")
    if quant_bias is None or quant_bias.size != m.n:
        raise m.error("tensor for quant_bias is missing or has the wrong size")
    correction = offset * m.get("codes").sum(axis=1, dtype=np.int64).astype(np.float64)
    units = quant_bias.reshape(m.n).astype(np.float64) + correction
    bias = (units * wide).astype(np.float32)
    if "bias" in arrays:
        _check_bias(m, arrays["bias"], bias, wide, correction)
    arrays["bias"] = bias


def _check_bias(m: StoredModule, stored: Array, bias: Array, deq: Array, correction: Array) -> None:
    """The float bias beside `quant_bias` must be the same one: rounded to whole units, computed in float32."""
    if stored.size != m.n:
        raise m.shape_error("bias", [m.n], stored.shape)
    exact = stored.reshape(m.n).astype(np.float64)
    units = np.abs(exact / np.where(deq == 0, 1, deq)) + np.abs(correction)
    slack = np.abs(deq) * (0.51 + units * 2.0**-22) + np.abs(exact) * 2.0**-7
    if (np.abs(exact - bias) > slack).any():
        row = int(np.argmax(np.abs(exact - bias) - slack))
        raise m.error(f"bias and quant_bias of row {row} say {exact[row]:.6g} and {bias[row]:.6g}")


def _settle_second_scale(m: StoredModule, arrays: dict[str, Array]) -> None:
    second = arrays.pop("scale_second")
    zero = arrays.pop("zero_point_second", None)
    if zero is not None and (zero != 0).any():
        raise m.error("weight_offset_second is not zero, which has no defined meaning")
    first = m.get("scale")
    if second.shape != (m.n, m.groups) or first.size != m.n:
        raise m.shape_error("scale_second", [m.n, m.groups], second.shape)
    arrays["scale"] = first.reshape(m.n, 1).astype(np.float32) * second.astype(np.float32)
    if "zero_point" in arrays and arrays["zero_point"].size == m.n:
        # one per row, checked to be zero like any other
        arrays["zero_point"] = np.broadcast_to(arrays["zero_point"].reshape(m.n, 1), (m.n, m.groups))


def _scalar(m: StoredModule, arrays: dict[str, Array], role: str) -> float:
    array = arrays.get(role)
    if array is None or array.size != 1:
        raise m.error(f"{role} is missing or holds more than one number")
    return float(array.reshape(-1)[0])
