"""Inputs: random ones, ones that the declared quantization represents exactly, and ones spread over many binades.

A representable input is one whose quantization is the identity: every scale group attains the value that makes its
scale a power of two, and every other value is a code times it. A backend that quantizes as declared then computes
with the same codes as the oracle, and its output differs by nothing but accumulation. All values are bf16 numbers.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from omniplat.canonical import Array
from omniplat.oracle import element_max, element_values
from omniplat.oracle.codecs import code_range
from omniplat.scheme import TensorQuant, low_rank_base

#: Binades over which rows or groups are spread in the range tier.
SPREAD = 24

_FLOATS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
_DUAL = 512
#: Largest over smallest code of a representable input, so that sums of products fit a float's bits.
_RANGE = 2.0**8


def as_dtype(values: Array, dtype: str) -> Array:
    """`values` rounded to the dtype, as f32."""
    rounded: Array = np.asarray(values).astype(_FLOATS[dtype]).astype(np.float32)
    return rounded


def random_input(rows: int, columns: int, rng: np.random.Generator, dtype: str) -> Array:
    """Gaussian values of the dtype, f32 [M, K]."""
    return as_dtype(rng.standard_normal((rows, columns)), dtype)


def nudged(x: Array, factor: float) -> Array:
    """`x` times `factor`, but for the largest magnitude of each row: scales of rows stay what they are."""
    magnitude = np.abs(x)
    moved: Array = np.where(magnitude < magnitude.max(axis=-1, keepdims=True), x * factor, x).astype(np.float32)
    return moved


def spread_rows(rows: int, columns: int, rng: np.random.Generator, dtype: str, binades: int = SPREAD) -> Array:
    """Gaussian rows whose sizes are spread evenly over 2^binades, in an order that is not theirs."""
    exponents = rng.permutation(np.linspace(-binades / 2, binades / 2, max(rows, 2))[:rows])
    return as_dtype(rng.standard_normal((rows, columns)) * np.exp2(np.round(exponents))[:, None], dtype)


def spread_groups(
    rows: int, columns: int, size: int, rng: np.random.Generator, dtype: str, binades: int = 16
) -> tuple[Array, Array]:
    """Rows with every second run of `size` columns 2^binades times larger; and which columns are small, bool [K]."""
    small = (np.arange(columns) // size) % 2 == 1
    factors = np.where(small, 2.0 ** -(binades // 2), 2.0 ** (binades // 2))
    return as_dtype(rng.standard_normal((rows, columns)) * factors, dtype), small


def representable_input(quant: TensorQuant | None, rows: int, columns: int, rng: np.random.Generator) -> Array:
    """An input [M, K], f32, that `quant` represents exactly; integers of at most 4 for None."""
    if quant is None or quant.element == "int8_bnb":
        values: Array = rng.integers(-4, 5, (rows, columns)).astype(np.float32)
        return values
    return _on_codes(quant, rows, columns, rng, ties=False)


def tied_input(quant: TensorQuant, rows: int, columns: int, rng: np.random.Generator) -> Array:
    """The same with values half way between two codes instead of codes: only the rounding decides between them."""
    return _on_codes(quant, rows, columns, rng, ties=True)


def _between(codes: Array, top: float) -> Array:
    """What lies half way between neighbours of `codes`, up to `top` on both sides."""
    known = np.unique(codes)
    middles: Array = (known[1:] + known[:-1]) / 2
    return middles[np.abs(middles) <= top]


def _on_codes(quant: TensorQuant, rows: int, columns: int, rng: np.random.Generator, *, ties: bool) -> Array:
    base = low_rank_base(quant) or quant
    if base.second_scale == "global":
        return _nvfp4(rows, columns, base.group_size, rng, has_global=quant is base, ties=ties)
    size = base.group_size if base.granularity == "group" else columns
    values = np.empty((rows, columns), np.float32)
    codes, anchors = _codes(base)
    if ties:
        codes = _between(codes, float(np.abs(anchors).max()))
    for start in range(0, columns, size):
        stop = min(start + size, columns)
        values[:, start:stop] = rng.choice(codes, (rows, stop - start))
        for row in range(rows):
            at = rng.choice(stop - start, size=min(len(anchors), stop - start), replace=False)
            values[row, start + at] = anchors[: len(at)]
    if not base.dynamic and base.granularity != "group":
        return np.asarray(values * np.float32(_static_scale(base)))
    # A scale of 2^-8 for what would leave the range of f16.
    values *= np.float32(2.0**-8 if anchors.max() > 1024 else 1.0)
    if base.second_scale == "dual":
        # Level 0 divides by the maximum of 512 columns times fp32(1/6): 6 makes that 1, and 1.0 times it is exact.
        values[:, ::_DUAL] = 6.0
    return values


def _codes(quant: TensorQuant) -> tuple[Array, Array]:
    """Values (in units of the scale) to draw from, and those that each group must hold for the scale to be 1."""
    if quant.is_integer:
        low, high = code_range(quant.element)
        if quant.scale_format == "e8m0":
            unit = 2.0 ** -(quant.bits - 2)
            units = np.arange(-high, high + 1) * unit
            return units[np.abs(units) <= 1.5], np.array([1.5])
        if not quant.symmetric:
            zero = -5 if not quant.dynamic else -3
            return np.arange(low, high + 1) - float(zero), np.array([low, high]) - float(zero)
        # Half the range of codes (127.5) is attained by no code; it rounds to the largest one.
        top = (high - low) / 2 if quant.scale_rule == "half-range" else float(high)
        return np.arange(-high, high + 1).astype(np.float64), np.array([top])
    values = element_values(quant.element)
    top = element_max(quant.element)
    if quant.scale_format == "e8m0":
        # 1.5 times the largest power of two: every rule for power-of-two scales gives 1 for it.
        top = 1.5 * 2.0 ** np.floor(np.log2(top))
    sized = np.isfinite(values) & (np.abs(values) <= top) & ((values == 0) | (np.abs(values) >= top / _RANGE))
    return values[sized], np.array([top])


def _static_scale(quant: TensorQuant) -> float:
    from omniplat.conformance.weights import static_input

    return float(static_input(quant)["input_scale"][0])


def _nvfp4(rows: int, columns: int, size: int, rng: np.random.Generator, *, has_global: bool, ties: bool) -> Array:
    """Groups with maximum 6 times a power of two; the first group of the tensor sets the global scale to 1."""
    finite = element_values("fp4_e2m1")
    if ties:
        finite = _between(finite, 6.0)
    values: Array = rng.choice(finite, (rows, columns)).astype(np.float32)
    for start in range(0, columns, size):
        stop = min(start + size, columns)
        at = rng.integers(0, stop - start, rows)
        values[np.arange(rows), start + at] = 6.0
        factors = np.exp2(rng.integers(-2, 5, rows) if has_global else rng.integers(-2, 3, rows))
        values[:, start:stop] *= factors[:, None].astype(np.float32)
    if has_global and rows:
        values[0, :size] = 0.0
        values[0, 0] = 6.0 * 448.0
    return values
