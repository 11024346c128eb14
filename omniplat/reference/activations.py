"""Quantizing activations at run time, as a scheme declares it. The oracle's `quantize_activation`, in torch.

Scales are derived and applied in float32, as producers and devices do, so codes agree with the oracle's bit for
bit. What differs is the form of the result: a scale per token or tensor is kept apart, so that the product can
be taken with codes and scaled afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from omniplat.errors import InvalidCheckpointError, InvalidSchemeError
from omniplat.reference.rounding import code_range, element_max, float_format, round_to_element
from omniplat.scheme import TensorQuant, activation_id

_E4M3_MAX = 448.0
_DUAL_COLUMNS = 512
_SIXTH = float(torch.tensor(1.0) / torch.tensor(6.0))


@dataclass(frozen=True, slots=True)
class Quantized:
    """x^ = values * scale: `values` f32 [M, K], `scale` f32 [M, 1] or [1, 1], or None for 1."""

    values: torch.Tensor
    scale: torch.Tensor | None = None

    def rows(self, index: torch.Tensor) -> Quantized:
        """Some of the rows."""
        scale = self.scale
        if scale is not None and scale.shape[0] > 1:
            scale = scale.index_select(0, index)
        return Quantized(self.values.index_select(0, index), scale)

    def dequantized(self) -> torch.Tensor:
        """float32 [M, K]."""
        return self.values if self.scale is None else self.values * self.scale


def quantize_activation(x: torch.Tensor, quant: TensorQuant | None, tensors: Mapping[str, torch.Tensor]) -> Quantized:
    """Quantize `x`, float32 [M, K] with M > 0, by `quant`; x itself for None.

    `tensors` provides `input_scale`, `input_zero_point` and `input_global_scale` where the scheme is static, and maybe
    `clip_ratio`, which multiplies scales per token.
    Raises InvalidCheckpointError when one of them is missing, InvalidSchemeError for an unknown rule.
    """
    if quant is None:
        return Quantized(x)
    if quant.second_scale == "dual":
        level0 = _dual_scale(x)
        inner = _grouped(_divide(x, level0), quant, None)
        return Quantized(inner.mul_(level0))
    if quant.granularity == "group":
        glob = tensors.get("input_global_scale")
        if quant.second_scale == "global":
            glob = _nvfp4_global(x) if glob is None else glob.reshape(())
        return Quantized(_grouped(x, quant, glob))
    if quant.granularity not in ("token", "tensor", "channel"):
        raise InvalidSchemeError(activation_id(quant), f"granularity {quant.granularity} is not one of an activation")
    inverse: torch.Tensor | None = None
    if quant.dynamic:
        scale, zero, inverse = _whole_rows(x, quant)
        if "clip_ratio" in tensors:
            if zero is not None or inverse is not None:
                raise InvalidSchemeError(activation_id(quant), "has no scale that a clipping ratio multiplies")
            scale = scale * tensors["clip_ratio"]
    else:
        scale, zero = _static(quant, tensors)
    codes = _codes(x, scale, zero, quant, inverse)
    return Quantized(codes if zero is None else codes.sub_(zero), scale)


# --- scales ------------------------------------------------------------------------------------------------------


def _static(quant: TensorQuant, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    for role in ("input_scale",) if quant.symmetric else ("input_scale", "input_zero_point"):
        if role not in tensors:
            raise InvalidCheckpointError(f"{activation_id(quant)} needs {role}", key=role)
    scale = tensors["input_scale"].to(torch.float32).reshape(1, 1)
    return scale, None if quant.symmetric else tensors["input_zero_point"].to(torch.float32).reshape(1, 1)


def _whole_rows(x: torch.Tensor, quant: TensorQuant) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Scale, zero point and inverse (see `_inverse`) per token, or of the whole tensor: [M, 1] or [1, 1]."""
    per_token = quant.granularity != "tensor"
    if quant.symmetric:
        amax = x.abs().amax(1, keepdim=True) if per_token else x.abs().amax().reshape(1, 1)
        return _in_format(_absmax_scale(amax, quant), quant), None, _inverse(amax, quant)
    low, high = torch.aminmax(x, dim=1, keepdim=True) if per_token else (v.reshape(1, 1) for v in torch.aminmax(x))
    return *_asymmetric(low, high, quant), None


