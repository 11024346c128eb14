"""The device's quantizers of MX formats, byte for byte.

Sources: the kernels and golden scripts of hicann/ops-nn (`dynamic_mx_quant`, `dynamic_dual_level_mx_quant`) and the
documentation of op-plugin. Algorithm 2 has no golden script of the vendor: it is read from the kernel's source.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from omniplat.emulation.ascend.dtypes import FP4, element
from omniplat.emulation.core import Emulation
from omniplat.emulation.microscaling import E2M1, MIDPOINTS, e8m0_values, pack_nibbles

_BLOCK = 32
_DUAL_BLOCK = 512
_NAN_BYTE = 255
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Format:
    """`largest_exponent` of a number, `largest` number, and the bits of fp32(1 / largest)."""

    largest_exponent: int
    largest: float
    inverse_bits: int = 0


_FORMATS: dict[torch.dtype | str, _Format] = {
    FP4: _Format(2, 6.0),
    torch.float8_e4m3fn: _Format(8, 448.0, 0x3B124925),
    torch.float8_e5m2: _Format(15, 57344.0, 0x37924925),
}
#: fp32(1/6), by which the dual level's first scale is derived.
_SIXTH_BITS = 0x3E2AAAAB
#: What is added to a bf16 maximum so that its exponent carries: above a mantissa of 1.5, or of 1.75.
_CARRY = {0.0: 0x3F, 6.0: 0x3F, 7.0: 0x1F}


def from_bits(bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def split_last(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """[..., K] as [..., K / size, size]."""
    return tensor.reshape(*tensor.shape[:-1], tensor.shape[-1] // size, size)


def fp4_codes(values: torch.Tensor, round_mode: str) -> torch.Tensor:
    """uint8 codes of fp4 for f32 `values`: rint is to even, round half away from zero, floor towards minus infinity."""
    magnitude = values.abs().clamp(max=E2M1[-1]).contiguous()
    negative = torch.signbit(values)
    middle = torch.tensor(MIDPOINTS)
    if round_mode == "rint":
        below = torch.bucketize(magnitude, middle)
        # bucketize sends a tie down; where the code below is odd, even is up
        tie = magnitude == middle[below.clamp(max=len(MIDPOINTS) - 1)]
        code = below + (tie & (below % 2 == 1)).to(below.dtype)
    elif round_mode == "round":
        code = torch.bucketize(magnitude, middle, right=True)
    else:
        numbers = torch.tensor(E2M1)
        down = torch.bucketize(magnitude, numbers, right=True) - 1
        code = torch.where(negative, torch.bucketize(magnitude, numbers), down)
    return (code | (negative.to(code.dtype) << 3)).to(torch.uint8)


def _exponent(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Biased exponent and mantissa bits of f32 `values` that are not negative."""
    bits = values.contiguous().view(torch.int32)
    return bits >> 23, bits & 0x7FFFFF


def scale_bytes(amax: torch.Tensor, fmt: torch.dtype | str, algorithm: int, dst_type_max: float) -> torch.Tensor:
    """e8m0 bytes of blocks with maximum `amax` (f32): 0 floors, 1 rounds amax / largest up, 2 is fp4's own."""
    parameters = _FORMATS[fmt]
    biased, _ = _exponent(amax)
    special = biased == _NAN_BYTE
    if algorithm == 0:
        found = (biased - parameters.largest_exponent).clamp(min=0)
    elif algorithm == 1:
        exponent, mantissa = _exponent(amax * from_bits(parameters.inverse_bits))
        up = ((exponent > 0) & (exponent < 254) & (mantissa > 0)) | ((exponent == 0) & (mantissa > 0x400000))
        found = exponent + up.to(exponent.dtype)
    elif dst_type_max in _CARRY:
        bits = amax.to(torch.bfloat16).view(torch.int16).to(torch.int32) + _CARRY[dst_type_max]
        found = ((bits >> 7) - parameters.largest_exponent).clamp(min=0)
    else:
        exponent, mantissa = _exponent(amax / dst_type_max)
        found = exponent + (mantissa > 0).to(exponent.dtype)
    return torch.where(special, _NAN_BYTE, found).to(torch.uint8)


