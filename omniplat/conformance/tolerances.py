"""Tolerances: derived from formats and the declared accumulator, the same for every backend. No number is tuned.

    bound   |y' - y| <= gamma_n(u_acc) * S + u_op * S + u_out * |y|      S = sum |a_k b_k| + |bias|
    noise   ||y' - y0|| / ||y - y0|| within [0.8, 1.25]                  y0: the product without activation quantization
    range   the same, row by row

`gamma_n = n u / (1 - n u)` bounds every order of n additions. Integer codes accumulated in int32 are exact, so that n
counts only what happens after it. `u_op` is there for weight-only products: their operands are numbers of the layer's
dtype, and weights that this dtype does not hold are rounded to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omniplat.canonical import Array
from omniplat.conformance.inputs import as_dtype
from omniplat.scheme import TensorQuant

Float64 = NDArray[np.float64]

#: Unit roundoff of the formats that sums and outputs are rounded to. fp22 is what FP8 units of Hopper keep of a sum;
#: fp22-by-128: those of 128 products, whose sums are then added up in f32.
UNITS: dict[str, float] = {
    "f64": 2.0**-53,
    "f32": 2.0**-24,
    "fp22": 2.0**-14,
    "fp22-by-128": 2.0**-14,
    "f16": 2.0**-11,
    "bf16": 2.0**-8,
    "int32": 0.0,
}
#: Products after which a sum is promoted to f32.
PROMOTED_AFTER: dict[str, int] = {"fp22-by-128": 128}
#: Half the spacing of the smallest numbers, where outputs may underflow.
_TINY = {"f16": 2.0**-25, "bf16": 2.0**-134, "f32": 2.0**-150}

#: An independent correct quantizer scores 0.99 to 1.03; a bf16 fallback 0.02 to 0.32; a wrong granularity above 2.
NOISE_WINDOW = (0.8, 1.25)
#: The same of one row of experts, whose few outputs depend on a middle that is quantized anew: correct kernels were
#: seen at 0.79 to 1.09.
ROW_WINDOW = (0.6, 1.6)

#: int8 codes and K up to this many columns fill no int32.
INT32_COLUMNS = 131_071


def gamma(n: float, unit: float) -> float:
    """Relative error of n additions with unit roundoff `unit`; infinite where it says nothing."""
    nu = n * unit
    return nu / (1.0 - nu) if nu < 1.0 else float("inf")


def accumulation(accumulator: str, columns: int, weight: TensorQuant, executed: TensorQuant | None) -> float:
    """The factor of S for sums over `columns` products.

    Scales of groups and rows, zero points and the bias are a handful of f32 operations on top of every sum.
    """
    group = (
        min(q.group_size for q in (weight, executed) if q is not None and q.granularity == "group")
        if any(q is not None and q.granularity == "group" for q in (weight, executed))
        else columns
    )
    after = -(-columns // group) + 6
    if accumulator == "int32" and _is_integer(weight) and _is_integer(executed) and columns <= INT32_COLUMNS:
        return gamma(after, UNITS["f32"])
    unit = UNITS[accumulator] if UNITS[accumulator] else UNITS["f32"]
    interval = PROMOTED_AFTER.get(accumulator, columns)
    return gamma(min(columns, interval), unit) + gamma(after + -(-columns // interval), UNITS["f32"])


def _is_integer(quant: TensorQuant | None) -> bool:
    return quant is not None and quant.is_integer and quant.scale_format != "e8m0"


def operand_unit(values: Array, dtype: str, executed: TensorQuant | None) -> float:
    """u_op: of the dtype, where a weight-only product's weight `values` are not numbers of it."""
    if executed is not None:
        return 0.0
    return 0.0 if np.array_equal(as_dtype(values, dtype).astype(np.float64), values) else UNITS[dtype]


def rounding(values: Array, dtype: str) -> Float64:
    """Largest error of rounding each of `values` once to the dtype."""
    return np.asarray(UNITS[dtype] * np.abs(values) + _TINY[dtype], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Excess:
    """Where an output leaves its bound: the worst element and how many times its bound it is off."""

    index: tuple[int, ...]
    found: float
    expected: float
    allowed: float
    count: int

    def __str__(self) -> str:
        times = abs(self.found - self.expected) / max(self.allowed, 1e-300)
        return (
            f"{self.count} outputs leave their bound; the worst is {list(self.index)}: {self.found:.6g}, expected "
            f"{self.expected:.6g} +- {self.allowed:.3g} ({times:.3g} times the bound)"
        )


def excess(found: Array, expected: Array, allowed: Array) -> Excess | None:
    """What leaves |found - expected| <= allowed; None where nothing does. NaN leaves every bound."""
    error = np.abs(np.asarray(found, np.float64) - expected)
    wrong = ~(error <= allowed)
    if not wrong.any():
        return None
    ratio = np.where(np.isfinite(error), error / np.maximum(allowed, 1e-300), np.inf)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    return Excess(index, float(found[index]), float(expected[index]), float(allowed[index]), int(wrong.sum()))


def finite(found: Array, expected: Array, allowed: Array, dtype: str) -> Float64:
    """`found`, with infinities replaced by what was expected where that, within its bound, is beyond the dtype."""
    values = np.asarray(found, np.float64)
    reachable = np.abs(expected) + allowed
    overflows = np.isinf(as_dtype(reachable, dtype)) & np.isinf(values) & (np.sign(values) == np.sign(expected))
    return np.where(overflows, expected, values)


def usage(found: Array, expected: Array, allowed: Array) -> float:
    """The largest error in units of its bound."""
    return float((np.abs(found - expected) / np.maximum(allowed, 1e-300)).max(initial=0.0))


def noise_ratio(found: Array, expected: Array, unquantized: Array) -> float:
    """Error of a backend in units of the oracle's own quantization error, of whole outputs."""
    return float(np.linalg.norm(found - unquantized) / max(float(np.linalg.norm(expected - unquantized)), 1e-300))


def noise_ratios(found: Array, expected: Array, unquantized: Array) -> Float64:
    """`noise_ratio` of every row."""
    own = np.linalg.norm(expected - unquantized, axis=-1)
    ratios: Float64 = np.linalg.norm(found - unquantized, axis=-1) / np.maximum(own, 1e-300)
    return ratios


def inside_window(ratio: float, window: tuple[float, float] = NOISE_WINDOW) -> bool:
    return window[0] <= ratio <= window[1]
