"""PTX that decodes all parts of two words into pairs of 16-bit floats, for NVIDIA from sm80 on.

A register holds two words, one in each half, and each part of both becomes a register of two floats.

* Floats of 4 and 8 bits lie in the word where a shift and a mask give the wider float's bits
  (`omniplat.portable.words`). That makes them too small by a power of two. A product mends it, exactly, also for
  subnormals; where scales go into the weight, they are held larger by that power, and the product is theirs.
* Integers are put into the mantissa of a number whose unit is 1, which is taken away again, with a zero point if there
  is one. Those of 8 bits are put into two of bf16, whose mantissa has 7: each takes one half.
* Codes of tables pick the two bytes of their bf16 number among the table's, eight entries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from omniplat.oracle.codecs import element_values
from omniplat.portable.words import TABLES, moves_of

#: (element, bf16) -> how far to the left the wider float has a code's sign and its magnitude; what mends the exponent.
_FLOATS: dict[tuple[str, bool], tuple[int, int, int]] = {
    ("fp4_e2m1", True): (12, 6, 0x7E80),  # 2^126
    ("fp4_e2m1", False): (12, 9, 0x7400),  # 2^14
    ("fp8_e4m3", True): (8, 4, 0x7B80),  # 2^120
    ("fp8_e4m3", False): (8, 7, 0x5C00),  # 2^8
}
#: (element, bf16) -> (the number whose unit is 1, as bits and as a float; what code 0 stands for)
_INTEGERS: dict[tuple[str, bool], tuple[int, float, float]] = {
    ("int4", True): (0x4300, 128.0, -8.0),
    ("uint4", True): (0x4300, 128.0, 0.0),
    ("int4", False): (0x6400, 1024.0, -8.0),
    ("uint4", False): (0x6400, 1024.0, 0.0),
    ("int8", False): (0x6400, 1024.0, -128.0),
    ("uint8", False): (0x6400, 1024.0, 0.0),
}
#: What code 0 stands for of integers that bf16 takes in halves.
_HALVED = {"int8": -128.0, "uint8": 0.0}


@dataclass(frozen=True, slots=True)
class Decoder:
    """`text` of the instructions and the `constraints` of their operands: a register for each part, the words, and
    what else goes in: `extra` is "", "less" (pairs for each part), "factor" (scales as they are held) or "held": the
    numbers of `held`, 32 bits with a sign, in a register each."""

    text: str
    constraints: str
    extra: str
    held: tuple[int, ...] = ()


def base_of(element: str, bf16: bool) -> float:
    """What is to be subtracted from the number that carries a code, beside a zero point; 0 for other elements."""
    if bf16 and element in _HALVED:
        return -_HALVED[element]
    if (element, bf16) not in _INTEGERS:
        return 0.0
    _, carrier, least = _INTEGERS[element, bf16]
    return carrier - least


def decoder(element: str, bits: int, bf16: bool, zero: bool, scale: str, *, held: bool = False) -> Decoder | None:
    """The instructions for an element; None where there are none and Triton's operations serve.

    `zero`: integers have a zero point, which comes in with `base_of` in it. `scale`: "packed_e8m0" or "packed_bf16"
    where the floats are scaled by what is so held (`omniplat.portable.word_weights`), else "". `held`: constants that
    are to stay in registers come in (`Decoder.held`), where there are such.
    """
    parts = 16 // bits
    if (element, bf16) in _FLOATS:
        return _float(element, bits, bf16, scale)
    if (element, bf16) in _INTEGERS:
        return _integer(element, bits, parts, bf16, zero)
    if element in _HALVED and bf16:
        return _halved(element, zero)
    if element in TABLES and bf16:
        return _table(element, held)
    return None


def place_of_zero(element: str) -> int:
    """Where among the numbers of a table, as they are held, 0 is."""
    return [float(element_values(element)[code]) for code in TABLES[element]].index(0.0)


def _twice(half: int) -> str:
    return f"0x{half << 16 | half:08X}"


def _made(parts: int, inputs: str, extra: str, names: str, lines: list[str]) -> Decoder:
    # "&": parts are written while inputs are still to be read, and lie in no register of theirs
    constraints = ",".join(["=&r"] * parts + ["r", *inputs])
    return Decoder(f"{{ .reg .b32 {names}; {' '.join(lines)} }}", constraints, extra)


def _shifted(to: str, by: int) -> str:
    """`to` = the words, moved to the left by `by` bits; the right where that is negative."""
    return f"shl.b32 {to}, w, {by};" if by >= 0 else f"shr.u32 {to}, w, {-by};"


def _float(element: str, bits: int, bf16: bool, scale: str) -> Decoder:
    parts = 16 // bits
    kind = "bf16x2" if bf16 else "f16x2"
    sign, magnitude, mend = _FLOATS[element, bf16]
    lines = [f"mov.b32 w, ${parts}; mov.b32 z, 0x80008000; mov.b32 f, {_twice(mend)};"]
    if scale == "packed_bf16" and parts == 4:
        lines.append("mov.b64 {l, h}, $5; mov.b64 {m, o}, $6;")
    elif scale == "packed_bf16":
        lines.append("mov.b32 l, $3; mov.b32 m, $4;")
    for part, moves in enumerate(moves_of(element, bits)):
        masks: dict[int, int] = {}
        for mask, left in moves:
            home = sign if mask == 1 << (bits - 1) else magnitude
            masks[home - left] = masks.get(home - left, 0) | mask << home
        for index, (shift, mask) in enumerate(masks.items()):
            source = "b" if shift else "w"
            if shift:
                lines.append(_shifted("b", shift))
            if index:
                lines.append(f"lop3.b32 a, {source}, {_twice(mask)}, a, 0xEA;")
            else:
                lines.append(f"and.b32 a, {source}, {_twice(mask)};")
        if scale:
            lines.append(_factor(part, parts, scale))
        lines.append(f"fma.rn.{kind} ${part}, a, f, z;")
    inputs = {"": "", "packed_bf16": "ll" if parts == 4 else "rr", "packed_e8m0": "rr"}[scale]
    return _made(parts, inputs, "factor" if scale else "", "w, a, b, f, z, l, h, m, o", lines)


def _factor(part: int, parts: int, scale: str) -> str:
    """`f` = the scales of the two words' part, as a pair of bf16."""
    if scale == "packed_bf16":
        low, high = ("l", "m") if part < 2 else ("h", "o")
        return f"prmt.b32 f, {low}, {high}, {'0x5410' if part % 2 == 0 else '0x7632'};"
    # a byte of e8m0 is the exponent of a bf16, seven bits further up; 4-bit codes alone have it
    other = part + 4
    picked = f"prmt.b32 f, ${parts + 1}, ${parts + 2}, 0x{other}{other}{part}{part};"
    return f"{picked} shl.b32 f, f, 7; and.b32 f, f, {_twice(0x7F80)};"


