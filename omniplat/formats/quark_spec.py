"""Quark's specification of one tensor's quantization, as a TensorQuant."""

from __future__ import annotations

from dataclasses import replace

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.metadata import Fields
from omniplat.scheme import TensorQuant, parse_weight_id

_ELEMENTS = {
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "fp4": "fp4_e2m1",
    "fp4_e2m1": "fp4_e2m1",
    "fp6_e2m3": "fp6_e2m3",
    "fp6_e3m2": "fp6_e3m2",
    **{f"int{bits}": f"int{bits}" for bits in (2, 3, 4, 8)},
    **{f"uint{bits}": f"uint{bits}" for bits in (4, 8)},
}
_MX = {
    "fp8_e4m3": "mxfp8",
    "fp8_e5m2": "mxfp8e5m2",
    "fp6_e2m3": "mxfp6e2m3",
    "fp6_e3m2": "mxfp6e3m2",
    "fp4_e2m1": "mxfp4",
}
#: scale_calculation_mode -> the oracle's rule for powers of two; Quark's default is even.
_MX_RULES = {"": "even", "even": "even", "floor": "floor", "ceil": "ceil"}
_ROUNDINGS = {"": "nearest-even", "half_even": "nearest-even"}


def quantity(holder: Fields, name: str, *, at_run_time: bool = False) -> TensorQuant | None:
    """The specification under `name` (`weight`, `input_tensors`); None where it is null.

    A list of two is NVFP4: fp4 groups of 16, whose scales have a scale of their own. Raises InvalidCheckpointError
    for wrong types and UnsupportedOptionError for what has no scheme here.
    """
    value = holder.values.get(name)
    if value is None:
        return None
    key = holder.path(name)
    if isinstance(value, list):
        parts = [Fields(holder.file, f"{key}[{i}]", item) for i, item in enumerate(value) if isinstance(item, dict)]
        if len(parts) != len(value) or not parts:
            raise holder.wrong(name, "an object or a list of objects")
        if len(parts) == 1:
            return _single(parts[0], at_run_time)
        return _nvfp4(parts, at_run_time)
    fields = holder.child(name)
    assert fields is not None
    return _single(fields, at_run_time)


def _nvfp4(parts: list[Fields], at_run_time: bool) -> TensorQuant:
    first, second = parts[0], parts[1]
    groups = first.string("dtype") in ("fp4", "fp4_e2m1") and first.integer("group_size", 0) == 16
    if len(parts) != 2 or not groups or not second.boolean("is_scale_quant", False):
        raise UnsupportedOptionError(
            "two stages are understood for NVFP4 only: fp4 in groups of 16, then the scales",
            file=first.file,
            key=first.key,
        )
    quant = parse_weight_id("nvfp4")
    return replace(quant, dynamic=True, scale_rule="absmax", rounding="nearest-even") if at_run_time else quant


def _single(fields: Fields, at_run_time: bool) -> TensorQuant:
    dtype = fields.string("dtype").lower()
    if dtype == "mx":
        dtype = fields.string("mx_element_dtype").lower()
    element = _ELEMENTS.get(dtype)
    if element is None:
        raise _unsupported(fields, "dtype", dtype)
    qscheme = fields.string("qscheme").lower()
    quant = _microscaled(fields, element, qscheme)
    if quant is None:
        quant = _scaled(fields, element, qscheme, at_run_time)
    if not at_run_time:
        return quant
    mode = fields.string("scale_calculation_mode").lower()
    if quant.scale_format == "e8m0":
        if mode not in _MX_RULES:
            raise _unsupported(fields, "scale_calculation_mode", mode)
        return replace(quant, dynamic=True, scale_rule=_MX_RULES[mode], rounding="nearest-even")
    dynamic = fields.boolean("is_dynamic", False)
    rounding = _ROUNDINGS.get(fields.string("round_method").lower(), "nearest-even")
    return replace(quant, dynamic=dynamic, scale_rule="absmax" if dynamic else "", rounding=rounding)


def _microscaled(fields: Fields, element: str, qscheme: str) -> TensorQuant | None:
    is_mx = fields.string("scale_format").lower() == "e8m0" or fields.string("dtype").lower() == "mx"
    if not is_mx:
        return None
    group = fields.integer("group_size", 0)
    if qscheme not in ("per_group", "") or group not in (0, 32) or element not in _MX:
        raise _unsupported(fields, "group_size", f"{element}, {qscheme} of {group} with e8m0 scales")
    return parse_weight_id(_MX[element])


def _scaled(fields: Fields, element: str, qscheme: str, at_run_time: bool) -> TensorQuant:
    symmetric = fields.values.get("symmetric") is not False
    if element.startswith("uint") or (element.startswith("int") and not symmetric):
        element, symmetric = element if at_run_time else f"u{element.removeprefix('u')}", False
    if not element.startswith(("int", "uint")):
        symmetric = True
    if at_run_time:
        # An activation's id says asymmetric with a suffix, not with its element.
        element = element.removeprefix("u")
    if qscheme == "per_tensor":
        return TensorQuant(element, "tensor", symmetric=symmetric)
    if qscheme in ("per_channel", "per_token"):
        return TensorQuant(element, "token" if at_run_time else "channel", symmetric=symmetric)
    if qscheme == "per_group":
        size = fields.integer("group_size", 0)
        if size <= 0:
            raise fields.wrong("group_size", "a positive integer")
        return TensorQuant(element, "group", size, symmetric=symmetric)
    if qscheme == "per_block":
        return TensorQuant(element, "block", block=_block(fields), symmetric=symmetric)
    raise _unsupported(fields, "qscheme", qscheme)


def _block(fields: Fields) -> tuple[int, int]:
    value = fields.values.get("block_size") or fields.values.get("group_size")
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(size, int) and size > 0 for size in value):
        raise fields.wrong("block_size", "two positive integers")
    return value[0], value[1]


def _unsupported(fields: Fields, name: str, found: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(f"{found!r} has no scheme here", file=fields.file, key=fields.path(name))
