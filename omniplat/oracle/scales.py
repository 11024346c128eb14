"""How scales are derived from the values that they cover: the `scale_rule` of a TensorQuant, as functions of amax.

Producers and devices derive scales in float32, and rounding there decides codes; so these functions compute in
float32, with IEEE division, whatever the oracle does later. Rules, by what the scale is stored as:

e8m0 (powers of two), with emax the exponent of the element's largest number:

    floor     floor(log2 amax) - emax. OCP MX v1.0, auto-round `quant_mx`, Ascend algorithm 0. The default.
    even      amax rounded half up at the element's own mantissa width, then floor. AITER's EVEN.
    even-m1   the same at one mantissa bit whatever the element is: compressed-tensors `generate_mx_scales`, which
              reuses FP4's width for MXFP8. Equal to `even` for fp4.
    ceil      ceil(log2(amax / max)); `rceil` is the same. vLLM, torchao, modelopt's MXFP8, Ascend algorithm 1.

floating point:

    absmax            amax / max, max being 448, 127, 7, ...  The default.
    half-range        amax / ((max - min) / 2): 127.5 for int8, 7.5 for int4; as absmax for floats. compressed-tensors
                      `calculate_qparams`.
    absmax-clamped    as absmax but never tiny: at least 1 / (512 max) for fp8 (auto-round, vLLM), at least 2^-9 for the
                      e4m3 scales of NVFP4 (modelopt), where 1 stands in for the scale of an all-zero group.
    absmax-reciprocal as absmax, but values are multiplied by max / absmax (1 / scale where the scale is stored).
                      modelopt's FP8 and auto-round's NVFP4, which multiplies by the f32 reciprocal of its divisor too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from omniplat.canonical import Array
from omniplat.errors import InvalidSchemeError
from omniplat.oracle.codecs import code_range, e8m0_from_exponent, element_max, exponent_of, float_element
from omniplat.scheme import TensorQuant

Float32 = NDArray[np.float32]

E8M0_RULES = ("floor", "even", "even-m1", "ceil", "rceil")
FLOAT_RULES = ("absmax", "half-range", "absmax-clamped", "absmax-reciprocal")

#: Largest group scale of NVFP4, and the smallest positive one.
E4M3_MAX = np.float32(448)
E4M3_TINY = np.float32(2.0**-9)

_SCALE_DTYPE = (("f32", np.float32), ("bf16", ml_dtypes.bfloat16), ("f16", np.float16))


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that one tile's codes stand for: (code - zero_point) * scale.

    `scale` is the whole multiplier, f32 (f64 for e8m0); `stored` what a file keeps of it; `zero_point` f32 or None;
    `inverse` what values are multiplied by where the rule does not divide them by `scale`.
    All have the shape of the reduced tiles, kept dimensions included.
    """

    scale: Array
    stored: Array
    zero_point: Float32 | None = None
    inverse: Float32 | None = None


def e8m0_exponent(amax: Array, element: str, rule: str = "") -> NDArray[np.int32]:
    """Exponent of the power-of-two scale of groups with absolute maximum `amax` (f32), same shape.

    Zero gives -127, the byte 0. Raises InvalidSchemeError for an unknown rule.
    """
    spec = float_element(element)
    if spec is not None:
        emax, mantissa_bits, largest = spec.max_exponent, spec.mantissa_bits, spec.max_value
    else:
        # MXINT counts in units of 2^-(bits - 2): its largest number is just below 2
        high = code_range(element)[1]
        mantissa_bits = high.bit_length() - 1
        emax, largest = 0, high / 2.0**mantissa_bits
    exponent = exponent_of(amax)
    if rule in ("", "floor"):
        result = exponent - emax
    elif rule in ("even", "even-m1"):
        width = 1 if rule == "even-m1" else mantissa_bits
        mantissa = np.ldexp(amax, -exponent)
        result = exponent - emax + (mantissa >= 2.0 - 2.0 ** -(width + 1))
    elif rule in ("ceil", "rceil"):
        fraction, power = np.frexp(amax / np.float32(largest))
        result = np.where(fraction == 0.5, power - 1, power)
    else:
        raise InvalidSchemeError(rule, f"scale_rule for e8m0 scales is none of {E8M0_RULES}")
    return np.where(amax == 0, -127, np.clip(result, -127, 127)).astype(np.int32)


