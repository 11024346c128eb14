"""Quantizing activations to fp8 with one scale per group of columns: codes and scales, kept apart.

Codes and scales are the oracle's byte for byte (`omniplat.oracle.quantize_activation`). `quantize_groups` takes
Triton's form on a device that Triton serves, and the plain one elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from omniplat.portable.quantize import has_triton, quantize_rows_torch
from omniplat.scheme import TensorQuant

#: Columns of a group: what weights in blocks have beside them.
GROUP = 128
FLOAT_RULES = ("", "absmax", "half-range", "absmax-clamped", "absmax-reciprocal")
#: Of scales that are powers of two (DeepSeek's ue8m0): no code is ever cut off.
POWER_RULES = ("ceil", "rceil")


def why_not(quant: TensorQuant | None) -> str:
    """What keeps an activation from being quantized here; "" where nothing does."""
    if quant is None or quant.element != "fp8_e4m3" or quant.granularity != "group" or quant.group_size != GROUP:
        return f"activations in fp8 e4m3 with a scale for every {GROUP} columns"
    if not quant.dynamic or not quant.symmetric or quant.second_scale or quant.scale_format not in ("f32", "e8m0"):
        return "symmetric, dynamic activations with one level of scales, in f32 or e8m0"
    rules = POWER_RULES if quant.scale_format == "e8m0" else FLOAT_RULES
    if quant.scale_rule not in rules:
        return f"activation scales by one of {', '.join(filter(None, rules))}"
    if quant.rounding not in ("", "nearest-even"):
        return "activations rounded to nearest even"
    return ""


def quantize_groups(
    x: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [M, K], M > 0, in bf16, f16 or f32, to codes uint8 [M, K] (bytes of e4m3fn) and multipliers f32 [G, M].

    G = ceil(K / 128), the last group may be partial; the scales of a group lie side by side. `pre_scale` [K] is applied
    first. `quant` is one for which `why_not` says nothing. A group with NaN or Inf gets a scale of NaN or Inf.
    """
    if x.is_cuda and has_triton():
        from omniplat.portable import quantize_groups_triton

        return quantize_groups_triton.quantize_groups(x, quant, pre_scale)
    return quantize_groups_torch(x, quant, pre_scale)


def quantize_groups_torch(
    x: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_groups` in plain torch."""
    rows, columns = x.shape
    values = x.contiguous().to(torch.float32)
    if pre_scale is not None:
        values = values * pre_scale
    groups = F.pad(values, (0, -columns % GROUP)).view(-1, GROUP)
    if quant.scale_format == "e8m0":
        codes, scale = _by_powers(groups)
    else:
        codes, scale = quantize_rows_torch(groups, replace(quant, granularity="token", group_size=0), None, None)
    return codes.view(rows, -1)[:, :columns].contiguous(), scale.view(rows, -1).t().contiguous()


def _by_powers(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least powers of two with which no code is cut off, at least 2^-127; NaN for groups with NaN or Inf."""
    amax = groups.abs().amax(1, keepdim=True)
    fraction, power = torch.frexp(amax / torch.full_like(amax, 448.0))
    exponent = torch.where(fraction == 0.5, power - 1, power)
    is_finite = torch.isfinite(amax)
    exponent = torch.where(is_finite & (amax > 0), exponent.clamp(min=-127), -127)
    scaled = torch.ldexp(groups.to(torch.float64), -exponent).to(torch.float32).clamp_(-448.0, 448.0)
    scale = torch.ldexp(torch.ones_like(amax, dtype=torch.float64), exponent).to(torch.float32)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), torch.where(is_finite, scale, torch.nan)
