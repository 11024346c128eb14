"""Integer codes packed into int32 words: compressed-tensors' pack-quantized, GPTQ and AWQ."""

from __future__ import annotations

from dataclasses import replace

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.recognise.draft import Draft, Stored, grouped, misfit, unknown
from omniplat.scheme import TensorQuant


def packed_words(draft: Draft, packed: TensorInfo) -> Stored:
    """compressed-tensors pack-quantized: int32 words along K."""
    draft.roles["codes"] = "weight_packed"
    scale = draft.take("scale", "weight_scale", required=True)
    draft.take("weight_shape", "weight_shape", required=True)
    zero = draft.take("zero_point", "weight_zero_point")
    gidx = draft.take("group_index", "weight_g_idx")
    hinted = draft.hinted
    n, words = packed.shape if len(packed.shape) == 2 else (0, 0)
    bits = hinted.bits if hinted is not None and hinted.is_integer else 0
    k = gidx.shape[0] if gidx is not None and gidx.shape else 0
    groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
    if not k and bits:
        k, bits = _words_along_k(words, groups, bits, hinted)
    if not bits:
        bits = words * 32 // k if k else 4
        k = k or words * 8
    symmetric = zero is None
    if hinted is not None and hinted.is_integer and not hinted.symmetric and zero is None:
        draft.missing.append("weight_zero_point")
        symmetric = False
    quant = grouped(f"{'int' if symmetric else 'uint'}{bits}", k, groups, scale, hinted, symmetric)
    problem = ""
    if scale is not None and (len(scale.shape) != 2 or scale.shape[0] != n):
        problem = misfit(scale, n, k)
    elif bits * k > words * 32:
        problem = f"weight_packed {list(packed.shape)} is too narrow for {k} values of {bits} bits"
    return draft.finish(quant, "int32_k", "I32", n, k, problem=problem)


def _words_along_k(words: int, groups: int, bits: int, hinted: TensorQuant | None) -> tuple[int, int]:
    """(K, bits) of int32 words: the declared bits unless they contradict the number of groups of the declared size."""
    k = words * (32 // bits)
    if hinted is None or hinted.granularity != "group" or groups <= 1:
        return k, bits
    if -(-k // hinted.group_size) == groups:
        # The last word may be padding: the groups tell where K ends.
        return min(k, groups * hinted.group_size), bits
    whole = groups * hinted.group_size
    if (words * 32) % whole == 0 and 2 <= words * 32 // whole <= 8:
        return whole, words * 32 // whole
    return k, bits


def integer_columns(draft: Draft, weight: TensorInfo) -> Stored:
    """Quark: a plain `weight` of int32 words along N, [K, N/8], with scales [G, N] or [N]."""
    scale = draft.take("scale", "weight_scale", required=True)
    zero = draft.take("zero_point", "weight_zero_point")
    hint, hinted = draft.hint, draft.hinted
    k, words = weight.shape
    n = words * 8
    if scale is None:
        return draft.finish(hinted, "awq", "I32", n, k)
    if scale.shape[-1:] != (n,) or len(scale.shape) > 2:
        return draft.finish(None, "awq", "I32", n, k, problem=misfit(scale, n, k))
    groups = scale.shape[0] if len(scale.shape) == 2 else 1
    symmetric = zero is None or hinted is None or hinted.symmetric
    quant = grouped(f"{'int' if symmetric else 'uint'}4", k, groups, scale, hinted, symmetric)
    packing = hint.packing if hint is not None and hint.packing in ("awq", "int32_n") else "awq"
    problem = "" if hint is not None else "integer codes without metadata: the order inside the words is not known"
    stored = draft.finish(quant, packing, "I32", n, k, problem=problem)
    return replace(stored, storage=replace(stored.storage, twos_complement=symmetric))


def integer_rows(draft: Draft, qweight: TensorInfo) -> Stored:
    """GPTQ and AWQ: `qweight`, `qzeros`, `scales`, with scales [G, N]."""
    draft.roles["codes"] = "qweight"
    zeros = draft.take("zero_point", "qzeros", required=True)
    scales = draft.take("scale", "scales", required=True)
    gidx = draft.take("group_index", "g_idx")
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
    if zeros is not None and len(zeros.shape) == 2 and n and zeros.shape[1] * 32 % n == 0:
        bits = zeros.shape[1] * 32 // n
    else:
        bits = hinted.bits if hinted is not None and hinted.is_integer else 4
    k = gidx.shape[0] if gidx is not None and len(gidx.shape) == 1 else qweight.shape[0] * 32 // max(bits, 1)
    problem = "" if 2 <= bits <= 8 else f"qzeros {list(zeros.shape) if zeros else '?'} does not fit scales"
    quant = grouped(f"{element}{min(max(bits, 2), 8)}", k, groups, scales, hinted, symmetric)
    if not problem and qweight.shape[0] * 32 != k * bits:
        problem = f"qweight {list(qweight.shape)} does not hold {k} values of {bits} bits"
    if not problem and hint is None:
        problem = "integer codes without metadata: neither the zero point's offset nor its symmetry is known"
    offset = hint.zero_offset if hint is not None else 0
    return draft.finish(quant, "gptq", "I32", n, k, problem=problem, zero_offset=offset)