def e8m0_grid(amax: Array, quant: TensorQuant) -> Grid:
    """Power-of-two scales. A group with NaN or Inf gets the NaN scale, byte 255."""
    exponent = e8m0_exponent(np.where(np.isfinite(amax), amax, 1).astype(np.float32), quant.element, quant.scale_rule)
    stored = np.where(np.isfinite(amax), e8m0_from_exponent(exponent), 255).astype(np.uint8)
    unit = exponent - (quant.bits - 2) if quant.is_integer else exponent
    return Grid(np.where(np.isfinite(amax), np.ldexp(1.0, unit), np.nan), stored)


def absmax_scale(amax: Array, quant: TensorQuant) -> Float32:
    """amax / max by the float rules above, f32, same shape. Raises InvalidSchemeError for an unknown rule."""
    rule = quant.scale_rule or "absmax"
    if rule not in FLOAT_RULES:
        raise InvalidSchemeError(rule, f"scale_rule for {quant.scale_format} scales is none of {FLOAT_RULES}")
    largest = np.float32(element_max(quant.element))
    if rule == "half-range" and quant.is_integer:
        low, high = code_range(quant.element)
        largest = np.float32((high - low) / 2)
    scale = np.asarray(amax, dtype=np.float32) / largest
    if rule == "absmax-clamped" and not quant.is_integer:
        scale = np.maximum(scale, np.float32(1.0 / (float(largest) * 512.0)))
    return np.asarray(scale, dtype=np.float32)


def float_grid(low: Array, high: Array, quant: TensorQuant) -> Grid:
    """Scales, and zero points where the scheme has them, of tiles that span [low, high], f32.

    An asymmetric range always includes 0; its zero point is round(min_code - low / scale), clamped to the codes
    (compressed-tensors, vLLM and auto-round alike).
    """
    if quant.symmetric:
        amax = np.maximum(np.abs(low), np.abs(high))
        grid = _in_format(absmax_scale(amax, quant), quant)
        if quant.scale_rule != "absmax-reciprocal":
            return grid
        top = np.float32(element_max(quant.element))
        return replace(grid, inverse=top / np.where(amax == 0, np.float32(1), amax))
    code_low, code_high = code_range(quant.element)
    low = np.minimum(low, np.float32(0))
    high = np.maximum(high, np.float32(0))
    grid = _in_format(((high - low) / np.float32(code_high - code_low)).astype(np.float32), quant)
    safe = np.where(grid.scale == 0, np.float32(1), grid.scale)
    zero = np.clip(np.rint(np.float32(code_low) - low / safe), code_low, code_high)
    return Grid(grid.scale, grid.stored, zero.astype(np.float32))


def _in_format(scale: Float32, quant: TensorQuant) -> Grid:
    dtype = dict(_SCALE_DTYPE).get(quant.scale_format)
    if dtype is None:
        raise InvalidSchemeError(quant.scale_format, "is not a scale format of a float scale")
    stored = scale.astype(dtype)
    return Grid(stored.astype(np.float32), stored)


def nvfp4_grid(amax: Array, quant: TensorQuant, global_scale: Array) -> Grid:
    """Group scales in e4m3 under `global_scale`, a multiplier that broadcasts against `amax` (f32).

    It is f32, or f64 where it stands for a divisor: the quotient is then rounded once, as a product with the divisor.
    """
    rule = quant.scale_rule or "absmax"
    if rule not in FLOAT_RULES:
        raise InvalidSchemeError(rule, f"scale_rule for e4m3 scales is none of {FLOAT_RULES}")
    top = np.float32(element_max(quant.element))
    if rule == "absmax-clamped":
        local = (amax / (top * global_scale)).astype(np.float32)
        local = np.maximum(np.where(local == 0, np.float32(1), local), E4M3_TINY)
    elif rule == "absmax-reciprocal":
        local = (amax * (np.float32(1) / top) * (np.float32(1) / global_scale)).astype(np.float32)
        # 0 times a reciprocal that overflows is NaN, of a sign that depends on the processor
        local = np.where(np.isnan(local), np.float32(np.nan), local)
        global_scale = global_scale.astype(np.float32)
    else:
        local = ((amax / top) / global_scale).astype(np.float32)
    stored = np.minimum(local, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return Grid((stored.astype(np.float32) * global_scale).astype(np.float32), stored)


def nvfp4_global_scale(amax: Array) -> Float32:
    """The f32 multiplier that puts the largest group scale at 448: amax / (6 * 448); 1 for an all-zero tensor."""
    scale = np.asarray(amax, dtype=np.float32) / np.float32(6 * 448)
    return np.asarray(np.where(scale == 0, np.float32(1), scale), dtype=np.float32)
