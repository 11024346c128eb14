"""Quantizing to MXFP8, MXFP4 and NVFP4, weights and activations alike: codes and scales as files hold them, kept apart.

Codes and scales are the oracle's byte for byte (`omniplat.oracle.quantize_weight`), and stand for what
`omniplat.oracle.quantize_activation` gives. `quantize_blocks` takes Triton's form on a device that Triton serves,
and the plain one elsewhere.
"""

from __future__ import annotations

import torch

from omniplat.portable.quantize import has_triton
from omniplat.scheme import TensorQuant

#: What is quantized here: (element, scale format, group size, second scale).
_FORMS = (
    ("fp8_e4m3", "e8m0", 32, ""),
    ("fp4_e2m1", "e8m0", 32, ""),
    ("fp4_e2m1", "e4m3", 16, "global"),
)
#: scale format -> its rules; see `omniplat.oracle.scales`.
_RULES = {
    "e8m0": ("", "floor", "even", "even-m1", "ceil", "rceil"),
    "e4m3": ("", "absmax", "half-range", "absmax-clamped", "absmax-reciprocal"),
}
#: What `element_of` gives.
_ELEMENTS = {"fp8_e4m3": (448.0, 8, 3), "fp4_e2m1": (6.0, 2, 1)}
#: Scales in e4m3 end here; those of absmax-clamped begin with the least positive one.
LARGEST_SCALE, LEAST_SCALE = 448.0, 2.0**-9


def why_not(quant: TensorQuant | None) -> str:
    """What keeps a weight or an activation from being quantized here; "" where nothing does."""
    if quant is None or quant.granularity != "group" or not quant.symmetric:
        return "mxfp8, mxfp4 or nvfp4"
    if (quant.element, quant.scale_format, quant.group_size, quant.second_scale) not in _FORMS:
        return "mxfp8, mxfp4 or nvfp4"
    rules = _RULES[quant.scale_format]
    if quant.scale_rule not in rules:
        return f"scales by one of {', '.join(filter(None, rules))}"
    return "" if quant.rounding in ("", "nearest-even") else "codes rounded to nearest even"


def element_of(quant: TensorQuant) -> tuple[float, int, int]:
    """Of the element: the largest number that it has, the exponent of that, and the bits of a stored mantissa."""
    return _ELEMENTS[quant.element]


def rounds_up_from(quant: TensorQuant) -> int:
    """What is added to the bits of a group's maximum so that its exponent becomes the next, if the rule rounds it up.

    0 for rules that do not.
    """
    if quant.scale_rule not in ("even", "even-m1"):
        return 0
    return 1 << (22 - (1 if quant.scale_rule == "even-m1" else element_of(quant)[2]))


def quantize_blocks(
    x: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [M, K], M > 0, in bf16, f16 or f32, K a multiple of the group, to codes and group scales, both uint8.

    Codes are [M, K] (bytes of e4m3fn) or [M, K/2] (two of e2m1 in a byte, the even column in the low nibble). Scales
    are [M, K/group], bytes of e8m0 or e4m3fn. `pre_scale` [K] is applied first. `global_scale`, [1, 1] or [M, 1], is
    NVFP4's multiplier, positive: f32, or f64 where it stands for a divisor; None for MX. `quant` is one for which
    `why_not` says nothing.

    A group with NaN or Inf gets the scale NaN (255 of e8m0, 0x7F of e4m3) and codes 0; so does, by absmax-reciprocal, a
    group of zeros under a multiplier whose reciprocal overflows. Zeros keep their sign, but in groups of NVFP4 whose
    scale, with its multiplier, is 0: their codes are 0.
    """
    if x.is_cuda and has_triton():
        from omniplat.portable import quantize_blocks_triton

        return quantize_blocks_triton.quantize_blocks(x, quant, pre_scale, global_scale)
    return quantize_blocks_torch(x, quant, pre_scale, global_scale)


def quantize_blocks_torch(
    x: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_blocks` in plain torch."""
    values = x.contiguous().to(torch.float32)
    if pre_scale is not None:
        values = values * pre_scale
    rows, columns = values.shape
    groups = values.view(rows, -1, quant.group_size)
    amax = groups.abs().amax(2)
    if global_scale is None:
        scales, inverse = _powers(amax, quant)
        scaled = torch.where(torch.isfinite(amax)[:, :, None], groups * inverse[:, :, None], 0.0)
    else:
        scales, scale = _e4m3_scales(amax, quant.scale_rule, global_scale)
        # values of a group whose scale is 0 are lost, as are those beside a NaN
        counts = scale > 0
        safe = torch.where(counts, scale, 1.0)[:, :, None]
        # On CUDA torch divides by a number as it multiplies by the reciprocal, which rounds twice: divide by tensors.
        by_product = quant.scale_rule == "absmax-reciprocal"
        scaled = groups * (torch.ones_like(safe) / safe) if by_product else groups / safe
        scaled = torch.where(counts[:, :, None], scaled, 0.0)
    scaled = scaled.view(rows, columns)
    if quant.element == "fp8_e4m3":
        return scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8), scales
    codes = _e2m1_codes(scaled)
    return codes[:, ::2] | (codes[:, 1::2] << 4), scales


