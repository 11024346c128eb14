"""Element formats: tables, rounding, packing and the e8m0 scale byte. NumPy in float64.

A *code* is the integer that is stored; its *value* is a float64. Codes of one element each lie in an array of
shape [..., K]; the canonical layout of 4-bit codes packs two of them into a byte, [..., K/2].

Sources of the formats: OCP Microscaling Formats (MX) v1.0 for fp4, fp6, fp8 and e8m0; the bitsandbytes paper
(QLoRA, appendix E) for NF4; bitsandbytes' FP4 is a table of its own and not E2M1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from omniplat.canonical import Array
from omniplat.errors import InvalidSchemeError
from omniplat.scheme import ELEMENT_BITS

Float64 = NDArray[np.float64]
UInt8 = NDArray[np.uint8]

#: Byte of an e8m0 scale that means NaN, and the bias of the others.
E8M0_NAN = 255
E8M0_BIAS = 127

#: How a value between two codes is rounded. `floor` is towards minus infinity, as Ascend defines it.
ROUNDINGS = ("nearest-even", "half-away", "half-to-zero", "floor")


@dataclass(frozen=True, slots=True)
class FloatElement:
    """A small float format without infinities in use.

    `mantissa_bits` are the stored ones; `min_exponent` is the exponent of the smallest normal number, so the
    spacing of subnormals is 2^(min_exponent - mantissa_bits); `max_exponent` is that of the largest number,
    `max_value`, at which conversions saturate.
    """

    bits: int
    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    max_value: float


FLOAT_ELEMENTS: tuple[tuple[str, FloatElement], ...] = (
    ("fp4_e2m1", FloatElement(4, 1, 0, 2, 6.0)),
    ("fp6_e2m3", FloatElement(6, 3, 0, 2, 7.5)),
    ("fp6_e3m2", FloatElement(6, 2, -2, 4, 28.0)),
    ("fp8_e4m3", FloatElement(8, 3, -6, 8, 448.0)),
    # What AMD's gfx94x computes with: inputs only, since files hold the format above.
    ("fp8_e4m3fnuz", FloatElement(8, 3, -7, 7, 240.0)),
    ("fp8_e5m2", FloatElement(8, 2, -14, 15, 57344.0)),
)

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
#: bitsandbytes' FP4 magnitudes by the low three bits of the code; bit 3 is the sign.
_FP4_BNB = (0.0, 0.0052083333333, 0.6666666666667, 1.0, 0.3333333333333, 0.5, 0.1666666666667, 0.25)


def float_element(element: str) -> FloatElement | None:
    """The parameters of a float format, or None where `element` is none (integers, tables, bf16)."""
    return dict(FLOAT_ELEMENTS).get(element)


def code_range(element: str) -> tuple[int, int]:
    """Smallest and largest value of an `int*` or `uint*` element. Raises InvalidSchemeError for any other."""
    bits = ELEMENT_BITS.get(element)
    if bits is not None and element.startswith("uint"):
        return 0, 2**bits - 1
    if bits is not None and element.startswith("int"):
        return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    raise InvalidSchemeError(element, "is not an integer element")


def element_max(element: str) -> float:
    """Largest magnitude that both signs of an element can hold: 6 for fp4, 448 for fp8 e4m3, 127 for int8."""
    spec = float_element(element)
    if spec is not None:
        return spec.max_value
    if element in ("nf4", "fp4_bnb"):
        return 1.0
    return float(code_range(element)[1])


@lru_cache(maxsize=64)
def element_values(element: str) -> Float64:
    """Value of every code: float64 [2^bits], read-only. Signed integers are indexed by their two's complement bits.

    NaN codes of fp8 have the value NaN. Raises InvalidSchemeError for bf16 and opaque elements.
    """
    bits = ELEMENT_BITS.get(element, 16)
    if bits > 8:
        raise InvalidSchemeError(element, "has no table of codes")
    codes = np.arange(2**bits)
    values: Float64
    if element == "fp8_e4m3":
        values = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    elif element == "fp8_e5m2":
        values = codes.astype(np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64)
    elif element == "nf4":
        values = np.array(_NF4, dtype=np.float64)
    elif element == "fp4_bnb":
        # bitsandbytes keeps the table in float32
        half = np.array(_FP4_BNB, dtype=np.float32).astype(np.float64)
        values = np.concatenate([half, -half])
    elif (spec := float_element(element)) is not None:
        magnitude_codes = codes[: 2 ** (bits - 1)]
        exponent = magnitude_codes >> spec.mantissa_bits
        mantissa = magnitude_codes & (2**spec.mantissa_bits - 1)
        step = 2.0 ** (spec.min_exponent - spec.mantissa_bits)
        normal = (2**spec.mantissa_bits + mantissa) * step * 2.0 ** np.maximum(exponent - 1, 0)
        half = np.where(exponent == 0, mantissa * step, normal)
        values = np.concatenate([half, -half])
    elif element.startswith("uint"):
        values = codes.astype(np.float64)
    else:
        values = np.where(codes < 2 ** (bits - 1), codes, codes - 2**bits).astype(np.float64)
    values.setflags(write=False)
    return values


# --- packing ---------------------------------------------------------------------------------------------------


def pack_nibbles(codes: Array) -> UInt8:
    """Codes 0..15, uint8 [..., K] with K even, to uint8 [..., K/2]: the even index goes to the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"an odd number of 4-bit codes, {codes.shape[-1]}, does not fill bytes")
    packed: UInt8 = codes[..., 0::2].astype(np.uint8) & np.uint8(15)
    packed |= codes[..., 1::2].astype(np.uint8) << np.uint8(4)
    return packed


