"""Tensor subclasses taken apart into their tensors: torchao's and quanto's weights."""

from __future__ import annotations

from dataclasses import replace

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import E8M0_DTYPES, SCALE_FORMATS, Draft, Leaves, Stored, misfit, unknown
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

_DEVICE_LAYOUT = (
    "the weight is stored in int32 words whose order is that of an XPU or an NPU kernel, and nothing tells of which"
)
_NO_SHAPE_OF_TILES = "the weight's rows and columns are padded, and the shard's metadata does not have its true shape"
#: What quanto tries as the size of a group, for rows of more than the first.
_QUANTO_GROUPS = (128, 96, 64, 32)


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
    columns = 2 * k if data.dtype == "U8" else k
    in_rows = _untiled(scale, n, columns)
    if in_rows is not None:
        stored = _block_scaled(draft, data, in_rows, n, columns)
        return replace(stored, storage=replace(stored.storage, scale_layout="tiles"))
    if data.dtype == "U8":
        return four_bit(draft, data, n, columns, scale, _GLOBALS, divisor=False)
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


def _untiled(scale: TensorInfo | None, n: int, k: int) -> TensorInfo | None:
    """A scale as it would be in rows, where torchao stored it swizzled: 32 x 16 numbers for every tile of 128 rows and
    4 groups. None for any other; no scale in rows has such a shape."""
    if scale is None or scale.dtype not in ("F8_E4M3", *E8M0_DTYPES):
        return None
    groups = -(-k // (16 if scale.dtype == "F8_E4M3" else 32))
    if scale.shape != (-(-n // 128) * 32, -(-groups // 4) * 16):
        return None
    return TensorInfo(scale.name, scale.dtype, (n, groups), scale.shard, scale.start, scale.end)


def _block_scaled(draft: Draft, data: TensorInfo, scale: TensorInfo, n: int, k: int) -> Stored:
    """Microscaled codes: FP4 in bytes, FP8 as it is."""
    if data.dtype == "U8":
        return four_bit(draft, data, n, k, scale, _GLOBALS, divisor=False)
    quant = scale_quant(FLOAT8[data.dtype], scale, n, k, draft.hinted) if data.dtype in FLOAT8 else None
    problem = "" if quant is not None else misfit(scale, n, k)
    return draft.finish(quant, "plain", data.dtype, n, k, problem=problem)


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
    pair = draft.take("scale_and_zero", *_PAIRS)
    shape = data.shape
    hinted = draft.hinted
    if len(shape) == 4 and shape[2] == 32:
        return _tiles(draft, data, pair)
    if len(shape) != 2:
        return unknown(draft, data, f"codes of shape {list(shape)}")
    draft.take("scale", *_SCALES)
    draft.take("zero_point", *_ZEROS)
    quant = hinted if hinted is not None else TensorQuant("uint4", "channel", symmetric=False)
    return replace(draft.finish(quant, "plain", data.dtype, shape[0], shape[1] * 8), unsupported=_DEVICE_LAYOUT)


def _tiles(draft: Draft, data: TensorInfo, pair: TensorInfo | None) -> Stored:
    """torchao's Int4TilePackedTo4dTensor. Rows are padded to 8, columns to 1024: metadata has the true shape."""
    rows, columns = data.shape[0] * 8, data.shape[1] * data.shape[3] * 32
    if pair is None:
        draft.missing.append(_PAIRS[0])
    groups = pair.shape[0] if pair is not None and pair.shape else 1
    size = columns // max(groups, 1)
    form = SCALE_FORMATS.get(pair.dtype, "bf16") if pair is not None else "bf16"
    fitting = [(n, k) for n, k in draft.shapes if rows - 8 < n <= rows and k <= columns]
    n, k = fitting[0] if fitting else (rows, columns)
    quant = TensorQuant("uint4", "group", max(size, 1), scale_format=form, symmetric=False)
    problem = misfit(pair, rows, columns) if pair is not None and pair.shape != (groups, rows, 2) else ""
    stored = draft.finish(quant, "tinygemm", data.dtype, n, k, problem=problem)
    return stored if fitting else replace(stored, unsupported=_NO_SHAPE_OF_TILES)


def _of_unknown_shape(draft: Draft, data: TensorInfo) -> Stored:
    """quanto's packed bits: rows of groups. How many rows the weight has, its tensors do not say."""
    scale = draft.take("scale", *_SCALES, required=True)
    draft.take("zero_point", *_ZEROS, required=True)
    if len(data.shape) != 2 or data.dtype != "U8":
        return unknown(draft, data, f"packed bits are {data.dtype} {list(data.shape)}")
    groups = scale.shape[0] if scale is not None and scale.shape else data.shape[0] * 2
    size = data.shape[1]
    bits = next((bits for bits in (4, 2) if data.shape[0] == -(-groups // (8 // bits))), 0)
    if not bits or (scale is not None and scale.shape not in ((groups,), (groups, 1))):
        return unknown(draft, data, f"{list(data.shape)} bytes hold no codes of 4 or 2 bits in {groups} groups")
    form = SCALE_FORMATS.get(scale.dtype, "f32") if scale is not None else "f32"
    n, k = _quanto_shape(draft, groups, size)
    element = f"uint{bits}"
    if n and k != size:
        quant = TensorQuant(element, "group", size, scale_format=form, symmetric=False)
    else:
        quant = TensorQuant(element, "channel", scale_format=form, symmetric=False)
    stored = draft.finish(quant, "quanto", data.dtype, n or groups, k or size)
    if n:
        return stored
    told = ", ".join(f"[{n}, {k}]" for n, k in draft.shapes)
    reason = (
        f"quanto does not store the shape of weights of less than 8 bits: here are {groups} groups of {size}, and "
        + (f"config.json tells {told}" if told else "neither a bias nor config.json tells the rows")
    )
    return replace(stored, unsupported=reason)


def _quanto_shape(draft: Draft, groups: int, size: int) -> tuple[int, int]:
    """[N, K] of a weight of so many groups: from the bias, from the group size, or from the configuration; (0, 0) where
    none tells. quanto cuts rows of more than 128 numbers into groups of 128, 96, 64 or 32 and leaves others whole."""
    count = groups * size
    bias = draft.leaves.get("bias")
    shapes: tuple[tuple[int, int], ...] = draft.shapes
    if bias is not None and len(bias.shape) == 1 and bias.shape[0]:
        shapes = ((bias.shape[0], count // bias.shape[0]),)
    elif size not in _QUANTO_GROUPS:
        shapes = ((groups, size),)
    fitting = {(n, k) for n, k in shapes if n * k == count and k % size == 0 and _quanto_group(k) == size}
    return fitting.pop() if len(fitting) == 1 else (0, 0)


def _quanto_group(columns: int) -> int:
    """The number of columns that quanto lets share a scale."""
    if columns <= _QUANTO_GROUPS[0]:
        return columns
    return next((size for size in _QUANTO_GROUPS if columns % size == 0), columns)
