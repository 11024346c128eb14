"""Whether what stands beside the codes has the dtype and the size that loading needs: a misfit is found in the plan."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from omniplat.checkpoint.tensors import FLOAT_DTYPES, TensorInfo
from omniplat.scheme import TensorQuant

_INTEGERS = frozenset({"I8", "U8", "I16", "I32"})
#: Roles of real numbers -> how many: one, one for each of the N rows or K columns, or as many as there are.
_REAL: Mapping[str, str] = {
    "global_scale": "one",
    "pre_scale": "k",
    "bias": "n",
    "smooth_factor": "k",
    "channel_scale": "n",
    "tensor_scale": "one",
    "low_rank_down": "",
    "low_rank_up": "",
}
#: The same of an input that is quantized with stored scales.
_STATIC: Mapping[str, str] = {"input_scale": "one", "input_global_scale": "one"}
#: Packings of whole words, whose scales are real numbers and whose zero points are words as well.
_WORDS = frozenset({"gptq", "awq", "int32_n", "int32_k"})


def role_problem(
    tensors: Mapping[str, TensorInfo], weight: TensorQuant, packing: str, n: int, k: int, *, static: bool
) -> str:
    """The first tensor that loading would refuse, in words; "" where all fit an [n, k] weight.

    `tensors` are the module's by canonical role. Scales of other packings than words are what tells the weight's
    granularity, so that they have been looked at already. `static` says whether input scales will be used.
    """
    expected = {**_REAL, **(_STATIC if static else {})}
    sizes = {"one": (1, n), "k": (k,), "n": (n,)}
    for role, count in expected.items():
        info = tensors.get(role)
        if info is None:
            continue
        if info.dtype not in FLOAT_DTYPES or (count and prod(info.shape) not in sizes[count]):
            return _misfit(info, n, k)
    if packing not in _WORDS:
        return ""
    return _word_problem(tensors, weight, packing, n, k)


def _word_problem(tensors: Mapping[str, TensorInfo], weight: TensorQuant, packing: str, n: int, k: int) -> str:
    scale, zero, order = (tensors.get(role) for role in ("scale", "zero_point", "group_index"))
    if scale is not None and scale.dtype not in FLOAT_DTYPES:
        return _misfit(scale, n, k)
    if order is not None and (order.dtype not in ("I32", "I64") or order.shape != (k,)):
        return _misfit(order, n, k)
    if zero is None or scale is None:
        return ""
    if prod(scale.shape) == prod(zero.shape) == 1:
        return "" if zero.dtype in _INTEGERS else _misfit(zero, n, k)
    words, groups = -(-n * weight.bits // 32), max(prod(scale.shape) // n, 1)
    if packing == "int32_k":
        rows = words if zero.dtype == "I32" else n
        fits = zero.dtype in _INTEGERS and zero.shape == (rows, groups)
    else:
        rows = words
        fits = zero.dtype == "I32" and zero.shape == (groups, words)
    # One group may have lost its dimension.
    flat = groups == 1 and zero.dtype == "I32" and zero.shape == (rows,)
    return "" if fits or flat else _misfit(zero, n, k)


def _misfit(info: TensorInfo, n: int, k: int) -> str:
    return f"{info.name.rpartition('.')[2]} {info.dtype} {list(info.shape)} does not fit a weight of [{n}, {k}]"
