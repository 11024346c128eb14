"""Rounding float32 values to small formats, in torch. The same results as the oracle's `round_to_element`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from omniplat.errors import InvalidSchemeError
from omniplat.scheme import ELEMENT_BITS


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Stored mantissa bits, exponent of the smallest normal and of the largest number, and the latter."""

    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    max_value: float


_FLOATS: tuple[tuple[str, FloatFormat], ...] = (
    ("fp4_e2m1", FloatFormat(1, 0, 2, 6.0)),
    ("fp6_e2m3", FloatFormat(3, 0, 2, 7.5)),
    ("fp6_e3m2", FloatFormat(2, -2, 4, 28.0)),
    ("fp8_e4m3", FloatFormat(3, -6, 8, 448.0)),
    ("fp8_e5m2", FloatFormat(2, -14, 15, 57344.0)),
)


@lru_cache(maxsize=32)
def float_format(element: str) -> FloatFormat | None:
    """The float format of that name; None for integers."""
    return dict(_FLOATS).get(element)


def code_range(element: str) -> tuple[int, int]:
    """Smallest and largest code of an `int*` or `uint*` element; raises InvalidSchemeError for others."""
    bits = ELEMENT_BITS.get(element, 0)
    if element.startswith("uint"):
        return 0, 2**bits - 1
    if element.startswith("int"):
        return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    raise InvalidSchemeError(element, "is not an integer element")


def element_max(element: str) -> float:
    """Largest magnitude: 6 for fp4_e2m1, 127 for int8."""
    fmt = float_format(element)
    return fmt.max_value if fmt else float(code_range(element)[1])


def round_to_element(values: torch.Tensor, element: str, rounding: str) -> torch.Tensor:
    """The element's value that each of `values` (float32) rounds to, float32. Saturates; NaN stays NaN.

    `rounding` is nearest-even ("" too), half-away, half-to-zero or floor; raises InvalidSchemeError for others.
    """
    fmt = float_format(element)
    if fmt is None:
        low, high = code_range(element)
        return _round(values, rounding).clamp_(low, high)
    if rounding in ("", "nearest-even"):
        return _nearest_even(values.clamp(-fmt.max_value, fmt.max_value), fmt)
    wide = values.to(torch.float64)
    clamped = wide.clamp(-fmt.max_value, fmt.max_value)
    exponent = (torch.frexp(wide.abs())[1] - 1).clamp(fmt.min_exponent, fmt.max_exponent)
    step = torch.ldexp(torch.ones_like(wide), exponent - fmt.mantissa_bits)
    rounded = _round(clamped / step, rounding).mul_(step)
    return rounded.clamp_(-fmt.max_value, fmt.max_value).to(torch.float32)


def _nearest_even(values: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Exact in float32: normals on the bits, subnormals by adding a number whose unit is their spacing."""
    drop = 23 - fmt.mantissa_bits
    bits = values.view(torch.int32)
    kept = (bits >> drop).bitwise_and_(1).add_(bits).add_((1 << (drop - 1)) - 1)
    normal = kept.bitwise_and_(-(1 << drop)).view(torch.float32)
    big = 1.5 * 2.0 ** (23 + fmt.min_exponent - fmt.mantissa_bits)
    small = (values + big).sub_(big)
    return torch.where(values.abs() < 2.0**fmt.min_exponent, small, normal)


def _round(values: torch.Tensor, rounding: str) -> torch.Tensor:
    if rounding in ("", "nearest-even"):
        return torch.round(values)
    if rounding == "half-away":
        wide = values.to(torch.float64)
        return torch.copysign(torch.floor(wide.abs() + 0.5), wide).to(values.dtype)
    if rounding == "half-to-zero":
        wide = values.to(torch.float64)
        return torch.copysign(torch.ceil(wide.abs() - 0.5), wide).to(values.dtype)
    if rounding == "floor":
        return torch.floor(values)
    raise InvalidSchemeError(rounding, "rounding is none of ('nearest-even', 'half-away', 'half-to-zero', 'floor')")
