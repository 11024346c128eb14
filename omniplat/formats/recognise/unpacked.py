"""One code per element: fp8 and int8 weights whose scale's shape tells the granularity."""

from __future__ import annotations

from dataclasses import replace

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import E8M0_DTYPES, SCALE_FORMATS, Draft, Stored, misfit
from omniplat.scheme import TensorQuant, parse_weight_id

#: Names of the scale beside a plain weight. `scale` is DeepSeek's own, the last two belong to stacked experts.
_SCALE_LEAVES = ("weight_scale", "weight_scale_inv", "scale_weight", "scale", "_scale_inv", "_scale")
FLOAT8 = {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}


def scale_quant(element: str, scale: TensorInfo, n: int, k: int, hinted: TensorQuant | None) -> TensorQuant | None:
    """Granularity of an unpacked [N, K] weight from its scale's shape; None when the shape fits nothing."""
    shape = scale.shape
    form = SCALE_FORMATS.get(scale.dtype, "")
    if not form:
        return None
    if form == "e8m0" and shape == (n, -(-k // 32)):
        return TensorQuant(element, "group", 32, scale_format="e8m0")
    if len(shape) == 4 and shape[1] == 1 and shape[3] == 1:
        shape = (shape[0], shape[2])
    if hinted is not None and hinted.granularity == "block":
        bn, bk = hinted.block
        tiles = (-(-n // bn), -(-k // bk))
        # The scale of a single tile may have lost its dimensions.
        if shape == tiles or (tiles == (1, 1) and shape in ((), (1,))):
            return TensorQuant(element, "block", block=(bn, bk), scale_format=form)
    if hinted is not None and hinted.granularity == "channel" and shape in ((n,), (n, 1)) and form != "e8m0":
        return TensorQuant(element, "channel", scale_format=form)
    if hinted is not None and hinted.granularity == "group" and shape == (n, -(-k // hinted.group_size)):
        return TensorQuant(element, "group", hinted.group_size, scale_format=form)
    if form == "e8m0" and shape != (-(-n // 128), -(-k // 128)):
        return None
    if shape in ((), (1,), (1, 1)):
        return TensorQuant(element, "tensor", scale_format=form)
    if shape in ((n,), (n, 1)):
        return TensorQuant(element, "channel", scale_format=form)
    if len(shape) == 2 and shape == (-(-n // 128), -(-k // 128)):
        return TensorQuant(element, "block", block=(128, 128), scale_format=form)
    if len(shape) == 2 and shape[0] == n and shape[1] and k % shape[1] == 0:
        return TensorQuant(element, "group", k // shape[1], scale_format=form)
    return None


def float8(draft: Draft, weight: TensorInfo) -> Stored:
    n, k = weight.shape
    scale = draft.take("scale", *_SCALE_LEAVES, required=True)
    hinted = draft.hinted
    if scale is None:
        return draft.finish(hinted, "plain", weight.dtype, n, k)
    quant = scale_quant(FLOAT8[weight.dtype], scale, n, k, hinted)
    problem = "" if quant else misfit(scale, n, k)
    return draft.finish(quant, "plain", weight.dtype, n, k, problem=problem)


def int8(draft: Draft, weight: TensorInfo) -> Stored:
    n, k = weight.shape
    scale = draft.take("scale", *_SCALE_LEAVES, required=True)
    if scale is not None and scale.dtype in E8M0_DTYPES and scale.shape == (n, k // 16) and not k % 16:
        # half a byte per code: DeepSeek-V4 keeps MXFP4 in signed bytes
        return draft.finish(parse_weight_id("mxfp4"), "nibbles_k", "I8", n, 2 * k)
    zero = draft.take("zero_point", "weight_zero_point")
    hinted = draft.hinted
    if scale is None:
        return draft.finish(hinted, "plain", "I8", n, k)
    quant = scale_quant("int8", scale, n, k, hinted)
    if quant is None:
        return draft.finish(None, "plain", "I8", n, k, problem=misfit(scale, n, k))
    bits = hinted.bits if hinted is not None and hinted.is_integer else 8
    # A file may spell out the zero points, all 0, of a symmetric weight; unpacking checks them.
    declared = hinted is not None and hinted.is_integer and hinted.symmetric
    symmetric = zero is None or declared
    element = f"{'int' if symmetric else 'uint'}{bits}"
    if hinted is not None and hinted.is_integer and not hinted.symmetric and zero is None:
        draft.missing.append("weight_zero_point")
    return draft.finish(replace(quant, element=element, symmetric=symmetric), "plain", "I8", n, k)
