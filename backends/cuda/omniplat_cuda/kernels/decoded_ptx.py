"""PTX that decodes words of eight e2m1 codes to e4m3 (`omniplat_cuda.kernels.decoded_words`), for NVIDIA from sm80 on.

The eight magnitudes of a group, moved down by its shift, are eight bytes: a table in two registers. While they are
normal numbers, a shift takes the same from each of them, and nothing from 0; three shifts make subnormal ones, and have
tables of their own. `prmt` picks four bytes at once by the nibbles of its selector, which are the codes.
"""

from __future__ import annotations

import torch

from omniplat_cuda.kernels.decoded_words import MAX_BELOW, table

#: Binades below a row's largest group down to which no magnitude is subnormal: 0.5 * 2^(6 - 11) = 2^-6.
NORMAL = 11
#: Registers of both calls of `decoder`: those that come out, then words of four groups, then shifts as often as those
#: have bytes.
CONSTRAINTS = ",".join(["=&r"] * 4 + ["r"] * (4 + 16))
#: What a binade takes from the bytes of a register: byte 0 of the lower one, that of magnitude 0, stays.
_LESS = (0x01010100, 0x01010101)


def decoder(first: int, wide: bool) -> str:
    """Decodes the groups `first` and `first` + 1 of a block: into registers of e4m3 for columns 0 to 15 and 16 to 31 of
    the one, then of the other. Registers 4 to 7 are the words of the block's groups, register 8 the row's shifts.

    `wide`: groups may lie further below their row's largest than `NORMAL` binades.
    """
    lines = ["{ .reg .b32 m, n, w, s, t0, t1, p; .reg .pred a;"]
    for index, group in enumerate((first, first + 1)):
        word, to, above = f"${4 + group}", f"${2 * index}", f"${2 * index + 1}"
        lines += [
            f"prmt.b32 s, $8, 0, 0x444{group};",
            *_tables(wide),
            f"and.b32 m, {word}, 0x77777777; prmt.b32 p, t0, t1, m; lop3.b32 {to}, {word}, 0x80808080, p, 0xEA;",
            "shr.u32 n, m, 16; prmt.b32 p, t0, t1, n;",
            f"shl.b32 w, {word}, 4; lop3.b32 {above}, w, 0x80808080, p, 0xEA;",
        ]
    return " ".join(lines) + " }"


def _tables(wide: bool) -> list[str]:
    """`t0` and `t1` = the bytes of the eight magnitudes under the shift `s`, in eighths of an exponent."""
    largest = _registers(0)
    lines = [
        f"mad.lo.u32 t{i}, s, 0x{-less % 2**32:08X}, 0x{register:08X};"
        for i, (less, register) in enumerate(zip(_LESS, largest, strict=True))
    ]
    for shift in range(8 * (NORMAL + 1), 8 * MAX_BELOW + 1, 8) if wide else ():
        moved = [(register - shift * less) % 2**32 for less, register in zip(_LESS, largest, strict=True)]
        others = [(i, register) for i, register in enumerate(_registers(shift // 8)) if register != moved[i]]
        if others:
            lines.append(f"setp.eq.u32 a, s, {shift};")
            lines += [f"selp.b32 t{i}, 0x{register:08X}, t{i}, a;" for i, register in others]
    return lines


def _registers(below: int) -> tuple[int, int]:
    """The eight magnitudes that many binades below the row's largest group, as two registers."""
    magnitudes = bytes(table(torch.device("cpu"))[16 * below : 16 * below + 8].tolist())
    return int.from_bytes(magnitudes[:4], "little"), int.from_bytes(magnitudes[4:], "little")