def _inverse(amax: torch.Tensor, quant: TensorQuant) -> torch.Tensor | None:
    """What values are multiplied by where the rule does not divide them by the scale; None where it does."""
    if quant.scale_rule != "absmax-reciprocal":
        return None
    # torch takes a number over a tensor as the number times a reciprocal, which rounds twice
    return torch.full_like(amax, element_max(quant.element)) / torch.where(amax == 0, 1.0, amax)


def _asymmetric(low: torch.Tensor, high: torch.Tensor, quant: TensorQuant) -> tuple[torch.Tensor, torch.Tensor]:
    code_low, code_high = code_range(quant.element)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = _in_format((high - low) / float(code_high - code_low), quant)
    safe = torch.where(scale == 0, 1.0, scale)
    return scale, torch.round(float(code_low) - low / safe).clamp_(code_low, code_high)


def _absmax_scale(amax: torch.Tensor, quant: TensorQuant) -> torch.Tensor:
    rule = quant.scale_rule or "absmax"
    if rule not in ("absmax", "half-range", "absmax-clamped", "absmax-reciprocal"):
        raise InvalidSchemeError(rule, f"is no scale_rule for {quant.scale_format} scales")
    largest = element_max(quant.element)
    if rule == "half-range" and quant.is_integer:
        low, high = code_range(quant.element)
        largest = (high - low) / 2
    scale = amax / largest
    if rule == "absmax-clamped" and not quant.is_integer:
        scale = scale.clamp(min=1.0 / (largest * 512.0))
    return scale


def _in_format(scale: torch.Tensor, quant: TensorQuant) -> torch.Tensor:
    formats = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    if quant.scale_format not in formats:
        raise InvalidSchemeError(quant.scale_format, "is not a scale format of a float scale")
    return scale.to(formats[quant.scale_format]).to(torch.float32)


def e8m0_exponent(amax: torch.Tensor, quant: TensorQuant) -> torch.Tensor:
    """int32 exponents of power-of-two scales for groups with maximum `amax` (finite float32); -127 for 0."""
    fmt = float_format(quant.element)
    if fmt is not None:
        emax, mantissa_bits, largest = fmt.max_exponent, fmt.mantissa_bits, fmt.max_value
    else:
        # MXINT counts in units of 2^-(bits - 2): its largest number is just below 2.
        mantissa_bits = quant.bits - 2
        emax, largest = 0, code_range(quant.element)[1] / 2.0**mantissa_bits
    fraction, power = torch.frexp(amax)
    exponent = power - 1
    rule = quant.scale_rule or "floor"
    if rule == "floor":
        result = exponent - emax
    elif rule in ("even", "even-m1"):
        width = 1 if rule == "even-m1" else mantissa_bits
        result = exponent - emax + (fraction * 2 >= 2.0 - 2.0 ** -(width + 1)).to(torch.int32)
    elif rule in ("ceil", "rceil"):
        fraction, power = torch.frexp(amax / largest)
        result = torch.where(fraction == 0.5, power - 1, power)
    else:
        raise InvalidSchemeError(rule, "is no scale_rule for e8m0 scales")
    return torch.where(amax == 0, -127, result.clamp(-127, 127)).to(torch.int32)


def _e8m0_scale(amax: torch.Tensor, quant: TensorQuant) -> torch.Tensor:
    finite = torch.isfinite(amax)
    exponent = e8m0_exponent(torch.where(finite, amax, 1.0), quant)
    if quant.is_integer:
        exponent = exponent - (quant.bits - 2)
    scale = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent).to(torch.float32)
    return torch.where(finite, scale, torch.nan)


