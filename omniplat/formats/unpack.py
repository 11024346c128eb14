"""canonicalise: the arrays of one checkpoint module, as they are stored, to the canonical form.

Undoes every packing of `storage.PACKINGS` and the conventions in which dialects differ, and checks all shapes on the
way. Weights are only reinterpreted, shifted and masked (in `unpack_codes`): nothing of the size of a weight becomes
floating point. Here is everything beside the codes: scales, zero points, group order, static input scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import ml_dtypes
import numpy as np

from omniplat.canonical import ROLES, TRANSFORM_ROLES, Array, CanonicalWeight
from omniplat.formats.scale_values import check_finite, check_zero_scales
from omniplat.formats.storage import PACKINGS, STORED_ROLES, Storage
from omniplat.formats.unpack_codes import (
    WIDE_FLOATS,
    StoredModule,
    canonical_codes,
    in_plain_order,
    packed_words,
    unpack_columns,
    unpack_stream,
)
from omniplat.formats.unpack_flat import check_codebook, flat_nibbles, nested_scale, shifted_zero
from omniplat.formats.unpack_roles import standardised, with_scale_in_rows
from omniplat.formats.unpack_svdquant import low_rank_pair, residual
from omniplat.scheme import Scheme

#: Columns that share one second-level scale of the dual-level format.
_DUAL_COLUMNS = 512


def canonicalise(
    arrays: Mapping[str, Array],
    storage: Storage,
    scheme: Scheme,
    out_features: int,
    in_features: int,
    *,
    file: str = "",
    module: str = "",
) -> CanonicalWeight:
    """The canonical weight of one checkpoint module.

    `arrays` maps canonical role names (and `storage.STORED_ROLES`) to arrays exactly as stored: BF16 and
    F8 as their ml_dtypes types, F8_E8M0 as uint8 or ml_dtypes' type. Packings `plain` and `nibbles_k` may have a
    leading E on every array. Arrays are returned as views of the given ones where nothing has to be changed.

    Scales of a row or a tensor become f32 [N, 1]; scales of groups and blocks keep their stored dtype. Static input
    scales are kept where the scheme's activation uses them. Raises InvalidCheckpointError with needed and found
    shapes; its problem starts with "scale not finite" where a scale is NaN or Inf, or is 0 for codes that are not.
    """
    m = StoredModule(arrays, storage, scheme, out_features, in_features, file, module)
    if storage.packing not in PACKINGS:
        raise m.error(f"packing {storage.packing!r} is none of {', '.join(PACKINGS)}")
    for role in arrays:
        if role not in ROLES and role not in STORED_ROLES:
            raise m.error(f"no tensor of a weight is called {role!r}")
    quant = m.quant
    if storage.packing in ("svdquant_rows", "svdquant_tiles"):
        return _with_low_rank_pair(m)
    if storage.packing == "gguf":
        return _kept_as_blocks(m)
    m = standardised(m)
    arrays = m.arrays
    if quant.granularity == "group" and in_features % quant.group_size:
        raise m.error(f"{in_features} columns are not a multiple of the group size {quant.group_size}")

    codes, lead = _codes(m)
    tensors: dict[str, Array] = {"codes": codes}
    if quant.element != "bf16":
        tensors["scale"] = _scale(m, lead)
        zero_point = _zero_point(m, lead)
        if zero_point is not None:
            tensors["zero_point"] = zero_point
        check_zero_scales(m, tensors)
        group_index = _group_index(m, lead)
        if group_index is not None:
            tensors["group_index"] = group_index
    for role, wanted in (("global_scale", quant.second_scale == "global"), ("scale2", quant.second_scale == "dual")):
        if wanted:
            tensors[role] = _global_scale(m, lead) if role == "global_scale" else _scale2(m, lead)
        elif role in arrays:
            raise m.error(f"there is a {role}, which {scheme.weight_id} does not have")
    if scheme.pre_scale:
        tensors["pre_scale"] = _vector_f32(m, "pre_scale", in_features, lead)
    elif "pre_scale" in arrays:
        raise m.error(f"there is a pre_scale, but the scheme {scheme.id} has none: the output would be wrong")
    tensors.update(_transform_roles(m))
    tensors.update(_input_roles(m, lead))
    if "bias" in arrays:
        bias = arrays["bias"]
        if bias.shape != (*lead, out_features):
            raise m.shape_error("bias", [*lead, out_features], bias.shape)
        tensors["bias"] = bias
    if quant.element in ("nf4", "fp4_bnb"):
        check_codebook(m)
    elif "codebook" in arrays:
        tensors["codebook"] = arrays["codebook"]
    tensors.update({r: arrays[r] for r in ("low_rank_down", "low_rank_up") if r in arrays})
    return CanonicalWeight(scheme, out_features, in_features, tensors)


def canonical_scale(
    stored: Array, storage: Storage, scheme: Scheme, out_features: int, in_features: int, module: str = ""
) -> Array:
    """The scale alone, as `canonicalise` gives it, of a module without leading dimensions."""
    m = StoredModule({"scale": stored}, storage, scheme, out_features, in_features, "", module)
    return _scale(with_scale_in_rows(m), ())


def _with_low_rank_pair(m: StoredModule) -> CanonicalWeight:
    inner = residual(m)
    weight = canonicalise(inner.arrays, inner.storage, inner.scheme, m.n, m.k, file=m.file, module=m.name)
    return CanonicalWeight(m.scheme, m.n, m.k, {**weight.tensors, **low_rank_pair(m)})


def _kept_as_blocks(m: StoredModule) -> CanonicalWeight:
    """GGUF: uint8 [N, bytes of a row]. Scales are part of the blocks, and the reader library defines their values."""
    codes = m.get("codes")
    if codes.dtype != np.uint8 or codes.ndim != 2 or codes.shape[0] != m.n:
        raise m.shape_error("codes", [m.n, "bytes of a row"], codes.shape)
    tensors = {"codes": codes}
    if "bias" in m.arrays:
        tensors["bias"] = m.arrays["bias"]
    return CanonicalWeight(m.scheme, m.n, m.k, tensors)


def _codes(m: StoredModule) -> tuple[Array, tuple[int, ...]]:
    if m.storage.packing == "nibbles_flat":
        return flat_nibbles(m, m.get("codes")), ()
    return canonical_codes(m)


# --- scales and zero points ------------------------------------------------------------------------------------


def _per_row(m: StoredModule, array: Array, lead: tuple[int, ...], role: str) -> Array:
    """A scalar, [N] or [N, 1] (each with a leading E) to [N, 1]; scalars are repeated per row."""
    experts = int(np.prod(lead))
    if array.size == experts and m.quant.granularity != "channel" and (not lead or array.shape[0] == experts):
        return np.ascontiguousarray(np.broadcast_to(array.reshape(*lead, 1, 1), (*lead, m.n, 1)))
    if array.shape in ((*lead, m.n), (*lead, m.n, 1)):
        return array.reshape(*lead, m.n, 1)
    needed = f"{[*lead, m.n, 1]}" if m.quant.granularity == "channel" else f"{list(lead)} or {[*lead, 1]}"
    raise m.shape_error(role, needed, array.shape)


def _per_group(m: StoredModule, array: Array, lead: tuple[int, ...], role: str) -> Array:
    """[N, G], or [N, G, 1], or transposed [G, N], to [N, G]."""
    needed = (*lead, m.n, m.groups)
    if m.is_transposed:
        if array.shape != (m.groups, m.n):
            raise m.shape_error(role, [m.groups, m.n], array.shape)
        return np.ascontiguousarray(array.T)
    if array.shape == (*needed, 1):
        return array[..., 0]
    if array.shape != needed:
        raise m.shape_error(role, list(needed), array.shape)
    return array


def _as_scale(m: StoredModule, role: str, array: Array) -> Array:
    """Checks that the dtype is what the scheme calls the scale's format; e8m0 becomes uint8."""
    if array.dtype == ml_dtypes.float8_e8m0fnu:
        array = array.view(np.uint8)
    wanted = m.quant.scale_format
    is_float = array.dtype in WIDE_FLOATS or array.dtype == np.float64
    fits = {"e8m0": array.dtype == np.uint8, "e4m3": array.dtype == ml_dtypes.float8_e4m3fn}.get(wanted, is_float)
    if not fits:
        raise m.error(f"{role} is stored as {array.dtype}, needed {wanted} for {m.scheme.weight_id}")
    return array