def _integer(element: str, bits: int, parts: int, bf16: bool, zero: bool) -> Decoder:
    kind = "bf16x2" if bf16 else "f16x2"
    one = 0x3F80 if bf16 else 0x3C00
    carrier = _INTEGERS[element, bf16][0]
    mask = _twice(2**bits - 1)
    lines = [f"mov.b32 w, ${parts}; mov.b32 c, {_twice(carrier)}; mov.b32 o, {_twice(one)};"]
    if not zero:
        least = np.float32(-base_of(element, bf16))
        half = int(least.view(np.uint32)) >> 16 if bf16 else int(np.float16(least).view(np.uint16))
        lines.append(f"mov.b32 l, {_twice(half)};")
    for part in range(parts):
        source = "w" if not part else "a"
        lines.append("" if not part else f"shr.u32 a, w, {bits * part};")
        lines.append(f"lop3.b32 a, {source}, {mask}, c, 0xEA;")
        lines.append(f"fma.rn.{kind} ${part}, a, o, {f'${parts + 1 + part}' if zero else 'l'};")
    return _made(parts, "r" * parts if zero else "", "less" if zero else "", "w, a, c, o, l", lines)


def _halved(element: str, zero: bool) -> Decoder:
    """16 times the upper half and the lower one. All numbers on the way are integers up to 256, which bf16 holds."""
    least = int(np.float32(-128.0 - (0.0 if zero else base_of(element, True))).view(np.uint32)) >> 16
    # 128, -128, 1, 16, and -128 less what code 0 stands for
    lines = [
        f"mov.b32 w, $2; mov.b32 c, {_twice(0x4300)}; mov.b32 m, {_twice(0xC300)}; mov.b32 o, {_twice(0x3F80)}; "
        f"mov.b32 s, {_twice(0x4180)}; mov.b32 l, {_twice(least)};"
    ]
    for part in range(2):
        for half in range(2):
            shift, to = 8 * part + 4 * half, "ab"[half]
            source = to if shift else "w"
            lines.append(f"shr.u32 {to}, w, {shift};" if shift else "")
            lines.append(f"lop3.b32 {to}, {source}, {_twice(15)}, c, 0xEA;")
        lines.append("fma.rn.bf16x2 a, a, o, l; fma.rn.bf16x2 b, b, o, m;")
        if zero:
            lines.append(f"fma.rn.bf16x2 a, b, s, a; fma.rn.bf16x2 ${part}, a, o, ${3 + part};")
        else:
            lines.append(f"fma.rn.bf16x2 ${part}, b, s, a;")
    return _made(2, "rr" if zero else "", "less" if zero else "", "w, a, b, c, m, o, s, l", lines)


