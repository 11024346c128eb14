"""torchao's int4 weights in the layout of PyTorch's `_weight_int4pack_mm`. Used by `unpack`.

`_convert_weight_to_int4pack` writes int32 [N/8, K/(16 t), 32, t/2] for t tiles of 16 columns at a time. Lane l of a
warp holds row l / 4 of 8. A word has eight of its codes, those of two neighbouring tiles: columns 2 (l mod 4), one
more, and the same 8 further, of the first tile, then of the second; from the lowest nibble in the order 0, 2, 4, 6, 1,
3, 5, 7.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from omniplat.canonical import Array
from omniplat.formats.unpack_codes import StoredModule
from omniplat.oracle.codecs import pack_nibbles

#: The code of a word that lies in each nibble, the lowest first.
_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def tinygemm(m: StoredModule) -> StoredModule:
    """As `nibbles_k_shifted`: codes uint8 [N, K/2], two's complement; scale and zero [G, N]; the padding is cut off."""
    words, pair = m.get("codes"), m.get("scale_and_zero")
    if words.ndim != 4 or words.dtype != np.int32 or words.shape[2] != 32:
        raise m.shape_error("codes", ["N/8", "K/(16 t)", 32, "t/2"], words.shape)
    codes = _untiled(words)
    group = m.quant.group_size if m.quant.granularity == "group" else m.k
    wide = codes.shape[1] // group
    if codes.shape[0] < m.n or codes.shape[1] < m.k or pair.shape != (wide, codes.shape[0], 2):
        raise m.shape_error("scale_and_zero", [wide, codes.shape[0], 2], pair.shape)
    codes, pair = codes[: m.n, : m.k], pair[: m.k // group, : m.n]
    arrays = {role: array for role, array in m.arrays.items() if role != "scale_and_zero"}
    arrays |= {"codes": pack_nibbles(codes ^ 8), "scale": pair[..., 0], "zero_point": pair[..., 1]}
    return replace(m, arrays=arrays, storage=replace(m.storage, packing="nibbles_k_shifted"))


def _untiled(words: Array) -> Array:
    """Unsigned codes, uint8 [rows, columns], of words [rows/8, columns/(16 t), 32, t/2]."""
    tall, wide, _, pairs = words.shape
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    codes = np.empty((*unsigned.shape, 8), dtype=np.uint8)
    for nibble, code in enumerate(_NIBBLES):
        codes[..., code] = (unsigned >> np.uint32(4 * nibble)) & np.uint32(15)
    # [row tile, column tiles, row, lane's column, pair of tiles, tile, half of a tile, neighbour]
    parts = codes.reshape(tall, wide, 8, 4, pairs, 2, 2, 2)
    untiled: Array = parts.transpose(0, 2, 1, 4, 5, 6, 3, 7).reshape(tall * 8, -1)
    return untiled