def unpack_nibbles(packed: Array) -> UInt8:
    """The inverse of `pack_nibbles`: uint8 [..., K/2] to codes 0..15, uint8 [..., K]."""
    codes: UInt8 = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=codes[..., 0::2])
    np.right_shift(packed, np.uint8(4), out=codes[..., 1::2])
    return codes


def is_packed(element: str) -> bool:
    """True where the canonical form holds two codes in a byte."""
    return ELEMENT_BITS.get(element) == 4


def decode_codes(codes: Array, element: str, in_features: int, codebook: Array | None = None) -> Float64:
    """Canonical codes to the values that they stand for, before any scale: float64 [..., K].

    `codes` is what `canonical.py` says for the element. `codebook`, [2^bits], replaces the element's own table.
    Raises InvalidSchemeError where the element has no values, ValueError where the width is not `in_features`.
    """
    if element == "bf16":
        values = codes.astype(np.float64)
    else:
        table = element_values(element) if codebook is None else np.asarray(codebook, dtype=np.float64)
        index = unpack_nibbles(codes) if is_packed(element) else codes.view(np.uint8)
        # 5-bit and the like: a signed code is a two's complement byte, of which the table needs the low bits
        mask = np.uint8(2 ** ELEMENT_BITS[element] - 1)
        values = table[index & mask]
    if values.shape[-1] != in_features:
        raise ValueError(f"codes hold {values.shape[-1]} columns, expected {in_features}")
    return values


# --- rounding --------------------------------------------------------------------------------------------------


def _round_integers(values: Float64, rounding: str) -> Float64:
    if rounding in ("", "nearest-even"):
        return np.rint(values)
    if rounding == "half-away":
        return np.copysign(np.floor(np.abs(values) + 0.5), values)
    if rounding == "half-to-zero":
        return np.copysign(np.ceil(np.abs(values) - 0.5), values)
    if rounding == "floor":
        return np.floor(values)
    raise InvalidSchemeError(rounding, f"rounding is none of {ROUNDINGS}")


def exponent_of(values: Array) -> NDArray[np.int32]:
    """floor(log2 |v|), exactly; -1 for zero, whose exponent callers must not use."""
    return np.asarray(np.frexp(values)[1] - 1, dtype=np.int32)


def round_to_element(values: Array, element: str, rounding: str = "") -> Float64:
    """The element's value that each of `values` rounds to: float64, same shape. Saturates; NaN stays NaN.

    A float element rounds to the spacing of the value's own binade, so a value that rounds up into the next
    binade is exact there. Integers round to 1.
    """
    values = np.asarray(values, dtype=np.float64)
    spec = float_element(element)
    if spec is None:
        low, high = code_range(element)
        return np.clip(_round_integers(values, rounding), low, high)
    exponent = np.clip(exponent_of(np.where(values == 0, 1.0, values)), spec.min_exponent, spec.max_exponent)
    step = np.ldexp(1.0, exponent - spec.mantissa_bits)
    # saturating first keeps Inf and overflow out of the division; it changes nothing below the maximum
    limit = spec.max_value
    return np.clip(_round_integers(np.clip(values, -limit, limit) / step, rounding) * step, -limit, limit)


def encode(values: Array, element: str, rounding: str = "") -> Array:
    """Round and saturate `values`, [..., K], to canonical codes of `element`.

    8-bit floats come back in their ml_dtypes type, int8 as int8, everything else as uint8: [..., K/2] for 4-bit
    elements, else one code a byte (signed: a two's complement byte). The sign of a zero is kept by floats.
    Raises InvalidSchemeError for elements that cannot be rounded to (bf16, opaque).
    """
    if element in ("nf4", "fp4_bnb"):
        return pack_nibbles(_nearest_code(np.asarray(values, dtype=np.float64), element_values(element)))
    rounded = round_to_element(values, element, rounding)
    spec = float_element(element)
    if element == "fp8_e4m3":
        return rounded.astype(ml_dtypes.float8_e4m3fn)
    if element == "fp8_e5m2":
        return rounded.astype(ml_dtypes.float8_e5m2)
    if spec is not None:
        magnitudes = element_values(element)[: 2 ** (spec.bits - 1)]
        codes = np.searchsorted(magnitudes, np.abs(rounded)).astype(np.uint8)
        codes |= np.signbit(rounded).astype(np.uint8) << np.uint8(spec.bits - 1)
    else:
        codes = rounded.astype(np.int16).astype(np.uint8)
    if is_packed(element):
        return pack_nibbles(codes)
    return codes.view(np.int8) if element == "int8" else codes


def _nearest_code(values: Float64, table: Float64) -> UInt8:
    """Index of the nearest entry of an unsorted table; half way the smaller one (bitsandbytes compares with >)."""
    order = np.argsort(table, kind="stable")
    ordered = table[order]
    middles = (ordered[1:] + ordered[:-1]) / 2
    nearest: Any = order[np.searchsorted(middles, values, side="left")]
    return np.asarray(nearest, dtype=np.uint8)


# --- e8m0 ------------------------------------------------------------------------------------------------------


def e8m0_to_float64(scale: Array) -> Float64:
    """Bytes (uint8, or ml_dtypes' float8_e8m0fnu) to 2^(b-127); 255 is NaN."""
    scale = scale.view(np.uint8)
    values = np.ldexp(1.0, scale.astype(np.int32) - E8M0_BIAS)
    return np.where(scale == E8M0_NAN, np.nan, values)


def e8m0_from_exponent(exponent: Array) -> UInt8:
    """Integer exponents to bytes, clamped to the 255 finite ones (2^-127 .. 2^127)."""
    return (np.clip(exponent, -E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).astype(np.uint8)
