"""Packings that flatten the weight: bitsandbytes' 4 bits and HQQ. Used by `unpack`.

Both keep the weight row by row in one long run of codes, so a group lies in one row exactly where the group size
divides K. Only then is there a canonical form; recognition reports the others as `group-not-divisible`.
"""

from __future__ import annotations

import numpy as np

from omniplat.canonical import Array
from omniplat.formats.unpack_codes import StoredModule
from omniplat.oracle.codecs import element_values, pack_nibbles

_PER_WORD = 10


def flat_nibbles(m: StoredModule, codes: Array) -> Array:
    """bitsandbytes: the first of two values in the *high* nibble, any container; uint8 [N, K/2], low nibble first."""
    raw = np.ascontiguousarray(codes).view(np.uint8).reshape(-1)
    if raw.size * 2 != m.n * m.k:
        raise m.shape_error("codes", f"{m.n * m.k // 2} bytes", codes.shape)
    packed: Array = ((raw << 4) | (raw >> 4)).reshape(m.n, m.k // 2)
    return packed


def nested_scale(m: StoredModule, absmax: Array) -> Array:
    """Largest magnitudes of blocks, f32 [N, K/block]; with double quantization from their own codes and scales.

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


def hqq_codes(m: StoredModule, packed: Array) -> Array:
    """`W_q`: rows are groups; a byte (3 bits: an int32 word) holds one code of each of several ranges of rows, the
    first in its highest bits. Canonical codes: [N, K], 4 bits packed."""
    bits = m.storage.bits
    columns = m.k // m.groups
    rows = m.n * m.groups
    raw = np.asarray(packed).reshape(-1, columns)
    if bits == 8:
        unpacked = raw
    else:
        per_word, top = (_PER_WORD, 27) if bits == 3 else (8 // bits, 8 - bits)
        if raw.shape[0] != -(-rows // per_word):
            raise m.shape_error("codes", [-(-rows // per_word), columns], packed.shape)
        words = raw.view(np.uint32) if raw.dtype.itemsize == 4 else raw
        mask = words.dtype.type(2**bits - 1)
        shifts = [words.dtype.type(top - bits * i) for i in range(per_word)]
        unpacked = np.concatenate([((words >> shift) & mask).astype(np.uint8) for shift in shifts])[:rows]
    codes: Array = unpacked.astype(np.uint8, copy=False).reshape(m.n, m.k)
    return pack_nibbles(codes) if m.quant.bits == 4 else codes


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
