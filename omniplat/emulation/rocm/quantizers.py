"""AITER's quantizers: rules for scales by version, rounding, and layouts of what they return.

From csrc/kernels/quant_kernels.cu, aiter/ops/quant.py, aiter/utility/fp4_utils.py and the Triton kernels of ROCm/aiter
at e4048607. Reciprocals are exact here, where the device has approximations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from packaging.version import Version

from omniplat.emulation.core import Emulation
from omniplat.emulation.microscaling import (
    e2m1_codes,
    e8m0_values,
    exponent_above,
    exponent_field,
    in_groups,
    pack_nibbles,
)
from omniplat.emulation.rocm.layouts import shuffle_scale_bytes

#: From this release on scales of MXFP4 are rounded up; before, to the even mantissa bit.
CEIL_FROM = Version("0.1.16")
_FP4_MAX = 6.0
_FP8_MAX = 448.0
_FP4_EXPONENT = 2
#: Half of e2m1's mantissa bit in an f32.
_EVEN_STEP = 1 << 21
_GROUP_MINIMUM = 1e-10
_HALF = (torch.float16, torch.bfloat16)


def fp8_dtype(arch: str) -> torch.dtype:
    """The fp8 that an architecture's matrix units read."""
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


def mxfp4_scale(amax: torch.Tensor, rule: str) -> torch.Tensor:
    """e8m0 bytes, uint8, for groups with absolute maximum `amax`, f32: "ceil" or "even"; 255 where it is not finite."""
    if rule == "ceil":
        return exponent_above(amax / _FP4_MAX).to(torch.uint8)
    rounded = ((amax.contiguous().view(torch.int32) + _EVEN_STEP) & ~0x7FFFFF).view(torch.float32)
    return exponent_field(rounded / 2.0**_FP4_EXPONENT).to(torch.uint8)


def mxfp4(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., K], K even, to packed codes uint8 [..., K/2], rounded to nearest even, and bytes [..., ceil(K/32)]."""
    columns = x.shape[-1]
    padded = F.pad(x.to(torch.float32), (0, -columns % 32))
    groups = in_groups(padded, padded.shape[-1] // 32)
    scale = mxfp4_scale(groups.abs().amax(-1), rule)
    codes = e2m1_codes((groups / e8m0_values(scale).unsqueeze(-1)).flatten(-2)[..., :columns], "nearest-even")
    return pack_nibbles(codes), scale


def mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., K] to float8_e4m3fn [..., K], saturating, and bytes uint8 [..., K/32]: the next power of two above a
    group's amax, 1e-10 at least, times the f32 nearest to 1/448 (csrc/include/mx_quant_utils.h, 0.1.17)."""
    groups = in_groups(x.to(torch.float32), x.shape[-1] // 32)
    amax = groups.abs().amax(-1).clamp(min=_GROUP_MINIMUM)
    scale = exponent_above(amax * torch.tensor(1.0 / _FP8_MAX, dtype=torch.float32)).to(torch.uint8)
    scaled = groups / e8m0_values(scale).unsqueeze(-1)
    return scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).flatten(-2), scale


def per_token(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., K] to codes and f32 scales [..., 1], amax over the dtype's largest number; 1 for a row of zeros."""
    largest = float(torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max)
    values = x.to(torch.float32)
    scale = values.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = values / scale
    if not dtype.is_floating_point:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype), scale


def rule_of(emulation: Emulation) -> str:
    """How the HIP quantizers of the emulated release derive scales."""
    return "ceil" if emulation.version >= CEIL_FROM else "even"


# -- the functions ----------------------------------------------------------------------------------------------


def per_1x32_f4_quant_hip(
    emulation: Emulation,
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype = torch.float4_e2m1fn_x2,
    shuffle: bool = False,
    num_rows: torch.Tensor | None = None,
    num_rows_factor: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 of `x` [M, K]: float4_e2m1fn_x2 [M, K/2] and e8m0 scales [M, K/32], or shuffled and padded.

    Padding is not written.
    """
    op = "aiter.per_1x32_f4_quant_hip"
    emulation.require(op, emulation.arch != "gfx942", "fp4 is not compiled for gfx942")
    emulation.require(op, scale is None, "unsupported: static per token quant")
    emulation.require(op, quant_dtype == torch.float4_e2m1fn_x2, f"unsupported quant_dtype {quant_dtype}")
    emulation.require(op, num_rows is None, "counts of rows are not emulated")
    emulation.require(op, x.dim() == 2, f"x has two dimensions, found {list(x.shape)}")
    emulation.require(op, x.dtype in _HALF, f"not implemented for {x.dtype}")
    emulation.require(op, x.shape[1] % 32 == 0, f"n={x.shape[1]} must be divisible by 32")
    if x.stride(1) != 1:
        emulation.record(op, "strides-ignored", "rows are read as if they were contiguous")
    codes, scales = mxfp4(x, rule_of(emulation))
    held = shuffle_scale_bytes(scales) if shuffle else scales
    return codes.view(torch.float4_e2m1fn_x2), held.view(torch.float8_e8m0fnu)


def dynamic_mxfp4_quant(
    emulation: Emulation, x: torch.Tensor, scaling_mode: str = "even"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton's MXFP4: uint8 [M, K/2] and uint8 scales [M, ceil(K/32)], column by column. The rule is "even" always.

    Its kernel is compiled for gfx950 alone, of what is emulated.
    """
    op = "aiter.ops.triton.quant.dynamic_mxfp4_quant"
    emulation.require(op, emulation.arch == "gfx950", f"there is no MXFP4 on {emulation.arch}")
    emulation.require(op, x.dim() == 2, f"not enough values to unpack: {list(x.shape)}")
    emulation.require(op, (x.shape[1] // 2) % 2 == 0, "(N // 2) % 2 == 0")
    if scaling_mode != "even":
        emulation.record(op, "mode-ignored", f"{scaling_mode!r} is asked for, 'even' is used")
    codes, scale = mxfp4(x, "even")
    return codes, scale.t().contiguous().t()
