"""Canonical tensors in the layouts that torch_npu's operators read. Nothing here changes a value."""

from __future__ import annotations

import torch

from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.runtime.finite import e8m0_scale, fp8_codes
from omniplat.runtime.tensors import DTYPES, WeightTensors
from omniplat_ascend.kernels.numbers import FRACTAL_NZ
from omniplat_ascend.spec import SPEC


def integers(weight: WeightTensors) -> torch.Tensor:
    """int8 [..., N, K]."""
    return weight.tensors["codes"].contiguous().view(torch.int8)


def row_scale(weight: WeightTensors) -> torch.Tensor:
    """f32 [..., N] of one scale per row."""
    return weight.tensors["scale"].to(torch.float32).squeeze(-1).contiguous()


def nibble_words(weight: WeightTensors) -> torch.Tensor:
    """int32 [..., N, K/8]: eight codes of 4 bits to a word, the first one lowest, as canonical bytes lie already."""
    return weight.tensors["codes"].contiguous().view(torch.int32)


def fp8_bytes(weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
    """uint8 [..., N, K] of e4m3 codes; raises InvalidCheckpointError for NaN."""
    return fp8_codes(weight.tensors["codes"], spec.name)


def paired_scale(weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
    """uint8 [..., N, K/64, 2] of e8m0 scales [..., N, K/32]; K is a multiple of 64. Raises InvalidCheckpointError for
    NaN."""
    scale = e8m0_scale(weight.tensors["scale"].contiguous(), spec.name)
    return scale.view(*scale.shape[:-1], -1, 2)


def in_nz(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` (int8) in the FRACTAL_NZ format: same values and shape, other order of bytes in the device's memory."""
    found: torch.Tensor = torch.ops.npu.npu_format_cast(tensor, FRACTAL_NZ, customize_dtype=torch.int8)
    return found


def int4_as_integers(weight: WeightTensors) -> torch.Tensor:
    """int8 [..., N, K] of int4 codes [..., N, K/2]: the same numbers, in twice the bytes."""
    stored = weight.tensors["codes"]
    codes = torch.empty((*stored.shape[:-1], weight.in_features), dtype=torch.int8, device=stored.device)
    codes[..., 0::2], codes[..., 1::2] = _signed_halves(stored)
    return codes


def _signed_halves(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 numbers in the lower and in the upper nibbles of bytes of int4 codes."""
    # The upper nibble keeps its sign when it is shifted down; the lower one is shifted up first.
    return (stored.view(torch.uint8) << 4).view(torch.int8) >> 4, stored.view(torch.int8) >> 4


def weight_only(weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
    """`codes` int8 [..., N, K] or int32 [..., N, K/8], `scale` and maybe `offset` [..., G, N] in the layer's dtype.

    Codes without a sign are stored minus half their range: w = (code - zero) * scale = (stored + offset) * scale.
    The operator takes scales of 16 bits only. Of one scale per row (G = 1) it gets the power of two below, which makes
    its weight exact, and the rest is a `factor` f32 [..., N] for the output; scales of groups are rounded. Raises
    UnsupportedCombinationError for zero points that are no integers.
    """
    quant = weight.scheme.weight
    dtype = DTYPES[spec.dtype]
    codes = weight.tensors["codes"].contiguous()
    half = 0
    if quant.element.startswith("uint"):
        half = 1 << (quant.bits - 1)
        codes = codes.view(torch.uint8) ^ (0x88 if quant.bits == 4 else 0x80)
    tensors = {
        "codes": codes.view(torch.int32 if quant.bits == 4 else torch.int8),
    }
    scale = weight.tensors["scale"].to(torch.float32)
    if scale.shape[-1] == 1:
        scale, tensors["factor"] = _power_below(scale, dtype)
    tensors["scale"] = scale.to(dtype).transpose(-2, -1).contiguous()
    zero = weight.tensors.get("zero_point")
    if zero is not None or half:
        offset = torch.full_like(weight.tensors["scale"], half, dtype=torch.float32)
        if zero is not None:
            if not torch.equal(zero, torch.round(zero.to(torch.float32)).to(zero.dtype)):
                reason = "needs zero points that are integers"
                raise UnsupportedCombinationError(SPEC.name, spec.op, weight.scheme.id, [spec.name], [reason])
            offset = offset - zero.to(torch.float32)
        tensors["offset"] = offset.to(dtype).transpose(-2, -1).contiguous()
    return tensors


def _power_below(scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two f32 [..., N, 1] near `scale`, by which 8-bit codes stay numbers of `dtype`; the rest [..., N]."""
    lowest, highest = (-14, 7) if dtype == torch.float16 else (-120, 119)
    exponent = (torch.frexp(scale)[1] - 1).clamp(lowest, highest)
    power = torch.ldexp(torch.ones_like(scale), exponent)
    return power, (scale / power).squeeze(-1).contiguous()


#: Twice the values of e2m1 codes.
_DOUBLED_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)


def mxfp4_as_int8(weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
    """MXFP4 as int8 under the same group scales, halved: exact. `codes` int8 [N, K], `scale` [K/32, N] in bf16."""
    stored = weight.tensors["codes"]
    table = torch.tensor((*_DOUBLED_FP4, *(-value for value in _DOUBLED_FP4)), dtype=torch.int8, device=stored.device)
    scale = e8m0_scale(weight.tensors["scale"], spec.name)
    codes = torch.empty((*stored.shape[:-1], weight.in_features), dtype=torch.int8, device=stored.device)
    codes[..., 0::2], codes[..., 1::2] = table[(stored & 15).to(torch.int64)], table[(stored >> 4).to(torch.int64)]
    halved = torch.ldexp(torch.ones(scale.shape, device=scale.device), scale.to(torch.int32) - 128)
    return {"codes": codes, "scale": halved.to(torch.bfloat16).transpose(-2, -1).contiguous()}


def packed_along_rows(words: torch.Tensor) -> torch.Tensor:
    """int32 [E, K, N/8] of int4 codes that lie as int32 [E, N, K/8]: packed along the other axis, expert by expert."""
    packed = []
    for stack in words:
        nibbles = _nibbles(stack)
        signed = torch.where(nibbles >= 8, nibbles - 16, nibbles)
        packed.append(torch.ops.npu.npu_convert_weight_to_int4pack(signed.t().contiguous()))
    return torch.stack(packed)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., 8 W] from 0 to 15 of words [..., W], the lowest bits first."""
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 0xF).flatten(-2)


#: Rows of K that share a scale in the vendor's product of int4 by int8.
INT4_GROUP = 256
#: What sums of int4 by int8 are multiplied by inside the operator, beside scales below 2^-5: at K of 18432, the longest
#: that it takes, neither half of a sum (8 * 8 * K * 2^-5) nor all of it (127 * 8 * K * 2^-5 * 2^-7) leaves f16.
INT4_DAMPING = 2.0**-7
_INT4_SCALE_EXPONENT = -5


def int4_by_int8(weight: WeightTensors) -> dict[str, torch.Tensor]:
    """`codes` int32 [E, K, N/8], `scale` int64 [E, K/256, N], `assist` f32 [E, N] and `factor` f32 [E, N].

    Scales of rows and groups alike are given per 256 columns, their f32 bits in an int64, divided by a power of two
    per row that `factor` gives back together with `INT4_DAMPING`. `assist` is 8 * sum(codes * scale): the operator
    takes 8 from the lower half of every input.
    """
    scale = weight.tensors["scale"].to(torch.float32)
    scale = scale.expand(*scale.shape[:-1], weight.in_features // INT4_GROUP)
    largest = scale.amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, torch.frexp(largest)[1] - _INT4_SCALE_EXPONENT, 0)
    scale = torch.ldexp(scale, -exponent)
    assist = torch.empty(scale.shape[:-1], dtype=torch.float32, device=scale.device)
    for expert, codes in enumerate(weight.tensors["codes"]):
        low, high = _signed_halves(codes)
        sums = (low.to(torch.int32) + high).view(*codes.shape[:-1], -1, INT4_GROUP // 2).sum(-1)
        assist[expert] = 8 * (sums * scale[expert]).sum(-1)
    return {
        "codes": packed_along_rows(nibble_words(weight)),
        "scale": scale.transpose(1, 2).contiguous().view(torch.int32).to(torch.int64),
        "assist": assist,
        "factor": torch.ldexp(torch.ones_like(assist), exponent.squeeze(-1)) / INT4_DAMPING,
    }


#: Values of e2m1 codes, the sign in the highest bit; of zero as well.
_FP4 = (*(value / 2 for value in _DOUBLED_FP4), *(value / -2 for value in _DOUBLED_FP4))


def fp4_words_in_nz(words: torch.Tensor) -> torch.Tensor:
    """int32 words of eight fp4 codes [E, K, N/8] in the NZ format.

    The operator that packs takes numbers in float32, and gives float32 whose bits these words are.
    """
    return _fp4_in_nz(_nibbles(words))


def _fp4_in_nz(codes: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor(_FP4, device=codes.device)[codes.to(torch.int64)].contiguous()
    laid_out = torch.ops.npu.npu_format_cast(numbers, FRACTAL_NZ, customize_dtype=torch.bfloat16)
    packed: torch.Tensor = torch.ops.npu.npu_convert_weight_to_int4pack(laid_out)
    return packed.view(torch.int32)


def fp4_by_sixteen_bits(weight: WeightTensors, spec: LayerSpec) -> dict[str, torch.Tensor]:
    """`codes` int32 [E, K, N/8] of fp4 in the NZ format, `scale` uint8 [E, K/32, N]; raises InvalidCheckpointError for
    NaN among scales."""
    scale = e8m0_scale(weight.tensors["scale"], spec.name)
    return {
        "codes": _fp4_in_nz(_nibbles(nibble_words(weight)).transpose(1, 2)),
        "scale": scale.transpose(1, 2).contiguous(),
    }
