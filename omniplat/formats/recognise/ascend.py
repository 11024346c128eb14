"""What msModelSlim and vllm-omni's merge tools write: int8 with a dequantization scale, int4 in int8 containers,
fp4 numbers in wider containers, second-level scales, and smoothing vectors."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import (
    E8M0_DTYPES,
    NOT_TRANSFORMED,
    TRANSFORM_LEAVES,
    Draft,
    Stored,
    grouped,
    misfit,
)
from omniplat.scheme import TensorQuant, parse_weight_id

#: Leaves that only msModelSlim puts beside an int8 tensor.
MARKS = frozenset({"weight_offset", "deq_scale", "scale_bias", "weight_scale_second"})

#: Leaves of transformations that happen to the input at run time, and what they do.
_TRANSFORMATIONS = (
    (("heads_rotation", "kronecker_rotation_m"), "QuaRot rotates the input at run time"),
    (("svd_lowrank_l1", "svd_lowrank_l2"), "a low-rank residual is added to the output"),
)
#: Columns that share one second-level scale.
_DUAL_COLUMNS = 512


def transformation(draft: Draft) -> str:
    """What is done to the input of this module that no kernel does, in words; "" for nothing."""
    for names, reason in _TRANSFORMATIONS:
        present = [name for name in names if name in draft.leaves]
        if present:
            return f"{', '.join(present)}: {reason}, which no kernel here does"
    return ""


def container8(draft: Draft, weight: TensorInfo) -> Stored:
    """int8 [N, K], or int4 in int8: one code a byte, [N/2, K] packed along N, [N, K/2] along K."""
    is_static = "deq_scale" in draft.leaves
    matrices = _transform(draft)
    stored = _with_dequantization_scale(draft, weight) if is_static else _dynamic(draft, weight)
    if matrices and stored.complete:
        stored = _transformed(stored, matrices, is_static)
    reason = transformation(draft)
    return replace(stored, unsupported=reason) if reason else stored


def _transform(draft: Draft) -> list[TensorInfo]:
    """FlatQuant's tensors that are there: all of them are missing or required, as metadata or one of them says."""
    if not draft.is_transformed:
        return []
    taken = [draft.take(role, leaf, required=True) for role, leaf in TRANSFORM_LEAVES.items()]
    return [info for info in taken if info is not None]


def _transformed(stored: Stored, matrices: list[TensorInfo], is_static: bool) -> Stored:
    """int4 rows under inputs of int4 per token are what the transform has a definition for."""
    left, right, clip = matrices
    sizes = (left.shape[0], right.shape[0]) if left.shape and right.shape else (0, 0)
    square = left.shape == (sizes[0],) * 2 and right.shape == (sizes[1],) * 2
    if not square or sizes[0] * sizes[1] != stored.in_features or prod(clip.shape) != 1:
        shapes = f"left_trans {list(left.shape)}, right_trans {list(right.shape)}, clip_ratio {list(clip.shape)}"
        return replace(stored, problem=f"{shapes} do not fit K = {stored.in_features}")
    if is_static or stored.weight is None or stored.weight.element != "int4":
        return replace(stored, unsupported=NOT_TRANSFORMED)
    return replace(stored, transform=sizes)


def _with_dequantization_scale(draft: Draft, weight: TensorInfo) -> Stored:
    n, k = weight.shape
    deq = draft.take("deq_scale", "deq_scale")
    draft.take("quant_bias", "quant_bias", required=True)
    draft.take("input_scale", "input_scale", required=True)
    draft.take("input_zero_point", "input_offset", required=True)
    draft.take("scale", "weight_scale")
    draft.take("zero_point", "weight_offset")
    problem = "" if deq is not None and deq.shape in ((n,), (n, 1)) else f"deq_scale does not have {n} entries"
    return draft.finish(TensorQuant("int8", "channel"), "plain", weight.dtype, n, k, problem=problem)


def _dynamic(draft: Draft, weight: TensorInfo) -> Stored:
    rows, columns = weight.shape
    scale = draft.take("scale", "weight_scale", required=True)
    second = draft.take("scale_second", "weight_scale_second")
    draft.take("zero_point", "weight_offset")
    draft.take("zero_point_second", "weight_offset_second")
    draft.take("scale_bias", "scale_bias")
    hinted = draft.hinted
    if scale is None:
        return draft.finish(hinted, "plain", weight.dtype, rows, columns)
    finer = second or scale
    if not scale.shape or len(finer.shape) > 2:
        return draft.finish(None, "plain", weight.dtype, rows, columns, problem=misfit(finer, rows, columns))
    packing, n, k = "plain", rows, columns
    if scale.shape[0] == 2 * rows:
        packing, n = "nibbles_n", 2 * rows
    elif draft.hint is not None and draft.hint.packing == "ascend_int4_k":
        packing, k = "nibbles_k", 2 * columns
    is_int4 = packing != "plain" or "scale_bias" in draft.roles or (hinted is not None and hinted.element == "int4")
    groups = finer.shape[1] if len(finer.shape) == 2 else 1
    quant = grouped("int4" if is_int4 else "int8", k, groups, finer, hinted, True)
    if second is not None:
        # the product of two scales is held in f32, whatever each of them is
        quant = replace(quant, scale_format="f32")
    problem = "" if finer.shape[0] == n and k % groups == 0 else misfit(finer, n, k)
    return draft.finish(quant, packing, weight.dtype, n, k, problem=problem)


def numbers(draft: Draft, weight: TensorInfo) -> Stored:
    """Microscaled values under an e8m0 `weight_scale`, with the weight's numbers in a container of any width.

    fp4 lies as [N, K] numbers in fp8, int8 or a 16-bit float, or packed as [N, K/2]; `weight_dual_scale`
    [N, ceil(K/512), 1] is the second level. The scale's columns tell K.
    """
    n, columns = weight.shape
    hinted = draft.hinted
    scale = draft.take("scale", "weight_scale", required=True)
    is_dual = "weight_dual_scale" in draft.leaves or (hinted is not None and hinted.second_scale == "dual")
    dual = draft.take("scale2", "weight_dual_scale", required=True) if is_dual else None
    quant = parse_weight_id("mxfp4-dual") if is_dual else hinted or parse_weight_id("mxfp4")
    if scale is None:
        return draft.finish(quant, "plain", weight.dtype, n, columns)
    if scale.dtype not in E8M0_DTYPES or len(scale.shape) != 2 or scale.shape[0] != n:
        return draft.finish(None, "plain", weight.dtype, n, columns, problem=misfit(scale, n, columns))
    packing, k = "plain", columns
    if quant.element == "fp4_e2m1" and weight.dtype in ("U8", "I8") and scale.shape[1] == -(-2 * columns // 32):
        packing, k = "nibbles_k", 2 * columns
    problem = "" if scale.shape[1] == -(-k // 32) else misfit(scale, n, k)
    if dual is not None and dual.shape not in ((n, -(-k // _DUAL_COLUMNS)), (n, -(-k // _DUAL_COLUMNS), 1)):
        problem = misfit(dual, n, k)
    return draft.finish(quant, packing, weight.dtype, n, k, problem=problem)
