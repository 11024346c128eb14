"""Re-encoding MX weights for hardware without MX: the same values under one scale per row.

MX scales are powers of two, so a group's scale can be moved into the codes of a wider float format. The *span* of a
row is the number of binades between its largest and smallest group exponent, over groups that are not all zero
(producers write byte 0 for zero groups; those are never counted). The target's row scale puts the largest group at
the top of its range; what the smallest group loses follows from the span alone:

    mxfp4 -> e4m3      span <= 14: exact. 6 * 2^6 = 384 is the largest code that fits, 0.5 * 2^(6-14) = 2^-9 the
                       smallest
    mxfp8 -> e4m3      span <= 8 is accepted. Only what falls below e4m3's subnormals is rounded: within a group that
                       lies 8 binades below the largest, a relative L2 of about 2e-4 on Gaussian weights; whole
                       rows stay within 3e-6
    mxfp4 -> int8      span <= 3: exact. 12 * 2^3 = 96 is the largest code, of units of 0.5 * 2^e of the smallest group
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from omniplat.canonical import Array, CanonicalWeight
from omniplat.errors import InvalidSchemeError
from omniplat.oracle.codecs import decode_codes
from omniplat.scheme import TensorQuant, parse_weight_id

#: Bias of e8m0 bytes.
_BIAS = 127


@dataclass(frozen=True, slots=True)
class Reencoding:
    """One rule: weights of `source` become `target` where every row's span is at most `max_span`.

    `headroom` is the number of binades by which codes of the row's largest group are scaled up.
    """

    source: str
    target: str
    max_span: int
    headroom: int
    exact: bool


REENCODINGS: dict[tuple[str, str], Reencoding] = {
    (rule.source, rule.target): rule
    for rule in (
        Reencoding("mxfp4", "fp8-channel", 14, 6, exact=True),
        Reencoding("mxfp8", "fp8-channel", 8, 0, exact=False),
        Reencoding("mxfp4", "int8-channel", 3, 0, exact=True),
    )
}


def rule_for(source: str, target: str) -> Reencoding:
    """The rule between two weight ids; raises InvalidSchemeError where there is none."""
    try:
        return REENCODINGS[source, target]
    except KeyError:
        raise InvalidSchemeError(source, f"cannot be re-encoded as {target}") from None


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
