"""MX activations for FP8 units: rounded to the MX grid, then held as e4m3 codes under one power of two per token.

`omniplat.oracle.reencode.regroup_activation` is the definition; both forms here give its bytes. `regroup_rows` takes
Triton's form on a device that Triton serves, and the plain one elsewhere.
"""

from __future__ import annotations

import torch

from omniplat.portable.quantize import MAX_COLUMNS, has_triton
from omniplat.scheme import TensorQuant

#: scale rule -> how much of a mantissa is rounded up to the next power of two; see `omniplat.oracle.scales`.
_RULES = ("", "floor", "even", "even-m1", "ceil", "rceil")
GROUP = 32
#: Binades that a token's largest group is moved up: 6 * 2^6 = 384 is the largest code of e2m1 that fits e4m3.
HEADROOM = 6
#: The least exponent that a token is scaled for (`omniplat.oracle.reencode.LEAST_TOKEN_EXPONENT`).
LEAST_EXPONENT = -100
_ABSENT = -1000


def why_not(quant: TensorQuant | None, columns: int) -> str:
    """What keeps an activation from being regrouped here; "" where nothing does."""
    if quant is None or quant.element != "fp4_e2m1" or quant.scale_format != "e8m0" or quant.group_size != GROUP:
        return "mxfp4 activations"
    if quant.second_scale:
        return "activations with one level of scales"
    if quant.scale_rule not in _RULES:
        return f"activation scales by one of {', '.join(filter(None, _RULES))}"
    if quant.rounding not in ("", "nearest-even"):
        return "activations rounded to nearest even"
    return f"columns in multiples of {GROUP}" if columns % GROUP else ""


def regroup_rows(
    x: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None, *, releases: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [M, K], M > 0, in bf16, f16 or f32, to codes uint8 [M, K] (bytes of e4m3fn) and multipliers f32 [M, 1].

    `pre_scale` [K] is applied first. `quant` is one for which `why_not` says nothing. A token with NaN or Inf gets
    the scale NaN. `releases` as of `omniplat.portable.quantize.quantize_rows`.
    """
    if x.is_cuda and x.shape[1] <= MAX_COLUMNS and has_triton():
        from omniplat.portable import mx_grid_triton

        return mx_grid_triton.regroup_rows(x, quant, pre_scale, releases=releases)
    return regroup_rows_torch(x, quant, pre_scale)


def regroup_rows_torch(
    x: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`regroup_rows` in plain torch."""
    values = x.contiguous().to(torch.float32)
    if pre_scale is not None:
        values = values * pre_scale
    rows, columns = values.shape
    bad = ~torch.isfinite(values).all(1, keepdim=True)
    groups = torch.where(bad, 0.0, values).view(rows, -1, GROUP)
    amax = groups.abs().amax(2)
    exponent = _exponents(amax, quant.scale_rule)
    grid = _round_e2m1(_scaled(groups, -exponent[:, :, None]))
    occupied = grid.abs().amax(2) > 0
    top = torch.where(occupied, exponent, _ABSENT).amax(1, keepdim=True)
    shift = torch.where(top == _ABSENT, 0, top.clamp(min=LEAST_EXPONENT) - HEADROOM)
    codes = _scaled(grid, (exponent - shift)[:, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.where(bad, torch.nan, _scaled(torch.ones_like(shift, dtype=torch.float32), shift))
    return codes.view(torch.uint8), scale


def _exponents(amax: torch.Tensor, rule: str) -> torch.Tensor:
    """int32 exponents of e2m1 groups with the finite maximum `amax`, f32; -127 for 0."""
    if rule in ("ceil", "rceil"):
        fraction, power = torch.frexp(amax / torch.full_like(amax, 6.0))
        result = torch.where(fraction == 0.5, power - 1, power)
    else:
        fraction, power = torch.frexp(amax)
        result = power - 3
        if rule in ("even", "even-m1"):
            result = result + (fraction >= 0.875).to(torch.int32)
    return torch.where(amax == 0, -127, result.clamp(-127, 127)).to(torch.int32)


def _scaled(values: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """values * 2^exponent, rounded once to f32."""
    return torch.ldexp(values.to(torch.float64), exponent).to(torch.float32)


def _round_e2m1(values: torch.Tensor) -> torch.Tensor:
    """To nearest even among 0, 0.5, 1, 1.5, 2, 3, 4 and 6, saturating."""
    magnitude = values.abs().clamp(max=6.0)
    fine, middle, coarse = torch.round(magnitude * 2) * 0.5, torch.round(magnitude), torch.round(magnitude * 0.5) * 2
    return torch.where(magnitude < 2, fine, torch.where(magnitude < 4, middle, coarse)).copysign(values)