def _powers(amax: torch.Tensor, quant: TensorQuant) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as bytes of e8m0, and f32 [M, G] what values are multiplied by: at most 2^127, for a scale of 2^-127."""
    largest, exponent, _ = element_of(quant)
    if quant.scale_rule in ("ceil", "rceil"):
        bits = (amax / torch.full_like(amax, largest)).view(torch.int32)
        # what lies above a power of two belongs to the next; under 2^-126 that is 2^-126 or, at the end, 2^-127
        over = (bits & 0x7FFFFF) > torch.where(bits < 0x800000, 0x400000, 0)
        field = (bits >> 23) + over.to(torch.int32)
        # the quotient is 0, but the group is not: by the rule its scale is 1, and its codes are 0
        field = torch.where((bits == 0) & (amax > 0), 127, field)
    else:
        field = (((amax.view(torch.int32) + rounds_up_from(quant)) >> 23) - exponent).clamp(min=0)
    inverse = ((254 - field) << 23).view(torch.float32)
    return torch.where(torch.isfinite(amax), field, 255).to(torch.uint8), inverse


def _e4m3_scales(amax: torch.Tensor, rule: str, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4's group scales as bytes of e4m3fn, and f32 [M, G] what they are under the global scale."""
    largest = torch.full_like(amax, _ELEMENTS["fp4_e2m1"][0])
    if rule == "absmax-clamped":
        local = (amax / (largest * global_scale)).to(torch.float32)
        local = torch.where(local == 0, 1.0, local).clamp(min=LEAST_SCALE)
    elif rule == "absmax-reciprocal":
        sixth = torch.ones_like(largest) / largest
        local = (amax * sixth * (torch.ones_like(global_scale) / global_scale)).to(torch.float32)
        # what the scale is multiplied by is the reciprocal of a divisor, rounded to f32
        global_scale = global_scale.to(torch.float32)
    else:
        local = (amax / largest / global_scale).to(torch.float32)
    # one NaN for all of them: the sign of 0 times Inf depends on the processor
    local = torch.where(torch.isfinite(amax) & ~torch.isnan(local), local, torch.nan)
    stored = local.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    return stored.view(torch.uint8), (stored.to(torch.float32) * global_scale).to(torch.float32)


def _e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes 0..15, uint8, to nearest even, saturating. NaN, which is 0 times an Inf, has the code of -0."""
    magnitude = values.abs()
    bits = magnitude.clamp(max=6.0).view(torch.int32)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    # 2^22: its unit is 0.5, the spacing below 1
    subnormal = (magnitude + 4194304.0).view(torch.int32) - 0x4A800000
    codes = torch.where(magnitude < 1, subnormal, normal) | torch.where(torch.signbit(values), 8, 0)
    return torch.where(torch.isnan(values), 8, codes).to(torch.uint8)