def mx_quantize(
    x: torch.Tensor, fmt: torch.dtype | str, round_mode: str, algorithm: int, dst_type_max: float, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., K] (fp4: packed) and scales uint8 [..., ceil(K / block / 2), 2], padded by a byte 0, of f32 `x`."""
    columns = x.shape[-1]
    tiles = split_last(F.pad(x, (0, -columns % block)), block)
    scale = scale_bytes(tiles.abs().amax(-1), fmt, algorithm, dst_type_max)
    scaled = (tiles / e8m0_values(scale).unsqueeze(-1)).flatten(-2)[..., :columns]
    padded = split_last(F.pad(scale, (0, scale.shape[-1] % 2)), 2)
    if fmt == FP4:
        return pack_nibbles(fp4_codes(scaled, round_mode)), padded
    assert isinstance(fmt, torch.dtype)
    largest = _FORMATS[fmt].largest
    return scaled.clamp(-largest, largest).to(fmt), padded


def dynamic_mx_quant(
    emulation: Emulation,
    input: torch.Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_dynamic_mx_quant along the last axis: (codes, scales uint8 [..., ceil(K/64), 2])."""
    op = "npu_dynamic_mx_quant"
    require = emulation.require
    fmt = element(emulation, op, dst_type, FP4)
    algorithm = scale_alg or 0
    require(op, fmt in _FORMATS, f"dst_type {dst_type} is no MX format")
    require(op, input.dtype in (*_HALF, torch.float32), f"the input cannot be {input.dtype}")
    require(
        op, block_size % 32 == 0 and 0 < block_size <= 1024, f"block_size {block_size} is no multiple of 32 to 1024"
    )
    require(op, input.dtype != torch.float32 or block_size == _BLOCK, "a float32 input needs blocks of 32")
    modes = ("rint", "floor", "round") if fmt == FP4 else ("rint",)
    require(op, round_mode in modes, f"round_mode {round_mode!r} is none of {', '.join(modes)}")
    require(op, fmt != FP4 or input.shape[-1] % 2 == 0, "the last axis of an fp4 output has to be even")
    require(op, algorithm in (0, 1, 2), f"scale_alg {algorithm} is none of 0, 1, 2")
    require(op, algorithm != 1 or fmt != FP4, "scale_alg 1 is for fp8")
    if algorithm == 2:
        require(op, fmt == FP4 and block_size == _BLOCK, "scale_alg 2 is for fp4 in blocks of 32")
        require(op, dst_type_max == 0 or 6 <= dst_type_max <= 12, f"dst_type_max {dst_type_max} is not 0 or in [6, 12]")
    if axis not in (-1, input.dim() - 1):
        raise NotImplementedError(f"{op}: along axis {axis} nothing is emulated")
    if max_low_bound:
        raise NotImplementedError(f"{op}: max_low_bound is not emulated")
    return mx_quantize(input.to(torch.float32), fmt, round_mode, algorithm, dst_type_max, block_size)


def dynamic_dual_level_mx_quant(
    emulation: Emulation, input: torch.Tensor, *, smooth_scale: torch.Tensor | None = None, round_mode: str = "rint"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu_dynamic_dual_level_mx_quant: fp4 codes [..., K/2], f32 [..., ceil(K/512)], uint8 [..., ceil(K/64), 2]."""
    op = "npu_dynamic_dual_level_mx_quant"
    emulation.require(op, input.dtype in _HALF, f"the input cannot be {input.dtype}")
    emulation.require(op, input.shape[-1] % 2 == 0, "the last axis has to be even")
    emulation.require(op, round_mode in ("rint", "floor", "round"), f"round_mode {round_mode!r} is not known")
    columns = input.shape[-1]
    if smooth_scale is not None:
        fits = smooth_scale.dtype == input.dtype and tuple(smooth_scale.shape) == (columns,)
        emulation.require(op, fits, "smooth_scale needs the input's dtype and one number per column")
        emulation.record(op, "smooth-scale", "op-plugin's documentation says that it is not supported yet")
        input = input * smooth_scale
    tiles = split_last(F.pad(input.to(torch.float32), (0, -columns % _DUAL_BLOCK)), _DUAL_BLOCK)
    finite = torch.where(torch.isfinite(tiles), tiles.abs(), 0.0)
    level0 = finite.amax(-1) * from_bits(_SIXTH_BITS)
    level0 = torch.where(level0 < 2.0**-126, 0.0, level0)
    divided = torch.where(level0.unsqueeze(-1) == 0, 0.0, tiles / level0.unsqueeze(-1))
    inner = divided.to(input.dtype).to(torch.float32).flatten(-2)[..., :columns]
    codes, level1 = mx_quantize(inner, FP4, round_mode, 0, 0.0, _BLOCK)
    return codes, level0, level1
