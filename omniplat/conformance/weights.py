"""Random weights in canonical form, for every scheme of the catalog. NumPy only.

Codes are drawn uniformly from all codes of the element and scales from their own format, so that no quantizer has to
exist for a scheme and every code is seen. `exact` weights hold small numbers whose sums are representable.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import ml_dtypes
import numpy as np

from omniplat.canonical import Array, CanonicalWeight
from omniplat.legality import column_units
from omniplat.oracle import element_max, encode, pack_nibbles
from omniplat.oracle.codecs import E8M0_BIAS, code_range
from omniplat.oracle.dequantize import DUAL_LEVEL_COLUMNS
from omniplat.scheme import Scheme, TensorQuant, low_rank_base

#: Rank of SVDQuant's pair.
_RANK = 4
_FLOATS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def columns_unit(*schemes: Scheme) -> int:
    """Every K of such weights is a multiple of this: whole groups, and pairs of nibbles."""
    units = [2]
    for scheme in schemes:
        units += [unit for unit, what in column_units(scheme) if not what.endswith("block") or _is_gguf(scheme)]
    return lcm(*units)


def _is_gguf(scheme: Scheme) -> bool:
    return scheme.weight.element.startswith("gguf_")


def random_weight(
    scheme: Scheme, rows: int, columns: int, rng: np.random.Generator, *, bias: bool = False, stored: str = "bf16"
) -> CanonicalWeight:
    """A weight with random codes and scales; `stored` is the dtype of an unquantized one."""
    quant = scheme.weight
    if _is_gguf(scheme):
        tensors: dict[str, Array] = {"codes": _gguf_blocks(quant, rows, columns, rng)}
    else:
        base = low_rank_base(quant) or quant
        tensors = _plain(base, rows, columns, rng, stored)
        if base is not quant:
            tensors["low_rank_down"] = _normal(rng, (columns, _RANK)) / np.float32(16)
            tensors["low_rank_up"] = _normal(rng, (rows, _RANK)) / np.float32(16)
            scheme = replace(scheme, pre_scale=True)
    if scheme.pre_scale:
        tensors["pre_scale"] = np.exp2(rng.integers(-2, 3, columns)).astype(np.float32)
    tensors |= static_input(scheme.activation)
    if bias:
        tensors["bias"] = rng.standard_normal(rows).astype(_FLOATS[stored])
    return CanonicalWeight(scheme, rows, columns, tensors)


def exact_weight(
    scheme: Scheme, rows: int, columns: int, rng: np.random.Generator, *, bias: bool = False
) -> CanonicalWeight:
    """A weight of a few small integers in every row, the last column always among them; scales are powers of two.

    The dequantized values are integers of at most 4 (for codes of 2 bits, 1), and so is the bias.
    """
    limit = int(min(4, element_max(scheme.weight.element) if scheme.weight.element != "bf16" else 4))
    values = np.zeros((rows, columns))
    for row in range(rows):
        at = rng.choice(columns, size=min(6, columns), replace=False)
        values[row, at] = rng.integers(1, limit + 1, at.size) * rng.choice((-1, 1), at.size)
        values[row, columns - 1 - row % min(4, columns)] = limit
    weight = _encoded(scheme, values)
    tensors = dict(weight.tensors) | static_input(scheme.activation)
    if bias:
        tensors["bias"] = rng.integers(-4, 5, rows).astype(ml_dtypes.bfloat16)
    return replace(weight, tensors=tensors)


def full_weight(scheme: Scheme, rows: int, columns: int, rng: np.random.Generator, *, bias: bool) -> CanonicalWeight:
    """A weight of integers of at most 4 in every column: sums are integers that f32 holds and shorter floats do not."""
    limit = int(min(4, element_max(scheme.weight.element) if scheme.weight.element != "bf16" else 4))
    weight = _encoded(scheme, rng.integers(-limit, limit + 1, (rows, columns)).astype(np.float64))
    tensors = dict(weight.tensors) | static_input(scheme.activation)
    if bias:
        tensors["bias"] = rng.integers(-64, 65, rows).astype(ml_dtypes.bfloat16)
    return replace(weight, tensors=tensors)


def picking_weight(scheme: Scheme, columns: Array, width: int) -> CanonicalWeight:
    """A weight [N, width] whose row n is 1 in column `columns[n]` and 0 elsewhere: what comes out is what a kernel
    makes of its input. For schemes that `has_exact`."""
    weight = _encoded(scheme, _picking(columns, width))
    return replace(weight, tensors={**weight.tensors, **static_input(scheme.activation)})


def gated_weight(scheme: Scheme, gate: Array, columns: Array, width: int) -> CanonicalWeight:
    """An expert's first weight [2I, width]: rows of gate that add the columns `gate` up, then rows of up that pick one
    of `columns` each."""
    gates = np.zeros((len(columns), width))
    gates[:, gate] = 1
    return _encoded(scheme, np.concatenate([gates, _picking(columns, width)]))


def _picking(columns: Array, width: int) -> Array:
    values: Array = np.zeros((len(columns), width))
    values[np.arange(len(columns)), columns] = 1
    return values


def has_exact(scheme: Scheme) -> bool:
    """True where `exact_weight` can write the scheme."""
    quant = scheme.weight
    if quant.element in ("nf4", "fp4_bnb", "int8_bnb") or quant.granularity == "opaque" or low_rank_base(quant):
        return False
    return not _is_gguf(scheme)


def zeroed_columns(weight: CanonicalWeight, keep: Array) -> CanonicalWeight:
    """The weight with code 0, which means 0, in every column that `keep` [K] is False for.

    For symmetric schemes of one code a value only: the others have no code that is always 0.
    """
    codes = np.array(weight.tensors["codes"])
    if codes.shape[-1] * 2 == weight.in_features:
        mask = np.where(keep, 15, 0).astype(np.uint8)
        codes &= pack_nibbles(mask)
    else:
        codes[:, ~keep] = np.zeros((), codes.dtype)
    return replace(weight, tensors={**weight.tensors, "codes": codes})


def stack(weights: list[CanonicalWeight]) -> CanonicalWeight:
    """Experts' weights with a leading E."""
    first = weights[0]
    tensors = {role: np.stack([weight.tensors[role] for weight in weights]) for role in first.tensors}
    return replace(first, tensors=tensors)


