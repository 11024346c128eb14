"""Tensor subclasses taken apart into their tensors: torchao's and quanto's weights."""

from __future__ import annotations

from dataclasses import replace

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import SCALE_FORMATS, Draft, Leaves, Stored, misfit, unknown
from omniplat.formats.recognise.nibbles import four_bit
from omniplat.formats.recognise.unpacked import FLOAT8, scale_quant
from omniplat.scheme import TensorQuant

#: Spellings of the codes' leaf: torchao as transformers and as older releases flatten it, quanto.
DATA_LEAVES = (
    *("_weight_qdata", "weight:qdata", "weight:_data", "weight:int_data", "_weight_int_data", "weight._data"),
    "weight._data._data",
)
_SCALES = ("_weight_scale", "weight:scale", "weight:_scale", "weight._scale")
_ZEROS = ("_weight_zero_point", "weight:zero_point", "weight:_zero_point", "weight._shift")
_GLOBALS = ("_weight_per_tensor_scale", "weight:per_tensor_scale")
_PAIRS = ("_weight_scale_and_zero", "weight:scale_and_zero")

_DEVICE_LAYOUT = "the weight is stored in the layout of one device's kernel"


def data_leaf(leaves: Leaves) -> str:
    """The leaf that holds the codes of such a weight; "" where there is none."""
    return next((name for name in DATA_LEAVES if name in leaves), "")


def subclass(draft: Draft, leaf: str) -> Stored:
    data = draft.leaves[leaf]
    draft.roles["codes"] = leaf
    if leaf == "weight._data._data":
        return _of_unknown_shape(draft, data)
    if data.dtype == "I32":
        return _device_layout(draft, data)
    if len(data.shape) != 2:
        return unknown(draft, data, f"{leaf} is {data.dtype} of shape {list(data.shape)}")
    n, k = data.shape
    scale = draft.take("scale", *_SCALES, required=True)
    hinted = draft.hinted
    if data.dtype == "U8":
        return four_bit(draft, data, n, 2 * k, scale, _GLOBALS, divisor=False)
    if data.dtype == "I8" and scale is not None and _is_transposed(scale, n, 2 * k, hinted):
        return _transposed_int4(draft, data, scale, n, 2 * k)
    if data.dtype not in ("I8", *FLOAT8):
        return unknown(draft, data, f"{leaf} has dtype {data.dtype}")
    element = FLOAT8.get(data.dtype, "int8")
    if scale is None:
        return draft.finish(hinted, "plain", data.dtype, n, k)
    quant = scale_quant(element, scale, n, k, hinted)
    if quant is None:
        return draft.finish(None, "plain", data.dtype, n, k, problem=misfit(scale, n, k))
    if data.dtype == "I8":
        quant = _integer(draft, quant)
    return draft.finish(quant, "plain", data.dtype, n, k)


def _integer(draft: Draft, quant: TensorQuant) -> TensorQuant:
    """Bits and symmetry of codes in an I8 tensor. torchao stores a zero point, all zeros, for symmetric weights too."""
    hinted = draft.hinted
    zero = draft.take("zero_point", *_ZEROS)
    known = hinted if hinted is not None and hinted.is_integer else None
    symmetric = zero is None or known is None or known.symmetric
    bits = known.bits if known is not None else 8
    return replace(quant, element=f"{'int' if symmetric else 'uint'}{bits}", symmetric=symmetric)


def _is_transposed(scale: TensorInfo, n: int, k: int, hinted: TensorQuant | None) -> bool:
    """True for declared 4-bit codes whose scale is [G, N]."""
    wanted = hinted is not None and hinted.is_integer and hinted.bits == 4
    return wanted and scale.shape[1:] == (n,) and scale.shape[0] > 0 and k % scale.shape[0] == 0


def _transposed_int4(draft: Draft, data: TensorInfo, scale: TensorInfo, n: int, k: int) -> Stored:
    """torchao's Int4Tensor: codes I8 [N, K/2], low nibble first; scale and zero [G, N]; w = code * scale + zero."""
    zero = draft.take("zero_point", *_ZEROS, required=True)
    groups = scale.shape[0]
    quant = TensorQuant(
        "uint4", "group", k // groups, scale_format=SCALE_FORMATS.get(scale.dtype, "f32"), symmetric=False
    )
    problem = misfit(zero, n, k) if zero is not None and zero.shape != scale.shape else ""
    return draft.finish(quant, "nibbles_k_shifted", data.dtype, n, k, problem=problem)


def _device_layout(draft: Draft, data: TensorInfo) -> Stored:
    """int32 words whose order a kernel defines: 2-D [N, K/8], or tiles [N/8, K/(16 t), 32, t/2]."""
    draft.take("scale", *_SCALES, *_PAIRS)
    draft.take("zero_point", *_ZEROS)
    shape = data.shape
    if len(shape) == 4:
        n, k = shape[0] * 8, shape[1] * shape[3] * 32
    elif len(shape) == 2:
        n, k = shape[0], shape[1] * 8
    else:
        return unknown(draft, data, f"codes of shape {list(shape)}")
    hinted = draft.hinted
    quant = hinted if hinted is not None else TensorQuant("uint4", "channel", symmetric=False)
    return replace(draft.finish(quant, "plain", data.dtype, n, k), unsupported=_DEVICE_LAYOUT)


def _of_unknown_shape(draft: Draft, data: TensorInfo) -> Stored:
    """quanto's packed bits: rows of groups, without the number of rows of the weight."""
    draft.take("scale", *_SCALES, required=True)
    draft.take("zero_point", *_ZEROS)
    shape = (*data.shape, 1, 1)
    quant = draft.hinted or TensorQuant("uint4", "channel", symmetric=False)
    return replace(
        draft.finish(replace(quant, granularity="channel", group_size=0), "plain", data.dtype, shape[0], shape[1]),
        unsupported="quanto does not store the shape of weights of less than 8 bits",
    )
