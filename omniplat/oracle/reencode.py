"""Re-encoding MX weights for hardware without MX, in NumPy: the same values under one scale per row.

`omniplat.reencoding` has the rules and what they lose. Activations that were rounded to an MX grid move in the same
way, token by token (`regroup_activation`).
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from omniplat.canonical import Array, CanonicalWeight
from omniplat.oracle.codecs import Float64, decode_codes
from omniplat.oracle.quantize import quantize_activation
from omniplat.oracle.scales import e8m0_exponent
from omniplat.reencoding import rule_for
from omniplat.scheme import TensorQuant, parse_weight_id

#: Bias of e8m0 bytes.
_BIAS = 127
#: Below every exponent of a group: that of a token without any group that is not zero.
_NO_GROUP = -1000
#: Tokens whose largest group has a smaller exponent are scaled as if it had this one, so that scales stay normal
#: numbers in f32. They lose nothing down to 2^-115.
LEAST_TOKEN_EXPONENT = -100


def row_spans(codes: Array, scale: Array, quant: TensorQuant, in_features: int) -> NDArray[np.int64]:
    """Span of every row, int64 [N], of MX codes with e8m0 bytes `scale` [N, G]; 0 for rows of zeros."""
    occupied = _occupied(codes, quant, in_features, scale.shape[1])
    exponent = scale.astype(np.int64)
    largest = np.where(occupied, exponent, -1).max(axis=1)
    smallest = np.where(occupied, exponent, 256).min(axis=1)
    return np.where(largest >= 0, largest - smallest, 0)


def _occupied(codes: Array, quant: TensorQuant, in_features: int, groups: int) -> NDArray[np.bool_]:
    """bool [N, G]: groups with a code that is not zero, whatever its sign."""
    magnitude = np.asarray(codes).view(np.uint8) & (0x77 if quant.bits == 4 else 0x7F)
    per_group = quant.group_size // (2 if quant.bits == 4 else 1)
    occupied: NDArray[np.bool_] = magnitude.reshape(magnitude.shape[0], groups, per_group).max(axis=2) > 0
    return occupied


def refused_rows(weight: CanonicalWeight, target: str) -> NDArray[np.int64]:
    """Rows whose span forbids the re-encoding, int64 indices; none where all may move."""
    rule = rule_for(weight.scheme.weight_id, target)
    spans = row_spans(weight.tensors["codes"], weight.tensors["scale"], weight.scheme.weight, weight.in_features)
    return np.flatnonzero(spans > rule.max_span)


def reencode(weight: CanonicalWeight, target: str) -> CanonicalWeight:
    """`weight` (mxfp4 or mxfp8) as `target` ("fp8-channel" or "int8-channel"), in canonical form.

    Rows beyond the rule's span lose their smallest groups: ask `refused_rows` first. Raises InvalidSchemeError
    where no rule leads from one to the other.
    """
    rule = rule_for(weight.scheme.weight_id, target)
    quant = weight.scheme.weight
    bytes_ = weight.tensors["scale"].astype(np.int64)
    groups = bytes_.shape[1]
    occupied = _occupied(weight.tensors["codes"], quant, weight.in_features, groups)
    elements = decode_codes(weight.tensors["codes"], quant.element, weight.in_features)
    if target == "int8-channel":
        # Codes count halves (the smallest e2m1 step) of the row's smallest group.
        smallest = np.where(occupied, bytes_, 256).min(axis=1, keepdims=True)
        base = np.where(smallest == 256, _BIAS, smallest)
        shift = np.where(occupied, bytes_ - base, 0)
        values = elements * 2 * np.exp2(shift.repeat(quant.group_size, axis=1).astype(np.float64))
        codes: Array = np.clip(np.rint(values), -127, 127).astype(np.int8)
        scale = np.exp2((base - _BIAS - 1).astype(np.float64))
    else:
        largest = np.where(occupied, bytes_, -1).max(axis=1, keepdims=True)
        base = np.where(largest < 0, _BIAS, largest)
        shift = np.where(occupied, bytes_ - base, 0) + rule.headroom
        values = elements * np.exp2(shift.repeat(quant.group_size, axis=1).astype(np.float64))
        codes = values.astype(ml_dtypes.float8_e4m3fn)
        scale = np.exp2((base - _BIAS - rule.headroom).astype(np.float64))
    tensors = dict(weight.tensors) | {"codes": codes, "scale": scale.astype(np.float32)}
    return replace(weight, scheme=replace(weight.scheme, weight=parse_weight_id(target)), tensors=tensors)


def regroup_activation(x: Array, quant: TensorQuant) -> tuple[Array, NDArray[np.float32]]:
    """`x` [M, K] rounded to the MX grid of `quant` (mxfp4), then held as e4m3 codes under one power of two per token.

    Codes float8_e4m3fn [M, K] and scales f32 [M, 1]: codes * scales are `quantize_activation` exactly where the
    group exponents of a token span at most 14 binades. Groups below that are rounded to multiples of 2^-15 of the
    largest group's scale, so that no value moves by more than 2^-16 of it. A token that holds NaN or Inf gets the scale
    NaN, one of zeros the scale 1.
    """
    rule = rule_for("mxfp4", "fp8-channel")
    values: Float64 = quantize_activation(x, quant)
    bad = ~np.isfinite(values).all(axis=1, keepdims=True)
    values = np.where(bad, 0.0, values)
    groups = (len(values), -1, quant.group_size)
    largest = np.abs(np.where(bad, 0.0, x)).astype(np.float32).reshape(groups).max(axis=2)
    exponents = e8m0_exponent(largest, quant.element, quant.scale_rule)
    occupied = np.abs(values).reshape(groups).max(axis=2) > 0
    top = np.where(occupied, exponents, _NO_GROUP).max(axis=1, keepdims=True)
    shift = np.where(top == _NO_GROUP, 0, np.maximum(top, LEAST_TOKEN_EXPONENT) - rule.headroom)
    codes = np.ldexp(values, -shift).astype(ml_dtypes.float8_e4m3fn)
    scales = np.where(bad, np.nan, np.ldexp(1.0, shift)).astype(np.float32)
    return codes, scales
