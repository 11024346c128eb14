"""Quantization in NumPy: activations (quantize and dequantize at once) and weights (round to nearest).

Scales are derived and values are divided by them in float32, as producers and devices do (`scales.py`): that decides
which code a value gets. What codes then stand for is computed in float64. Rounding is `TensorQuant.rounding`:
nearest-even ("" too), half-away, half-to-zero, floor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omniplat.canonical import Array, CanonicalWeight
from omniplat.errors import InvalidSchemeError, UsageError
from omniplat.oracle.codecs import Float64, element_max, encode, float_element, round_to_element
from omniplat.oracle.dequantize import DUAL_LEVEL_COLUMNS
from omniplat.oracle.scales import Float32, Grid, e8m0_grid, float_grid, nvfp4_global_scale, nvfp4_grid
from omniplat.scheme import ELEMENT_BITS, Scheme, TensorQuant, activation_id, low_rank_base, weight_id

_SIXTH = np.float32(1) / np.float32(6)


def quantize_activation(
    x: Array,
    quant: TensorQuant,
    *,
    input_scale: Array | float | None = None,
    input_zero_point: Array | int | None = None,
    input_global_scale: Array | float | None = None,
    clip_ratio: Array | float | None = None,
) -> Float64:
    """What is left of `x`, [..., K], after quantization by `quant`: float64, same shape.

    Static schemes need `input_scale` (and `input_zero_point` where asymmetric), a multiplier: x = q * scale.
    `input_global_scale` is NVFP4's, a multiplier; without it, it is derived from `x`. Each is one number, or one per
    expert for stacked `x`, [E, M, K]. `clip_ratio` multiplies scales that are derived from `x` by absmax: values beyond
    the largest code become it. The last group along K may be partial. Raises UsageError where a static quantity
    is missing, InvalidSchemeError for schemes without a definition here (bitsandbytes) and unknown rules.
    """
    base = low_rank_base(quant)
    if base is not None:
        # SVDQuant's run-time NVFP4 has no second level: its group scales stand alone
        return _fake(np.asarray(x, dtype=np.float32), base, 1.0 if base.second_scale == "global" else None)
    _check_element(quant, activation_id(quant))
    values = np.asarray(x, dtype=np.float32)
    if quant.second_scale == "dual":
        level0 = _dual_scale(values)
        return _fake(_divide(values, level0), quant, None) * level0.astype(np.float64)
    if quant.dynamic or quant.second_scale == "global" or quant.scale_format == "e8m0":
        return _fake(values, quant, input_global_scale, clip_ratio)
    if input_scale is None or (not quant.symmetric and input_zero_point is None):
        needed = "input_scale" if quant.symmetric else "input_scale and input_zero_point"
        raise UsageError(f"{activation_id(quant)} needs {needed}")
    scale = _leading(input_scale, values.ndim)
    zero = None if input_zero_point is None or quant.symmetric else _leading(input_zero_point, values.ndim)
    grid = Grid(scale, scale, zero)
    return _represented(_round(values, grid, quant), grid)


def quantize_weight(w: Array, quant: TensorQuant, *, extremes: tuple[float, float] | None = None) -> CanonicalWeight:
    """Round-to-nearest quantization of `w`, [N, K] or stacked [E, N, K], to the canonical form, without activation.

    Where `w` is some rows of a weight, `extremes` are the least and the greatest value of the whole: what scales of
    the whole tensor (and NVFP4's global scale) are derived from. Rows then get the codes that they have in the whole,
    as long as they begin where a block of rows does. Raises InvalidSchemeError for schemes without a definition here,
    UsageError where K is not a multiple of the group.
    """
    _check_element(quant, weight_id(quant))
    values = np.asarray(w, dtype=np.float32)
    *lead, n, k = values.shape
    if quant.granularity == "group" and k % quant.group_size:
        raise UsageError(f"{k} columns are not a multiple of the group size {quant.group_size}")
    tensors: dict[str, Array] = {}
    if quant.second_scale == "dual":
        level0 = _dual_scale(values)
        tensors["scale2"] = level0[..., ::DUAL_LEVEL_COLUMNS]
        values = _divide(values, level0)
    global_scale: Float32 | None = None
    if quant.second_scale == "global":
        amax = np.abs(values).max(axis=(-2, -1), keepdims=True)
        if extremes is not None:
            amax = np.full_like(amax, max(abs(extremes[0]), abs(extremes[1])))
        global_scale = nvfp4_global_scale(amax)
        tensors["global_scale"] = np.ascontiguousarray(np.broadcast_to(global_scale, (*lead, n, 1)))
        global_scale = global_scale[..., None]

    tiles, axes = _tile(values, quant, per_matrix=True)
    grid = _fit(tiles, axes, quant, global_scale, extremes if quant.granularity == "tensor" else None)
    code_values = _untile(_round(tiles, grid, quant), quant, values.shape)
    tensors["codes"] = encode(code_values, quant.element, quant.rounding)
    tensors["scale"] = _stored(grid.stored, quant, (*lead, n))
    if grid.zero_point is not None:
        tensors["zero_point"] = _stored(grid.zero_point.astype(np.int16), quant, (*lead, n))
    return CanonicalWeight(Scheme(quant), n, k, tensors)


def _check_element(quant: TensorQuant, text: str) -> None:
    is_known = quant.element in ELEMENT_BITS or float_element(quant.element) is not None
    if not is_known or quant.element in ("bf16", "nf4", "fp4_bnb"):
        raise InvalidSchemeError(text, "the oracle does not define its quantization")


def _stored(per_tile: Array, quant: TensorQuant, rows: tuple[int, ...]) -> Array:
    """A grid's array in the canonical shape of scales. `rows` is (..., N)."""
    if quant.granularity == "group":
        return per_tile[..., 0]
    if quant.granularity == "block":
        return per_tile[..., 0, :, 0]
    per_row = per_tile.astype(np.float32) if per_tile.dtype != np.int16 else per_tile
    return np.ascontiguousarray(np.broadcast_to(per_row, (*rows, 1)))


# --- tiles: views in which everything that shares a scale lies along `axes` -----------------------------------------


def _pad(values: Array, axis: int, multiple: int) -> Array:
    """Zeros appended along `axis` until its size is a multiple: they never change a maximum."""
    missing = -values.shape[axis] % multiple
    if not missing:
        return values
    widths = [(0, 0)] * values.ndim
    widths[axis] = (0, missing)
    return np.pad(values, widths)


def _tile(values: Array, quant: TensorQuant, *, per_matrix: bool) -> tuple[Array, tuple[int, ...]]:
    """`per_matrix`: a tensor scale covers the last two dimensions (a weight) and not all of them (an activation)."""
    if quant.granularity == "tensor":
        return values, (-2, -1) if per_matrix else tuple(range(values.ndim))
    if quant.granularity in ("channel", "token"):
        return values, (-1,)
    if quant.granularity == "group":
        padded = _pad(values, -1, quant.group_size)
        return padded.reshape(*padded.shape[:-1], -1, quant.group_size), (-1,)
    if quant.granularity == "block":
        bn, bk = quant.block
        padded = _pad(_pad(values, -1, bk), -2, bn)
        *lead, n, k = padded.shape
        return padded.reshape(*lead, n // bn, bn, k // bk, bk), (-3, -1)
    raise InvalidSchemeError(quant.granularity, "the oracle does not define its quantization")


def _untile(tiles: Array, quant: TensorQuant, shape: tuple[int, ...]) -> Array:
    """Undoes `_tile`, dropping what it padded."""
    *lead, n, k = (1, *shape) if len(shape) == 1 else shape
    if quant.granularity == "group":
        tiles = tiles.reshape(*lead, n, -1)[..., :k]
    elif quant.granularity == "block":
        padded = (*lead, tiles.shape[-4] * tiles.shape[-3], tiles.shape[-2] * tiles.shape[-1])
        tiles = tiles.reshape(padded)[..., :n, :k]
    return tiles.reshape(shape)


# --- fitting a grid and applying it ---------------------------------------------------------------------------------


def _fit(
    tiles: Array,
    axes: tuple[int, ...],
    quant: TensorQuant,
    global_scale: Array | None,
    extremes: tuple[float, float] | None = None,
) -> Grid:
    high = tiles.max(axis=axes, keepdims=True)
    low = tiles.min(axis=axes, keepdims=True)
    if extremes is not None:
        low, high = np.full_like(low, extremes[0]), np.full_like(high, extremes[1])
    amax = np.maximum(np.abs(low), np.abs(high))
    if quant.scale_format == "e8m0":
        return e8m0_grid(amax, quant)
    if quant.scale_format == "e4m3":
        return nvfp4_grid(amax, quant, np.float32(1) if global_scale is None else global_scale)
    return float_grid(low, high, quant)


def _round(tiles: Array, grid: Grid, quant: TensorQuant) -> Float64:
    """The values of the codes, before any scale: float64 in the tiles' shape."""
    safe = np.where(grid.scale == 0, np.float32(1), grid.scale).astype(grid.scale.dtype)
    if quant.scale_rule == "absmax-reciprocal":
        scaled = tiles * (np.float32(1) / safe if grid.inverse is None else grid.inverse)
    else:
        scaled = tiles / safe
    # values of a group whose scale underflowed to 0 are lost: no code may claim otherwise
    scaled = np.where(grid.scale == 0, np.float32(0), scaled)
    if grid.zero_point is not None:
        scaled = scaled + grid.zero_point
    codes = round_to_element(scaled, quant.element, quant.rounding)
    if quant.is_integer and quant.scale_format == "e8m0":
        # MXINT is symmetric: -2^(bits-1) is not used (auto-round clamps at 1.75 and 1.984375)
        codes = np.maximum(codes, -element_max(quant.element))
    return codes


def _represented(codes: Float64, grid: Grid) -> Float64:
    """What values of codes stand for: float64, same shape."""
    offset = 0.0 if grid.zero_point is None else grid.zero_point.astype(np.float64)
    represented: Float64 = (codes - offset) * grid.scale.astype(np.float64)
    return represented


def _fake(
    values: Array,
    quant: TensorQuant,
    input_global_scale: Array | float | None,
    clip_ratio: Array | float | None = None,
) -> Float64:
    global_scale: Array | None = None
    if quant.second_scale == "global":
        if input_global_scale is None:
            global_scale = nvfp4_global_scale(np.abs(values).max(initial=0))
        else:
            global_scale = _leading(input_global_scale, values.ndim + 1, np.asarray(input_global_scale).dtype)
    tiles, axes = _tile(values, quant, per_matrix=False)
    grid = _fit(tiles, axes, quant, global_scale)
    if clip_ratio is not None:
        if quant.scale_format == "e8m0" or not quant.symmetric or quant.second_scale or grid.inverse is not None:
            raise InvalidSchemeError(activation_id(quant), "has no scale that a clipping ratio multiplies")
        grid = Grid(grid.scale * np.float32(np.asarray(clip_ratio).reshape(())), grid.stored)
    return _untile(_represented(_round(tiles, grid, quant), grid), quant, values.shape)


def _leading(quantity: Array | float, ndim: int, dtype: np.dtype[Any] | type = np.float32) -> Array:
    """A static quantity of the input, one number or one per expert, to broadcast against `ndim` dimensions."""
    numbers = np.asarray(quantity, dtype=dtype).reshape(-1)
    return numbers.reshape(-1, *[1] * (ndim - 1)) if numbers.size > 1 else numbers.reshape(())


def _dual_scale(values: Array) -> Float32:
    """Ascend's level 0: amax over 512 columns times fp32(1/6), f32, repeated per column of `values`.

    0 where it would be subnormal, which makes the elements 0. (The device also rounds x / level0 to the type of x.)
    """
    tiles = _pad(values, -1, DUAL_LEVEL_COLUMNS)
    amax = np.abs(tiles.reshape(*tiles.shape[:-1], -1, DUAL_LEVEL_COLUMNS)).max(axis=-1)
    level0 = np.where(amax * _SIXTH < np.float32(2.0**-126), np.float32(0), amax * _SIXTH).astype(np.float32)
    repeated: Float32 = np.repeat(level0, DUAL_LEVEL_COLUMNS, axis=-1)[..., : values.shape[-1]]
    return repeated


def _divide(values: Array, scale: Array) -> Array:
    """values / scale, and 0 where the scale is 0."""
    return np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)
