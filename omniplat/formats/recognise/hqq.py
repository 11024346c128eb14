"""HQQ: `W_q` keeps groups as rows, several of them in one byte; the weight's shape is a tensor of its own."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import SCALE_FORMATS, Draft, Stored, misfit, unknown
from omniplat.scheme import TensorQuant

#: Tensors beside `W_q` that say how it is packed.
STATE_LEAVES = ("shape", "nbits", "group_size", "axis")
#: 3-bit codes lie ten to an int32 word, every other width fills bytes.
CODES_PER_WORD = 10


def half_quadratic(draft: Draft, packed: TensorInfo) -> Stored:
    """Groups along K (axis 1). Of axis 0, weights a fixed distance apart share a scale: one for each, written out."""
    draft.roles["codes"] = "W_q"
    hinted = draft.hinted
    bits = _integer(draft, "nbits") or (hinted.bits if hinted is not None and hinted.is_integer else 0)
    if bits not in (1, 2, 3, 4, 8):
        return unknown(draft, packed, f"nbits is {bits}: HQQ packs 1, 2, 3, 4 or 8 bits")
    n, k = _shape(draft)
    if not n or not k:
        return unknown(draft, packed, "the tensor `shape` does not hold the weight's shape, and nothing else does")
    scale = draft.take("scale", "scale", required=True)
    zero = draft.take("zero_point", "zero", required=True)
    groups = prod(scale.shape) if scale is not None else n
    size = n * k // max(groups, 1)
    form = SCALE_FORMATS.get(scale.dtype, "f32") if scale is not None else "f32"
    # The library has no id for one bit; two hold it.
    element = f"uint{max(bits, 2)}"
    along_rows = bool(draft.values.get("axis")) and _integer(draft, "axis") == 0
    if along_rows:
        quant = TensorQuant(element, "block", block=(1, 1), scale_format=form, symmetric=False)
    elif size == k:
        quant = TensorQuant(element, "channel", scale_format=form, symmetric=False)
    else:
        quant = TensorQuant(element, "group", max(size, 1), scale_format=form, symmetric=False)
    problem = ""
    if scale is not None and (groups * size != n * k or (zero is not None and prod(zero.shape) != groups)):
        problem = misfit(scale, n, k)
    elif packed.nbytes != packed_size(size if along_rows else groups, groups if along_rows else size, bits):
        problem = f"W_q {list(packed.shape)} does not hold {n * k} codes of {bits} bits in rows of {size}"
    stored = draft.finish(quant, "hqq", packed.dtype, n, k, problem=problem)
    return replace(stored, storage=replace(stored.storage, bits=bits, groups_along_rows=along_rows))


def packed_size(rows: int, columns: int, bits: int) -> int:
    """Bytes of `W_q` for `rows` x `columns` codes, of which rows are packed."""
    per_word, width = (CODES_PER_WORD, 4) if bits == 3 else (8 // bits, 1)
    return -(-rows // per_word) * columns * width


def _integer(draft: Draft, leaf: str) -> int:
    return int.from_bytes(draft.values.get(leaf, b"")[:8], "little", signed=True)


def _shape(draft: Draft) -> tuple[int, int]:
    blob = draft.values.get("shape", b"")
    if len(blob) != 16:
        return 0, 0
    n, k = (int.from_bytes(blob[at : at + 8], "little", signed=True) for at in (0, 8))
    return (n, k) if 0 < n < 1 << 40 and 0 < k < 1 << 40 else (0, 0)