def static_input(quant: TensorQuant | None) -> dict[str, Array]:
    """The input scales of a static activation: a power of two, and a zero point where it has one."""
    if quant is None or quant.dynamic or quant.granularity == "group":
        return {}
    top = 4.0 / element_max(quant.element)
    tensors: dict[str, Array] = {"input_scale": np.array([2.0 ** np.ceil(np.log2(top))], np.float32)}
    if not quant.symmetric:
        tensors["input_zero_point"] = np.array([-5], np.int32)
    return tensors


# --- pieces ------------------------------------------------------------------------------------------------------


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """f32 values that bf16 holds."""
    values: Array = rng.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32)
    return values


def _plain(quant: TensorQuant, rows: int, columns: int, rng: np.random.Generator, stored: str) -> dict[str, Array]:
    if quant.element == "bf16":
        return {"codes": (_normal(rng, (rows, columns)) / np.float32(16)).astype(_FLOATS[stored])}
    shape = _scale_shape(quant, rows, columns)
    tensors = {"codes": _random_codes(quant, rows, columns, rng), "scale": _random_scales(quant, shape, rng)}
    if quant.granularity == "tensor":
        tensors["scale"] = np.repeat(tensors["scale"][:1], rows, axis=0)
    if not quant.symmetric:
        low, high = code_range(quant.element)
        where = shape if quant.granularity == "group" else (rows, 1)
        zeros = rng.integers(low, high + 1, where if quant.granularity != "tensor" else (1, 1))
        tensors["zero_point"] = np.broadcast_to(zeros, where).astype(np.int16)
    if quant.second_scale == "global":
        tensors["global_scale"] = np.full((rows, 1), 2.0**-9 * 1.25, np.float32)
    if quant.second_scale == "dual":
        tensors["scale2"] = rng.uniform(0.5, 1.5, (rows, -(-columns // DUAL_LEVEL_COLUMNS))).astype(np.float32)
    return tensors


def _scale_shape(quant: TensorQuant, rows: int, columns: int) -> tuple[int, int]:
    if quant.granularity == "group":
        return rows, columns // quant.group_size
    if quant.granularity == "block":
        return -(-rows // quant.block[0]), -(-columns // quant.block[1])
    return rows, 1


def _random_codes(quant: TensorQuant, rows: int, columns: int, rng: np.random.Generator) -> Array:
    element = quant.element
    if element in ("fp8_e4m3", "fp8_e5m2"):
        first_nan = 0x7F if element == "fp8_e4m3" else 0x7C
        codes = rng.integers(0, first_nan, (rows, columns), dtype=np.uint8)
        codes |= rng.integers(0, 2, codes.shape, dtype=np.uint8) << np.uint8(7)
        return codes.view(ml_dtypes.float8_e4m3fn if element == "fp8_e4m3" else ml_dtypes.float8_e5m2)
    if element == "int8_bnb":
        return rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    if quant.bits == 4:
        return rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    if quant.is_integer:
        low, high = code_range(element)
        values = rng.integers(low, high + 1, (rows, columns))
        return values.astype(np.int8) if element == "int8" else values.astype(np.int16).astype(np.uint8)
    return rng.integers(0, 2**quant.bits, (rows, columns), dtype=np.uint8)


def _random_scales(quant: TensorQuant, shape: tuple[int, int], rng: np.random.Generator) -> Array:
    """Scales that put the largest code between 1/8 and 1/2, over two binades."""
    top = 127.0 if quant.element == "int8_bnb" else element_max(quant.element)
    if quant.scale_format == "e8m0":
        if quant.is_integer:
            top = 2.0
        middle = E8M0_BIAS - 2 - int(np.floor(np.log2(top)))
        return rng.integers(middle - 1, middle + 1, shape).astype(np.uint8)
    if quant.scale_format == "e4m3":
        return rng.uniform(8, 32, shape).astype(ml_dtypes.float8_e4m3fn)
    scales = np.exp2(rng.uniform(-3, -1, shape)) / top
    formats = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
    return scales.astype(formats[quant.scale_format])


def _encoded(scheme: Scheme, values: Array) -> CanonicalWeight:
    """Integers as codes, with scales (or their product) of 1 per unit of the code."""
    quant, (rows, columns) = scheme.weight, values.shape
    if quant.element == "bf16":
        return CanonicalWeight(scheme, rows, columns, {"codes": values.astype(ml_dtypes.bfloat16)})
    shape = _scale_shape(quant, rows, columns)
    tensors: dict[str, Array] = {}
    if quant.scale_format == "e8m0" and quant.is_integer:
        # MXINT counts in units of 2^-(bits - 2).
        tensors["scale"] = np.full(shape, E8M0_BIAS + quant.bits - 2, np.uint8)
    elif quant.scale_format == "e8m0":
        tensors["scale"] = np.full(shape, E8M0_BIAS, np.uint8)
    elif quant.scale_format == "e4m3":
        tensors["scale"] = np.full(shape, 4.0, ml_dtypes.float8_e4m3fn)
    else:
        formats = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
        tensors["scale"] = np.ones(shape, formats[quant.scale_format])
    if quant.second_scale == "global":
        tensors["global_scale"] = np.full((rows, 1), 0.25, np.float32)
    if quant.second_scale == "dual":
        tensors["scale2"] = np.ones((rows, -(-columns // DUAL_LEVEL_COLUMNS)), np.float32)
    codes = values
    if not quant.symmetric:
        low, high = code_range(quant.element)
        zero = (low + high + 1) // 2
        codes = np.clip(codes, low - zero, high - zero) + zero
        where = shape if quant.granularity == "group" else (rows, 1)
        tensors["zero_point"] = np.full(where, zero, np.int16)
    tensors["codes"] = encode(codes, quant.element)
    return CanonicalWeight(scheme, rows, columns, tensors)


def _gguf_blocks(quant: TensorQuant, rows: int, columns: int, rng: np.random.Generator) -> Array:
    """Random blocks whose values are finite and neither huge nor tiny, uint8 [N, bytes of a row]."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[quant.element.removeprefix("gguf_").upper()]
    values, nbytes = GGML_QUANT_SIZES[kind]
    wanted = rows * columns // values
    held: list[Array] = []
    count = 0
    while count < wanted:
        blocks = rng.integers(0, 256, (max(wanted, 64) * 4, nbytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(dequantize(blocks, kind)).max(axis=1)
        good = blocks[np.isfinite(largest) & (largest > 2.0**-6) & (largest < 2.0**6)]
        held.append(good)
        count += len(good)
    return np.concatenate(held)[:wanted].reshape(rows, -1)