def _scale(m: StoredModule, lead: tuple[int, ...]) -> Array:
    quant = m.quant
    if m.storage.packing == "nibbles_flat":
        scale = nested_scale(m, m.get("scale"))
        check_finite(m, "scale", scale)
        return scale
    scale = _as_scale(m, "scale", m.get("scale"))
    if quant.element == "int8_bnb":
        # the file holds the largest magnitude of each row, of which a code is a 127th
        scale = scale.astype(np.float32) / np.float32(127)
    if quant.granularity == "group":
        scale = _per_group(m, scale, lead, "scale")
    elif quant.granularity == "block":
        shape = (*lead, -(-m.n // quant.block[0]), -(-m.k // quant.block[1]))
        if scale.ndim == len(shape) + 2 and scale.shape[-1] == scale.shape[-3] == 1:
            # modelopt keeps the axes of the reduction: [nb, 1, kb, 1]
            scale = scale[..., 0, :, 0]
        if shape == (1, 1) and scale.size == 1:
            # modelopt squeezes the scale of a single tile to a scalar
            scale = scale.reshape(shape)
        if scale.shape != shape:
            raise m.shape_error("scale", list(shape), scale.shape)
    else:
        if m.is_transposed and scale.ndim == 2:
            scale = scale.T
        scale = _per_row(m, scale.astype(np.float32), lead, "scale")
    check_finite(m, "scale", scale)
    return scale


def _zero_point(m: StoredModule, lead: tuple[int, ...]) -> Array | None:
    """int16 (f32 where fractional) [N, 1 | G], or None where the scheme is symmetric."""
    quant, packing, stored = m.quant, m.storage.packing, m.arrays.get("zero_point")
    symmetric = quant.symmetric and not quant.element.startswith("uint")
    if stored is None:
        if symmetric:
            return None
        raise m.error(f"tensor for zero_point is missing, which {m.scheme.id} needs")
    neutral = 0
    if packing == "nibbles_k_shifted":
        return shifted_zero(m, stored, _per_group(m, m.get("scale"), lead, "scale"))
    if packing in ("awq", "int32_n"):
        stored = stored.reshape(1, -1) if stored.ndim == 1 else stored
        _expect(m, "zero_point", stored, (m.groups, m.n // 8), np.int32)
        zero = unpack_columns(stored, packing)
    elif packing == "gptq":
        _expect(m, "zero_point", stored, (m.groups, packed_words(m.n, quant.bits)), np.int32)
        zero = unpack_stream(stored, quant.bits, m.n).T
    elif packing in ("int32_k", "awq_k") and stored.dtype == np.int32 and stored.ndim:
        stored = in_plain_order(stored) if packing == "awq_k" else stored
        stored = stored.reshape(-1, 1) if stored.ndim == 1 else stored
        _expect(m, "zero_point", stored, (packed_words(m.n, quant.bits), m.groups), np.int32)
        zero = unpack_stream(stored.T, quant.bits, m.n).T
    elif quant.granularity == "group":
        zero = _per_group(m, stored, lead, "zero_point")
    elif quant.granularity == "block":
        zero = stored
    else:
        zero = _per_row(m, stored, lead, "zero_point")
    if packing in ("int32_k", "gptq", "awq", "awq_k", "int32_n") and zero.dtype == np.uint8:
        # a GPTQ v1 zero point was stored as zero - 1 modulo 2^bits, so adding the 1 back wraps as well
        zero = (zero.astype(np.int16) + m.storage.zero_offset) & (2**quant.bits - 1)
        neutral = 0 if m.storage.twos_complement else 2 ** (quant.bits - 1)
    elif m.storage.zero_offset:
        zero = zero + m.storage.zero_offset
    if symmetric:
        if (zero.astype(np.float32) != neutral).any():
            raise m.error(
                f"the file declares symmetric {quant.element}, but zero points differ from {neutral}: "
                f"they run from {zero.min()} to {zero.max()}"
            )
        return None
    wide: Array = zero.astype(np.float32 if zero.dtype in WIDE_FLOATS else np.int16)
    signed = m.get("codes").dtype == np.int8 if packing == "plain" else packing == "int32_k" and zero.dtype == np.int8
    if quant.element.startswith("uint") and signed:
        # the codes of a signed container were shifted to unsigned, so their zero point is as well
        wide = wide + wide.dtype.type(2 ** (quant.bits - 1))
    return wide


def _global_scale(m: StoredModule, lead: tuple[int, ...]) -> Array:
    """f32 [N, 1], a multiplier."""
    stored = m.get("global_scale").astype(np.float32)
    experts = int(np.prod(lead))
    if stored.size == experts and (not lead or stored.shape[0] == experts):
        stored = np.broadcast_to(stored.reshape(*lead, 1, 1), (*lead, m.n, 1))
    elif stored.shape != (*lead, m.n, 1):
        raise m.shape_error("global_scale", f"{list(lead)} or {[*lead, 1]}", stored.shape)
    return _multiplier(m, "global_scale", stored)


def _multiplier(m: StoredModule, role: str, stored: Array) -> Array:
    """A stored global scale, f32, as a multiplier: f64 for a divisor. It can be neither 0, NaN nor Inf."""
    if not np.isfinite(stored).all() or (stored == 0).any():
        raise m.error(f"scale not finite: {role} is {float(stored.reshape(-1)[0])}")
    if m.storage.global_is_divisor:
        # In f32 the reciprocal would not lead back to the divisor that the producer divides by.
        return np.reciprocal(stored.astype(np.float64))
    return np.ascontiguousarray(stored)


def _scale2(m: StoredModule, lead: tuple[int, ...]) -> Array:
    shape = (*lead, m.n, -(-m.k // _DUAL_COLUMNS))
    stored = m.get("scale2")
    if stored.shape not in (shape, (*shape, 1)):
        raise m.shape_error("scale2", list(shape), stored.shape)
    scale2 = stored.reshape(shape).astype(np.float32)
    check_finite(m, "scale2", scale2)
    return scale2


def _input_roles(m: StoredModule, lead: tuple[int, ...]) -> dict[str, Array]:
    """The static quantities of the input that the scheme's activation uses: f32 or int32 [1], stacked [E, 1].

    Others are left out: a leftover of calibration must not keep parts from being fused.
    """
    activation, roles = m.scheme.activation, {}
    shape = (*lead, 1)

    def scalar(role: str) -> Array:
        stored = m.get(role)
        if stored.size != int(np.prod(lead)):
            raise m.shape_error(role, list(shape), stored.shape)
        return stored.reshape(shape)

    if activation is None:
        return {}
    if activation.second_scale == "global" and "input_global_scale" in m.arrays:
        stored = scalar("input_global_scale").astype(np.float32)
        roles["input_global_scale"] = _multiplier(m, "input_global_scale", stored)
    elif not activation.dynamic:
        roles["input_scale"] = scalar("input_scale").astype(np.float32)
        if not np.isfinite(roles["input_scale"]).all() or (roles["input_scale"] == 0).any():
            raise m.error(f"scale not finite: input_scale is {float(roles['input_scale'].reshape(-1)[0])}")
        if not activation.symmetric:
            roles["input_zero_point"] = scalar("input_zero_point").astype(np.int32)
        elif "input_zero_point" in m.arrays and (m.arrays["input_zero_point"].astype(np.float32) != 0).any():
            raise m.error("the file declares a symmetric input, but its zero point is not 0")
    return roles


def _vector_f32(m: StoredModule, role: str, size: int, lead: tuple[int, ...]) -> Array:
    stored = m.get(role)
    if stored.shape not in ((*lead, size), (*lead, 1, size), (*lead, size, 1)):
        raise m.shape_error(role, [*lead, size], stored.shape)
    vector = stored.reshape(*lead, size).astype(np.float32)
    check_finite(m, role, vector)
    return vector


def _transform_roles(m: StoredModule) -> dict[str, Array]:
    """What transforms the input, in f32, where the scheme says so."""
    scheme = m.scheme
    if not scheme.is_transformed:
        if present := [role for role in TRANSFORM_ROLES if role in m.arrays]:
            raise m.error(f"there is a {present[0]}, but the scheme {scheme.id} has none: the output would be wrong")
        return {}
    left, right = scheme.transform
    roles = {}
    for role, shape in zip(TRANSFORM_ROLES, ((left, left), (right, right), (1,)), strict=True):
        stored = m.get(role)
        if stored.size != prod(shape):
            raise m.shape_error(role, list(shape), stored.shape)
        roles[role] = stored.reshape(shape).astype(np.float32)
        check_finite(m, role, roles[role])
    if not 0 < float(roles["clip_ratio"][0]) <= 1:
        raise m.error(f"clip_ratio is {float(roles['clip_ratio'][0])}, needed more than 0 and at most 1")
    return roles


def _expect(m: StoredModule, role: str, array: Array, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    if array.dtype != dtype:
        raise m.error(f"{role} is stored as {array.dtype}, needed {np.dtype(dtype)}")
    if array.shape != shape:
        raise m.shape_error(role, list(shape), array.shape)


def _group_index(m: StoredModule, lead: tuple[int, ...]) -> Array | None:
    """int32 [K], or None where it says no more than k // group_size."""
    stored = m.arrays.get("group_index")
    if stored is None:
        return None
    if stored.shape != (*lead, m.k):
        raise m.shape_error("group_index", [*lead, m.k], stored.shape)
    index = stored.astype(np.int32)
    if index.size and (int(index.min()) < 0 or int(index.max()) >= m.groups):
        raise m.error(f"group_index runs from {index.min()} to {index.max()}, but there are {m.groups} groups")
    plain = np.arange(m.k, dtype=np.int32) // m.quant.group_size if m.groups > 1 else np.zeros(m.k, dtype=np.int32)
    return None if (index == plain).all() else index