def _table(element: str, held: bool) -> Decoder:
    """Four codes are a selector of `prmt`, which takes a byte of eight for each; where a code's highest bit is set, all
    bits are those bytes' highest ones. So one lookup of two, with codes and with their highest bits inverted, gives a
    byte of the number, and the other one none or all of its bits, which the byte makes up for.

    One of the two registers that `prmt` looks up in may be a constant. Those of the other one are moved anew for every
    `prmt`, unless they are `held`."""
    wide = np.array([float(element_values(element)[code]) for code in TABLES[element]], np.float32).view(np.uint32)
    # to the nearest bf16, ties to even
    entries = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    lower, upper = entries[:8], entries[8:]
    # a zero has the sign of the number beside it
    lower, upper = (mine | np.where(mine & 0x7FFF, 0, its & 0x8000) for mine, its in ((lower, upper), (upper, lower)))
    lines = ["mov.b32 n, 0;"]
    kept: list[int] = []
    for name, shift in (("l", 0), ("h", 8)):
        first, second = (lower >> shift) & 255, (upper >> shift) & 255
        second = second ^ np.where(first & 0x80, 0xFF, 0)
        for half, numbers in enumerate((first[:4], first[4:], second[:4], second[4:])):
            packed = sum(int(number) << (8 * i) for i, number in enumerate(numbers))
            if held and half % 2 == 0:
                lines.append(f"mov.b32 {name}{half}, ${5 + len(kept)};")
                kept.append(int(np.uint32(packed).view(np.int32)))
            else:
                lines.append(f"mov.b32 {name}{half}, 0x{packed:08X};")
    # codes of the first two parts of both words, then of the others
    lines.append("prmt.b32 s, $4, n, 0x3120; xor.b32 t, s, 0x88888888;")
    for part in (0, 2):
        if part:
            lines.append("shr.u32 s, s, 16; shr.u32 t, t, 16;")
        for name in "lh":
            lines.append(f"prmt.b32 a, {name}0, {name}1, s; prmt.b32 b, {name}2, {name}3, t; xor.b32 {name}, a, b;")
        lines.append(f"prmt.b32 ${part}, l, h, 0x6240; prmt.b32 ${part + 1}, l, h, 0x7351;")
    names = "n, s, t, a, b, l, h, l0, l1, l2, l3, h0, h1, h2, h3"
    return replace(_made(4, "r" * len(kept), "held" if kept else "", names, lines), held=tuple(kept))
