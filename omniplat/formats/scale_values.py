"""What values scales may have: finite ones, and 0 only above codes that are all zero. Used by `unpack`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from omniplat.canonical import Array
from omniplat.formats.unpack_codes import StoredModule
from omniplat.scheme import ELEMENT_BITS


def not_finite(role: str, scale: Array) -> str:
    """Which value of a scale is NaN or infinite, and how many are; "" for none. uint8 are e8m0 bytes."""
    bad = scale == 255 if scale.dtype == np.uint8 else ~np.isfinite(scale)
    if not bad.any():
        return ""
    first = [int(i) for i in np.argwhere(bad)[0]]
    what = "the byte 255 (NaN)" if scale.dtype == np.uint8 else str(scale[tuple(first)])
    return f"scale not finite: {role}{first} is {what}, {int(bad.sum())} in all"


def check_finite(m: StoredModule, role: str, scale: Array) -> None:
    """Raises as `m.error` where `not_finite` finds a value."""
    problem = not_finite(role, scale)
    if problem:
        raise m.error(problem)


def check_zero_scales(m: StoredModule, tensors: Mapping[str, Array]) -> None:
    """A scale of 0 is legal for a group whose codes are all zero. e8m0 has no 0: its byte 0 is 2^-127."""
    scale, quant = tensors["scale"], m.quant
    if scale.dtype == np.uint8 or not (zeros := scale == 0).any():
        return
    if quant.granularity == "block":
        zeros = np.repeat(zeros, quant.block[0], axis=-2)[..., : m.n, :]
        column = np.arange(m.k) // quant.block[1]
    elif quant.granularity == "group":
        column = tensors.get("group_index", np.arange(m.k) // quant.group_size)
    else:
        column = np.zeros(m.k, dtype=np.int32)
    for index in zip(*np.nonzero(zeros.any(axis=-1)), strict=True):
        of_row = column[index[0]] if column.ndim == 2 else column
        zero_point = tensors["zero_point"][index][of_row] if "zero_point" in tensors else 0
        wrong = zeros[index][of_row] & _is_nonzero(tensors["codes"][index], quant.element, zero_point)
        if wrong.any():
            at = [int(i) for i in index]
            raise m.error(
                f"scale not finite: the scale of row {at}, column {int(wrong.argmax())} is 0, its code is not"
            )


def _is_nonzero(codes: Array, element: str, zero_point: Array | int) -> Array:
    """Which codes of one row stand for a number other than 0: bool [K]."""
    if ELEMENT_BITS.get(element) == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)
    if element == "nf4":
        return np.asarray(codes != 7)
    if element.startswith(("int", "uint")):
        return np.asarray(codes != zero_point)
    # the sign of a float's zero does not matter
    return np.asarray(codes.view(np.uint8) & np.uint8(2 ** (ELEMENT_BITS[element] - 1) - 1) != 0)
