"""4-bit codes packed into bytes: MXFP4, NVFP4, MXINT4 along K, and modelopt's int4 along N."""

from __future__ import annotations

from dataclasses import replace

from omniplat.checkpoint.tensors import FLOAT_DTYPES, TensorInfo
from omniplat.formats.recognise.draft import E8M0_DTYPES, Draft, Stored, grouped, misfit, unknown
from omniplat.formats.recognise.unpacked import scale_quant
from omniplat.scheme import parse_weight_id


def packed_nibbles(draft: Draft, packed: TensorInfo) -> Stored:
    """`weight_packed` in bytes: MXFP4 or NVFP4 under compressed-tensors' names, MXINT4 when declared."""
    draft.roles["codes"] = "weight_packed"
    if len(packed.shape) != 2 or packed.dtype not in ("U8", "I8"):
        return unknown(draft, packed, f"weight_packed is {packed.dtype} {list(packed.shape)}")
    n, k = packed.shape[0], packed.shape[1] * 2
    scale = draft.take("scale", "weight_scale", required=True)
    if scale is not None and (stored := _six_bits(draft, packed, scale)) is not None:
        return stored
    return four_bit(draft, packed, n, k, scale, ("weight_global_scale",), divisor=True)


def four_bit(
    draft: Draft, codes: TensorInfo, n: int, k: int, scale: TensorInfo | None, names: tuple[str, ...], *, divisor: bool
) -> Stored:
    hinted = draft.hinted
    if scale is None:
        return draft.finish(hinted, "nibbles_k", codes.dtype, n, k)
    if scale.dtype == "F8_E4M3" and scale.shape == (n, -(-k // 16)):
        draft.take("global_scale", *names, required=True)
        return draft.finish(parse_weight_id("nvfp4"), "nibbles_k", codes.dtype, n, k, divisor=divisor)
    if scale.dtype == "F8_E4M3" and scale.shape == (n, -(-k // 32)):
        draft.take("global_scale", *names, required=True)
        return draft.finish(parse_weight_id("nvfp4-g32"), "nibbles_k", codes.dtype, n, k, divisor=divisor)
    if scale.dtype in E8M0_DTYPES and scale.shape == (n, -(-k // 32)):
        name = "mxint4" if hinted == parse_weight_id("mxint4") else "mxfp4"
        return draft.finish(parse_weight_id(name), "nibbles_k", codes.dtype, n, k)
    return draft.finish(None, "nibbles_k", codes.dtype, n, k, problem=misfit(scale, n, k))


def packed_bytes(draft: Draft, weight: TensorInfo) -> Stored:
    """A plain `weight` of bytes: NVFP4 and MXFP4 packed along K, MXFP6, unsigned 8 bits, modelopt's int4 along N."""
    rows, columns = weight.shape
    scale = draft.take("scale", "weight_scale", "weight_scale_inv", "scale", "_scale_inv", required=True)
    hinted = draft.hinted
    if hinted is not None and hinted.element == "uint8":
        return _unsigned(draft, weight, scale)
    if scale is not None and (stored := _six_bits(draft, weight, scale)) is not None:
        return stored
    if scale is not None and scale.dtype in FLOAT_DTYPES and len(scale.shape) == 2 and scale.shape[0] == 2 * rows:
        n, k = 2 * rows, columns
        quant = grouped("int4", k, scale.shape[1], scale, draft.hinted, True)
        if "weight_scale_2" in draft.leaves:
            # W4A8: the second factor belongs to the FP8 requantization of some engines, not to the weight.
            draft.roles["requantization_scale"] = "weight_scale_2"
        problem = "" if k % scale.shape[1] == 0 else misfit(scale, n, k)
        return draft.finish(quant, "nibbles_n", "U8", n, k, problem=problem)
    return four_bit(draft, weight, rows, columns * 2, scale, ("weight_scale_2", "weight_global_scale"), divisor=False)


def _six_bits(draft: Draft, codes: TensorInfo, scale: TensorInfo) -> Stored | None:
    """MXFP6: four codes in three bytes. Which of the two formats they have only metadata can tell."""
    rows, columns = codes.shape
    if scale.dtype not in E8M0_DTYPES or columns % 24 or scale.shape != (rows, columns // 24):
        return None
    name = "mxfp6e3m2" if draft.hinted == parse_weight_id("mxfp6e3m2") else "mxfp6e2m3"
    return draft.finish(parse_weight_id(name), "stream_k", "U8", rows, columns * 8 // 6)


def _unsigned(draft: Draft, weight: TensorInfo, scale: TensorInfo | None) -> Stored:
    """Quark's uint8: one code a byte and a zero point."""
    n, k = weight.shape
    draft.take("zero_point", "weight_zero_point", required=True)
    if scale is None:
        return draft.finish(draft.hinted, "plain", "U8", n, k)
    quant = scale_quant("uint8", scale, n, k, draft.hinted)
    if quant is None:
        return draft.finish(None, "plain", "U8", n, k, problem=misfit(scale, n, k))
    return draft.finish(replace(quant, symmetric=False), "plain", "U8", n, k)
