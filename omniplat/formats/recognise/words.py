"""Integer codes packed into int32 words: compressed-tensors' pack-quantized, GPTQ and AWQ."""

from __future__ import annotations

from dataclasses import replace

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import Draft, Leaves, Stored, grouped, misfit, unknown
from omniplat.scheme import TensorQuant

#: The tensor in which a module states its true [N, K].
SHAPE_LEAF = "weight_shape"


def shape_is_needed(leaves: Leaves) -> bool:
    """True where `weight_shape` must be read: only with a scale per so many whole words do headers show K."""
    packed, scale = leaves.get("weight_packed"), leaves.get("weight_scale")
    if packed is None or packed.dtype != "I32" or len(packed.shape) != 2 or SHAPE_LEAF not in leaves:
        return False
    groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
    return groups <= 1 or packed.shape[1] % groups != 0


def _order_is_needed(draft: Draft) -> bool:
    """True where columns belong to groups in an order of the module's own, which nothing but a tensor can tell."""
    hinted = draft.hinted
    return draft.hint is not None and draft.hint.act_order and hinted is not None and hinted.granularity == "group"


def packed_words(draft: Draft, packed: TensorInfo) -> Stored:
    """compressed-tensors pack-quantized: int32 words along K."""
    draft.roles["codes"] = "weight_packed"
    scale = draft.take("scale", "weight_scale", required=True)
    draft.take("weight_shape", SHAPE_LEAF, required=True)
    zero = draft.take("zero_point", "weight_zero_point")
    draft.take("group_index", "weight_g_idx", required=_order_is_needed(draft))
    hinted = draft.hinted
    n, words = packed.shape if len(packed.shape) == 2 else (0, 0)
    groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
    k, bits = _k_and_bits(draft, words, groups)
    symmetric = zero is None
    if hinted is not None and hinted.is_integer and not hinted.symmetric and zero is None:
        draft.missing.append("weight_zero_point")
        symmetric = False
    quant = grouped(f"{'int' if symmetric else 'uint'}{bits}", k, groups, scale, hinted, symmetric)
    per_tensor = hinted is not None and hinted.granularity == "tensor" and scale is not None
    if per_tensor and scale is not None and scale.shape in ((), (1,), (1, 1)):
        quant = replace(quant, granularity="tensor", group_size=0)
    elif scale is not None and (len(scale.shape) != 2 or scale.shape[0] != n):
        return draft.finish(quant, "int32_k", "I32", n, k, problem=misfit(scale, n, k))
    stored = draft.finish(quant, "int32_k", "I32", n, k)
    if words == -(-k * bits // 32):
        return stored
    if words == -(-k // (32 // bits)):
        return replace(stored, unsupported="codes are padded to whole words, as releases before 0.15 packed odd widths")
    return replace(stored, problem=f"weight_packed {list(packed.shape)} does not hold {k} values of {bits} bits a row")


def _k_and_bits(draft: Draft, words: int, groups: int) -> tuple[int, int]:
    """K and the width of a code: from `weight_shape` or the group order where they are known, else from the words."""
    hinted = draft.hinted
    bits = hinted.bits if hinted is not None and hinted.is_integer else 0
    gidx = draft.leaves.get("weight_g_idx")
    k = gidx.shape[0] if gidx is not None and gidx.shape else _columns(draft.values.get(SHAPE_LEAF, b""))
    if k:
        if bits and words in (-(-k * bits // 32), -(-k // (32 // bits))):
            return k, bits
        # The declared width does not fit: the words tell.
        return k, min(max(words * 32 // k, 2), 8)
    if bits:
        return _words_along_k(words, groups, bits, hinted)
    return words * 8, 4


def _columns(shape: bytes) -> int:
    """K of a `weight_shape` tensor, two int64 (or int32) numbers; 0 where it is absent or blank."""
    width = len(shape) // 2
    return int.from_bytes(shape[width:], "little", signed=True) if width in (4, 8) else 0


def _words_along_k(words: int, groups: int, bits: int, hinted: TensorQuant | None) -> tuple[int, int]:
    """(K, bits) of int32 words: the declared bits unless they contradict the number of groups of the declared size."""
    k = words * 32 // bits
    if hinted is None or hinted.granularity != "group" or groups <= 1:
        return k, bits
    whole = groups * hinted.group_size
    if -(-k // hinted.group_size) == groups:
        # The last word may be padding: the groups tell where K ends.
        return min(k, whole), bits
    if (words * 32) % whole == 0 and 2 <= words * 32 // whole <= 8:
        return whole, words * 32 // whole
    return k, bits


def integer_columns(draft: Draft, weight: TensorInfo) -> Stored:
    """Quark: a plain `weight` of int32 words. Per group they run along N, [K, N/8], with scales [G, N]; per channel or
    tensor along K, [N, K/8], with scales [N] or one."""
    scale = draft.take("scale", "weight_scale", required=True)
    zero = draft.take("zero_point", "weight_zero_point")
    hint, hinted = draft.hint, draft.hinted
    if scale is not None and scale.shape in ((weight.shape[0],), (1,), ()):
        return _words_of_rows(draft, weight, scale, zero)
    k, words = weight.shape
    n = words * 8
    if scale is None:
        return draft.finish(hinted, "awq", "I32", n, k)
    if scale.shape[1:] != (n,):
        return draft.finish(None, "awq", "I32", n, k, problem=misfit(scale, n, k))
    symmetric = zero is None or hinted is None or hinted.symmetric
    quant = grouped(f"{'int' if symmetric else 'uint'}4", k, scale.shape[0], scale, hinted, symmetric)
    packing = hint.packing if hint is not None and hint.packing in ("awq", "int32_n") else "awq"
    problem = "" if hint is not None else "integer codes without metadata: the order inside the words is not known"
    stored = draft.finish(quant, packing, "I32", n, k, problem=problem)
    return replace(stored, storage=replace(stored.storage, twos_complement=symmetric))


def _words_of_rows(draft: Draft, weight: TensorInfo, scale: TensorInfo, zero: TensorInfo | None) -> Stored:
    hint, hinted = draft.hint, draft.hinted
    n, k = weight.shape[0], weight.shape[1] * 8
    symmetric = zero is None or hinted is None or hinted.symmetric
    quant = grouped(f"{'int' if symmetric else 'uint'}4", k, 1, scale, None, symmetric)
    if scale.shape != (n,):
        quant = replace(quant, granularity="tensor")
    packing = "int32_k" if hint is not None and hint.packing == "int32_n" else "awq_k"
    problem = "" if hint is not None else "integer codes without metadata: the order inside the words is not known"
    stored = draft.finish(quant, packing, "I32", n, k, problem=problem)
    return replace(stored, storage=replace(stored.storage, twos_complement=symmetric))


def integer_rows(draft: Draft, qweight: TensorInfo) -> Stored:
    """GPTQ and AWQ: `qweight`, `qzeros`, `scales`, with scales [G, N]."""
    draft.roles["codes"] = "qweight"
    zeros = draft.take("zero_point", "qzeros", required=True)
    scales = draft.take("scale", "scales", required=True)
    gidx = draft.take("group_index", "g_idx", required=_order_is_needed(draft))
    hint, hinted = draft.hint, draft.hinted
    if qweight.dtype != "I32" or len(qweight.shape) != 2:
        return unknown(draft, qweight, f"qweight is {qweight.dtype} {list(qweight.shape)}")
    if scales is None or len(scales.shape) != 2:
        if scales is None:
            return draft.finish(hinted, "gptq", "I32", 0, 0)
        return unknown(draft, qweight, f"scales has shape {list(scales.shape)}, expected [groups, N]")
    groups, n = scales.shape
    symmetric = hinted is not None and hinted.symmetric
    element = "int" if symmetric else "uint"
    if qweight.shape[1] * 8 == n and (hint is None or hint.packing in ("", "awq")):
        k = qweight.shape[0]
        quant = grouped(f"{element}4", k, groups, scales, hinted, symmetric)
        return draft.finish(quant, "awq", "I32", n, k)
    if qweight.shape[1] != n:
        return unknown(draft, qweight, f"qweight {list(qweight.shape)} does not fit scales {list(scales.shape)}")
    declared_bits = hinted.bits if hinted is not None and hinted.is_integer else 4
    words = zeros.shape[1] if zeros is not None and len(zeros.shape) == 2 else 0
    # Zero points of few rows leave their last word half empty: it is not that their codes are wider.
    is_padded = words == -(-n * declared_bits // 32)
    bits = declared_bits if is_padded or not words or not n or words * 32 % n else words * 32 // n
    k = gidx.shape[0] if gidx is not None and len(gidx.shape) == 1 else qweight.shape[0] * 32 // max(bits, 1)
    problem = "" if 2 <= bits <= 8 else f"qzeros {list(zeros.shape) if zeros else '?'} does not fit scales"
    quant = grouped(f"{element}{min(max(bits, 2), 8)}", k, groups, scales, hinted, symmetric)
    if not problem and qweight.shape[0] * 32 != k * bits:
        problem = f"qweight {list(qweight.shape)} does not hold {k} values of {bits} bits"
    if not problem and hint is None:
        problem = "integer codes without metadata: neither the zero point's offset nor its symmetry is known"
    offset = hint.zero_offset if hint is not None else 0
    return draft.finish(quant, "gptq", "I32", n, k, problem=problem, zero_offset=offset)
