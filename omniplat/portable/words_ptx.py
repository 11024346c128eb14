"""PTX that decodes one part of two words at a time into a pair of 16-bit floats, for NVIDIA from sm80 on.

`$1` holds two words, one in each half of a register; part j of both is shifted to where a mask makes it the float's
bits. Floats of 4 and 8 bits keep their sign on top and put exponent and mantissa around the boundary of the wider ones,
which makes them too small by a power of two; a product mends it, exactly, also for subnormals. Integers are put into
the mantissa of a number whose unit is 1, which `$2` (a pair of floats) takes away again, with a zero point if there is
one.
"""

from __future__ import annotations

#: (element, bf16) -> (right shift of exponent and mantissa, their mask, the factor that mends the exponent)
_FLOATS: dict[tuple[str, bool], tuple[int, int, int]] = {
    ("fp4_e2m1", True): (6, 0x01C0, 0x7E80),  # 2^126
    ("fp4_e2m1", False): (3, 0x0E00, 0x7400),  # 2^14
    ("fp8_e4m3", True): (4, 0x07F0, 0x7B80),  # 2^120
    ("fp8_e4m3", False): (1, 0x3F80, 0x5C00),  # 2^8
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


def base_of(element: str, bf16: bool) -> float:
    """What is to be subtracted from the number that carries a code, beside a zero point; 0 for other elements."""
    if (element, bf16) not in _INTEGERS:
        return 0.0
    _, carrier, least = _INTEGERS[element, bf16]
    return carrier - least


def _twice(half: int) -> str:
    return f"0x{half << 16 | half:08X}"


def instructions(element: str, part: int, bf16: bool, fold: bool) -> str:
    """The text for one part, with a factor `$3` (a pair of floats) where `fold` says so.

    "" for what is decoded without: tables, and int8 in bf16, which has too few bits.
    """
    kind = "bf16x2" if bf16 else "f16x2"
    bits = 4 if element.endswith("4") or element == "fp4_e2m1" else 8
    if (element, bf16) in _FLOATS:
        down, mask, factor = _FLOATS[element, bf16]
        up = 16 - bits * (part + 1)
        return (
            f"{{ .reg .b32 a, b, c, z; shl.b32 a, $1, {up}; shr.u32 b, a, {down}; and.b32 b, b, {_twice(mask)}; "
            f"lop3.b32 a, a, 0x80008000, b, 0xEA; mov.b32 c, {_twice(factor)}; mov.b32 z, 0x80008000; "
            + (
                f"fma.rn.{kind} a, a, c, z; fma.rn.{kind} $0, a, $3, z; }}"
                if fold
                else f"fma.rn.{kind} $0, a, c, z; }}"
            )
        )
    if (element, bf16) in _INTEGERS:
        carrier = _INTEGERS[element, bf16][0]
        one = 0x3F80 if bf16 else 0x3C00
        return (
            f"{{ .reg .b32 a, o, c; shr.u32 a, $1, {bits * part}; mov.b32 c, {_twice(carrier)}; "
            f"lop3.b32 a, a, {_twice(2**bits - 1)}, c, 0xEA; mov.b32 o, {_twice(one)}; fma.rn.{kind} $0, a, o, $2; }}"
        )
    return ""
