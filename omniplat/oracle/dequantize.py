"""dequantize: what a canonical weight means, in float64."""

from __future__ import annotations

import numpy as np

from omniplat.canonical import Array, CanonicalWeight
from omniplat.errors import BackendNotInstalledError, InvalidSchemeError
from omniplat.oracle.codecs import Float64, decode_codes, e8m0_to_float64
from omniplat.scheme import ELEMENT_BITS, Scheme, TensorQuant, low_rank_base, weight_id

#: Columns that share one `scale2`.
DUAL_LEVEL_COLUMNS = 512


def scale_values(scale: Array, quant: TensorQuant) -> Float64:
    """Stored scales as float64 multipliers. e8m0 bytes are decoded, everything else is a number already."""
    if quant.scale_format == "e8m0":
        return e8m0_to_float64(scale)
    return scale.astype(np.float64)


def expand_columns(per_group: Float64, group_size: int, in_features: int, group_index: Array | None = None) -> Float64:
    """[..., N, G] to [..., N, K]: column k gets the entry of its group, k // group_size or `group_index[k]`."""
    if group_index is None:
        group_index = np.arange(in_features) // group_size
    if group_index.ndim == 1:
        return per_group[..., group_index]
    # stacked experts, each with its own order: [E, N, G] by [E, K]
    return np.take_along_axis(per_group, group_index[:, None, :], axis=-1)


def expand_blocks(per_block: Float64, block: tuple[int, int], out_features: int, in_features: int) -> Float64:
    """[..., ceil(N/bn), ceil(K/bk)] to [..., N, K]; the last block of a side may be partial."""
    rows = np.arange(out_features) // block[0]
    columns = np.arange(in_features) // block[1]
    return per_block[..., rows[:, None], columns[None, :]]


def dequantize(weight: CanonicalWeight) -> Float64:
    """The weight as float64 [N, K], or [E, N, K] where it is stacked.

    w = (code - zero_point) * scale * global_scale * scale2, with the factors that the scheme has. MXINT codes count
    in units of 2^-(bits - 2), so that a group's scale means the same as for the float elements (values below 2).
    `pre_scale` is not applied: it multiplies the activation. SVDQuant's low-rank pair, which sees the input without
    it, is divided by it: the weight is that of the unquantized layer either way. GGUF blocks are decoded by GGUF's
    own library. Raises InvalidSchemeError for schemes without a definition here, BackendNotInstalledError for GGUF
    without its library.
    """
    quant = weight.scheme.weight
    tensors = weight.tensors
    in_features = weight.in_features
    if low_rank_base(quant) is not None:
        return _with_low_rank_pair(weight)
    if quant.element.startswith("gguf_"):
        return _gguf_values(tensors["codes"], quant)
    element = "int8" if quant.element == "int8_bnb" else quant.element
    if element not in ELEMENT_BITS:
        raise InvalidSchemeError(weight_id(quant), "the oracle has no definition of this element")
    values = decode_codes(tensors["codes"], element, in_features, tensors.get("codebook"))
    if element == "bf16":
        return values
    if quant.is_integer and quant.scale_format == "e8m0":
        values = values * 2.0 ** -(quant.bits - 2)

    group_index = tensors.get("group_index")
    scale = scale_values(tensors["scale"], quant)
    if quant.granularity == "block":
        factor = expand_blocks(scale, quant.block, weight.out_features, in_features)
    elif quant.granularity == "group":
        factor = expand_columns(scale, quant.group_size, in_features, group_index)
    else:
        factor = scale
    zero_point = tensors.get("zero_point")
    if zero_point is not None:
        zero = zero_point.astype(np.float64)
        if quant.granularity == "group":
            zero = expand_columns(zero, quant.group_size, in_features, group_index)
        values = values - zero
    values = values * factor
    if "global_scale" in tensors:
        values = values * tensors["global_scale"].astype(np.float64)
    if "scale2" in tensors:
        values = values * expand_columns(tensors["scale2"].astype(np.float64), DUAL_LEVEL_COLUMNS, in_features)
    return values


def residual(weight: CanonicalWeight) -> CanonicalWeight:
    """What SVDQuant's low-rank pair leaves, as a weight of a plain scheme without activation."""
    base = low_rank_base(weight.scheme.weight)
    if base is None:
        raise InvalidSchemeError(weight.scheme.weight_id, "has no low-rank pair")
    scheme = Scheme(base, None, weight.scheme.pre_scale)
    return CanonicalWeight(scheme, weight.out_features, weight.in_features, weight.tensors)


def _with_low_rank_pair(weight: CanonicalWeight) -> Float64:
    down, up = (weight.tensors[role].astype(np.float64) for role in ("low_rank_down", "low_rank_up"))
    pair = up @ np.swapaxes(down, -1, -2)
    if "pre_scale" in weight.tensors:
        pair = pair / weight.tensors["pre_scale"].astype(np.float64)
    return dequantize(residual(weight)) + pair


def _gguf_values(codes: Array, quant: TensorQuant) -> Float64:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as decode
    except ImportError as exc:
        raise BackendNotInstalledError(
            "gguf", "the library gguf", 'pip install "omniplat[gguf]"', kind="format"
        ) from exc
    name = quant.element.removeprefix("gguf_").upper()
    try:
        values = decode(np.ascontiguousarray(codes), GGMLQuantizationType[name])
    except (KeyError, NotImplementedError, ValueError) as exc:
        raise InvalidSchemeError(weight_id(quant), "its library does not decode these blocks") from exc
    return np.asarray(values, dtype=np.float64)