def _e4m3_scale(amax: torch.Tensor, quant: TensorQuant, glob: torch.Tensor) -> torch.Tensor:
    rule = quant.scale_rule or "absmax"
    top = element_max(quant.element)
    if rule == "absmax-clamped":
        local = (amax / (top * glob)).to(torch.float32)
        local = torch.where(local == 0, 1.0, local).clamp(min=2.0**-9)
    elif rule == "absmax-reciprocal":
        local = ((amax * (1.0 / top)).to(glob.dtype) / glob).to(torch.float32)
        # the producer multiplies by the divisor's reciprocal, rounded to f32
        glob = glob.to(torch.float32)
    elif rule in ("absmax", "half-range"):
        # a global scale in f64 stands for a divisor: the quotient is rounded once, as a product with it would be
        local = ((amax / top).to(glob.dtype) / glob).to(torch.float32)
    else:
        raise InvalidSchemeError(rule, "is no scale_rule for e4m3 scales")
    stored = round_to_element(local.clamp(max=_E4M3_MAX), "fp8_e4m3", "")
    return (stored.to(glob.dtype) * glob).to(torch.float32)


def _nvfp4_global(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax() / (6.0 * _E4M3_MAX)
    return torch.where(scale == 0, 1.0, scale)


def _dual_scale(x: torch.Tensor) -> torch.Tensor:
    """float32 [M, K]: a 512-column group's maximum times fp32(1/6), 0 where that would be subnormal."""
    columns = x.shape[1]
    padded = F.pad(x, (0, -columns % _DUAL_COLUMNS)).view(x.shape[0], -1, _DUAL_COLUMNS)
    level0 = padded.abs().amax(2) * _SIXTH
    level0 = torch.where(level0 < 2.0**-126, 0.0, level0)
    return level0.repeat_interleave(_DUAL_COLUMNS, dim=1)[:, :columns]


# --- codes -------------------------------------------------------------------------------------------------------


def _divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, x / torch.where(scale == 0, 1.0, scale))


def _codes(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    quant: TensorQuant,
    inverse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values of the codes, float32, in the shape of `x`; `scale` and `inverse` broadcast against it."""
    is_zero = scale == 0
    safe = torch.where(is_zero, 1.0, scale)
    reciprocal = quant.scale_rule == "absmax-reciprocal"
    scaled = x * (1.0 / safe if inverse is None else inverse) if reciprocal else x / safe
    if bool(is_zero.any()):
        scaled = torch.where(is_zero, 0.0, scaled)
    if zero is not None:
        scaled = scaled + zero
    codes = round_to_element(scaled, quant.element, quant.rounding)
    if quant.is_integer and quant.scale_format == "e8m0":
        codes.clamp_(min=-element_max(quant.element))
    return codes


def _grouped(x: torch.Tensor, quant: TensorQuant, glob: torch.Tensor | None) -> torch.Tensor:
    """x^ of a scheme with scales per group along K, float32 [M, K]. The last group may be partial."""
    rows, columns = x.shape
    size = quant.group_size
    groups = F.pad(x, (0, -columns % size)).view(rows, -1, size)
    zero: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    if quant.scale_format == "e8m0":
        scale = _e8m0_scale(groups.abs().amax(2, keepdim=True), quant)
    elif quant.scale_format == "e4m3":
        one = torch.ones((), dtype=torch.float32)
        scale = _e4m3_scale(groups.abs().amax(2, keepdim=True), quant, one if glob is None else glob)
    elif quant.symmetric:
        amax = groups.abs().amax(2, keepdim=True)
        scale, inverse = _in_format(_absmax_scale(amax, quant), quant), _inverse(amax, quant)
    else:
        scale, zero = _asymmetric(*torch.aminmax(groups, dim=2, keepdim=True), quant)
    codes = _codes(groups, scale, zero, quant, inverse)
    if zero is not None:
        codes.sub_(zero)
    return codes.mul_(scale).view(rows, -1)[:, :columns]
