"""Packings that flatten the weight: bitsandbytes' 4 bits, HQQ's and quanto's. Used by `unpack`.

They keep the weight row by row in one long run of codes, so a group lies in one row exactly where the group size
divides K. bitsandbytes' blocks may run on into the next row: the groups are then the runs that lie in one row and one
block, if those are not too short. Recognition reports all others as `group-not-divisible`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from omniplat.canonical import Array
from omniplat.formats.unpack_codes import StoredModule
from omniplat.oracle.codecs import element_values

_PER_WORD = 10


def flat_nibbles(m: StoredModule, codes: Array) -> Array:
    """bitsandbytes: the first of two values in the *high* nibble, any container; uint8 [N, K/2], low nibble first."""
    raw = np.ascontiguousarray(codes).view(np.uint8).reshape(-1)
    if raw.size * 2 != m.n * m.k:
        raise m.shape_error("codes", f"{m.n * m.k // 2} bytes", codes.shape)
    packed: Array = ((raw << 4) | (raw >> 4)).reshape(m.n, m.k // 2)
    return packed


def nested_scale(m: StoredModule, absmax: Array) -> Array:
    """Largest magnitudes of blocks, f32 [N, K/group]; with double quantization from their own codes and scales. Where
    blocks run on from row to row, each group has that of the block it lies in.

    As bitsandbytes computes it, in float32: codebook[absmax] * nested_absmax[block // nested_block] + offset.
    """
    flat = absmax.reshape(-1)
    if m.storage.nested_block:
        if flat.dtype != np.uint8:
            raise m.error(f"scale is stored as {flat.dtype}, needed uint8 codes of double quantization")
        codebook = m.get("nested_codebook").astype(np.float32).reshape(-1)
        outer = m.get("nested_scale").astype(np.float32).reshape(-1)
        block = np.arange(flat.size) // m.storage.nested_block
        if codebook.size != 256 or (flat.size and outer.size != block[-1] + 1):
            raise m.shape_error("nested_scale", f"{-(-flat.size // m.storage.nested_block)} values", outer.shape)
        flat = codebook[flat] * outer[block] + np.float32(m.storage.scale_offset)
    if m.storage.flat_block:
        if flat.size != -(-m.n * m.k // m.storage.flat_block):
            raise m.shape_error("scale", [-(-m.n * m.k // m.storage.flat_block)], absmax.shape)
        flat = flat[np.arange(m.n * m.groups) * m.quant.group_size // m.storage.flat_block]
    if flat.size != m.n * m.groups:
        raise m.shape_error("scale", [m.n * m.groups], absmax.shape)
    return flat.astype(np.float32, copy=False).reshape(m.n, m.groups)


def check_codebook(m: StoredModule) -> None:
    """A stored table has to be the element's own: kernels know no other."""
    stored = m.arrays.get("codebook")
    if stored is None:
        return
    table = element_values(m.quant.element)
    if stored.size != table.size or np.abs(stored.astype(np.float64).reshape(-1) - table).max() > 1e-6:
        raise m.error(f"the table of codes in the file is not that of {m.quant.element}")


def hqq(m: StoredModule) -> StoredModule:
    """`W_q` in words of several codes, one of each of several ranges of rows, the first in the highest bits.

    Along K (axis 1) the rows of `W_q` are groups. Of axis 0 the columns are: weights whose place in the flattened
    weight is the same modulo the number of groups share a scale, which is then repeated for every weight.
    """
    bits, groups = m.storage.bits, m.get("scale").size
    along_rows = m.storage.groups_along_rows
    rows, columns = (m.n * m.k // groups, groups) if along_rows else (groups, m.n * m.k // groups)
    packed = m.get("codes")
    raw = _bytes_or_words(packed, bits).reshape(-1, columns)
    per_word, top = (_PER_WORD, 27) if bits == 3 else (8 // bits, 8 - bits)
    shifts = [top - bits * i for i in range(per_word)]
    codes = _ranges_of_rows(m, raw, bits, shifts, rows)
    zero = m.get("zero_point").reshape(-1)
    scale = m.get("scale").reshape(-1)
    if zero.size != groups:
        raise m.shape_error("zero_point", [groups], zero.shape)
    shape = (m.n, m.k) if along_rows else (m.n, groups // m.n)
    if along_rows:
        scale, zero = (np.broadcast_to(array, (rows, columns)) for array in (scale, zero))
    return _plain(m, codes, np.reshape(scale, shape), np.reshape(zero, shape))


def quanto(m: StoredModule) -> StoredModule:
    """Rows of groups, packed like HQQ's with the first range in the *lowest* bits. w = code * scale - shift, so that
    the zero point is shift / scale, rounded to float32; an integer shift is the zero point."""
    scale, shift = m.get("scale").reshape(-1), m.get("zero_point").reshape(-1)
    bits, groups = m.quant.bits, scale.size
    if shift.size != groups:
        raise m.shape_error("zero_point", [groups], shift.shape)
    raw = np.asarray(m.get("codes")).reshape(-1, m.n * m.k // groups)
    codes = _ranges_of_rows(m, raw, bits, [bits * i for i in range(8 // bits)], groups)
    zero = shift
    if shift.dtype.kind not in "iu":
        wide = scale.astype(np.float32)
        if ((wide == 0) & (shift != 0)).any():
            raise m.error("scale not finite: a scale is 0 where its shift is not")
        zero = np.divide(shift.astype(np.float32), wide, out=np.zeros_like(wide), where=wide != 0)
    shape = (m.n, groups // m.n)
    return _plain(m, codes, scale.reshape(shape), zero.reshape(shape))


def _plain(m: StoredModule, codes: Array, scale: Array, zero: Array) -> StoredModule:
    arrays = {**m.arrays, "codes": codes.reshape(m.n, m.k), "scale": scale, "zero_point": zero}
    return replace(m, arrays=arrays, storage=replace(m.storage, packing="plain"))


def _bytes_or_words(packed: Array, bits: int) -> Array:
    """`W_q` without the float type that some files view it as: int32 words of 3-bit codes, else bytes."""
    return np.ascontiguousarray(packed).reshape(-1).view(np.uint32 if bits == 3 else np.uint8)


def _ranges_of_rows(m: StoredModule, words: Array, bits: int, shifts: Sequence[int], rows: int) -> Array:
    """Codes uint8 [rows, columns] of words [ceil(rows / len(shifts)), columns]; range i lies `shifts[i]` bits up."""
    if words.shape[0] != -(-rows // len(shifts)):
        raise m.shape_error("codes", [-(-rows // len(shifts)), words.shape[1]], m.get("codes").shape)
    mask = words.dtype.type(2**bits - 1)
    ranges = [((words >> words.dtype.type(shift)) & mask).astype(np.uint8) for shift in shifts]
    return np.concatenate(ranges)[:rows]


def shifted_zero(m: StoredModule, zero: Array, scale: Array) -> Array:
    """torchao's int4: w = signed code * scale + zero, so that w = (code + 8 - zero_point) * scale; f32 [N, G].

    The quotient is rounded to float32: values agree with the producer's to about 2^-23 of the largest.
    """
    if zero.shape != (m.groups, m.n):
        raise m.shape_error("zero_point", [m.groups, m.n], zero.shape)
    wide = scale.astype(np.float32)
    quotient = np.divide(zero.T.astype(np.float32), wide, out=np.zeros_like(wide), where=wide != 0)
    shifted: Array = np.float32(8) - quotient
    return shifted
