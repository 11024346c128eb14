"""linear: the layer that a canonical weight describes, in float64."""

from __future__ import annotations

import numpy as np

from omniplat.canonical import Array, CanonicalWeight
from omniplat.oracle.codecs import Float64
from omniplat.oracle.dequantize import dequantize, residual
from omniplat.oracle.quantize import quantize_activation
from omniplat.scheme import low_rank_base


def transformed(x: Array, weight: CanonicalWeight) -> Float64:
    """Rows [..., K] as matrices X [A, B], to L^T X R, as rows again. The order is that of msModelSlim's FlatQuant."""
    left, right = (weight.tensors[role].astype(np.float64) for role in ("left_transform", "right_transform"))
    matrices = np.asarray(x, dtype=np.float64).reshape(*x.shape[:-1], *weight.scheme.transform)
    result: Float64 = (left.T @ (matrices @ right)).reshape(x.shape)
    return result


def untransformed(rows: Float64, weight: CanonicalWeight) -> Float64:
    """Rows [N, K] of the dequantized weight that give the same product with an input that is not transformed."""
    if not weight.scheme.is_transformed:
        return rows
    left, right = (weight.tensors[role].astype(np.float64) for role in ("left_transform", "right_transform"))
    matrices = rows.reshape(len(rows), *weight.scheme.transform)
    result: Float64 = (left @ matrices @ right.T).reshape(rows.shape)
    return result


def linear(x: Array, weight: CanonicalWeight, *, activation: bool = True, bias: Array | None = None) -> Float64:
    """y = Q(x * pre_scale) @ W^T + bias: float64 [..., N] for `x` [..., K]; stacked weights take [E, M, K].

    What is quantized is L^T X R, row by row, where the scheme transforms inputs (`transformed`).

    SVDQuant's low-rank pair sees the input as it is: (x @ D) @ U^T is added.

    `activation` False leaves x as it is (weight-only arithmetic), True quantizes it as the scheme says (nothing for
    a16). `bias`, [N], stands in for the weight's own, which is used where it is None.
    """
    tensors = weight.tensors
    values = np.asarray(x, dtype=np.float64)
    inner: CanonicalWeight = weight
    beside: Float64 | float = 0.0
    if low_rank_base(weight.scheme.weight) is not None:
        down, up = (tensors[role].astype(np.float64) for role in ("low_rank_down", "low_rank_up"))
        inner = residual(weight)
        beside = (values @ down) @ np.swapaxes(up, -1, -2)
    if "pre_scale" in tensors:
        pre_scale = tensors["pre_scale"].astype(np.float64)
        values = values * (pre_scale if pre_scale.ndim == 1 else pre_scale[:, None, :])
    if weight.scheme.is_transformed:
        values = transformed(values, weight)
    if activation and weight.scheme.activation is not None:
        values = quantize_activation(
            values,
            weight.scheme.activation,
            input_scale=tensors.get("input_scale"),
            input_zero_point=tensors.get("input_zero_point"),
            input_global_scale=tensors.get("input_global_scale"),
            clip_ratio=tensors.get("clip_ratio"),
        )
    result: Float64 = values @ np.swapaxes(dequantize(inner), -1, -2) + beside
    added = tensors.get("bias") if bias is None else bias
    if added is None:
        return result
    return result + (added if added.ndim == 1 else added[:, None, :]).astype(np.float64)
