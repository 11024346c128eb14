"""Quantizers with float scales, and what packs integers of 4 bits.

The division differs by generation: a5 divides by the scale, a2 and a3 multiply by 127 / amax and give back its inverse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omniplat.emulation.ascend.dtypes import FP4, INT4, element
from omniplat.emulation.ascend.layout import copy_format
from omniplat.emulation.ascend.mx import fp4_codes, split_last
from omniplat.emulation.core import Emulation
from omniplat.emulation.microscaling import e2m1_values

#: Bits of a scale that the fixed-point dequantization unit keeps: the lowest 13 of an f32 are dropped.
SCALE_MASK = 0xFFFFE000 - (1 << 32)
_HALF = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Columns that share a scale of npu_dynamic_block_quant.
_BLOCK = 128
_TOP: dict[torch.dtype | str, float] = {
    torch.int8: 127.0,
    INT4: 7.0,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
}


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """int32 [..., K/8] of integers from -8 to 7, the first one in the lowest nibble."""
    nibbles = split_last(values.to(torch.int64) & 0xF, 8)
    word = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """int8 [..., K] of words [..., K/8]."""
    nibbles = (packed.to(torch.int64).unsqueeze(-1) >> (4 * torch.arange(8))) & 0xF
    return torch.where(nibbles >= 8, nibbles - 16, nibbles).to(torch.int8).flatten(-2)


def dynamic_quant(
    emulation: Emulation,
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_dynamic_quant with one scale per token: codes [..., K] (int4: int32 [..., K/8]) and f32 [...].

    A row of zeros has the scale 0 here; what the device gives for one is not documented.
    """
    op = "npu_dynamic_quant"
    fmt = element(emulation, op, dst_type, torch.int8)
    emulation.require(op, input.dtype in _HALF, f"the input cannot be {input.dtype}")
    emulation.require(op, fmt in _TOP, f"dst_type {dst_type} is not possible")
    emulation.require(op, fmt in (torch.int8, INT4) or emulation.arch == "a5", "fp8 is for a5")
    emulation.require(op, fmt != INT4 or input.shape[-1] % 8 == 0, "the last axis has to be a multiple of 8")
    if group_index is not None or quant_mode != "pertoken" or dst_type_max:
        raise NotImplementedError(f"{op}: group_index, other modes than pertoken and dst_type_max are not emulated")
    values = input.to(torch.float32)
    if smooth_scales is not None:
        fits = smooth_scales.dtype == input.dtype and tuple(smooth_scales.shape) == (input.shape[-1],)
        emulation.require(op, fits, "smooth_scales needs the input's dtype and one number per column")
        values = values * smooth_scales.to(torch.float32)
    top = torch.tensor(_TOP[fmt])
    amax = values.abs().amax(-1, keepdim=True)
    is_zero = amax == 0
    safe = torch.where(is_zero, 1.0, amax)
    if emulation.arch == "a5":
        scale = safe * (torch.tensor(1.0) / top)
        scaled = values / scale
    else:
        factor = top / safe
        scaled = values * factor
        scale = torch.tensor(1.0) / factor
    scale = torch.where(is_zero, 0.0, scale).squeeze(-1)
    if isinstance(fmt, torch.dtype) and fmt != torch.int8:
        return scaled.clamp(-float(top), float(top)).to(fmt), scale
    codes = torch.round(scaled).clamp(-128 if fmt == torch.int8 else -8, float(top)).to(torch.int8)
    return (codes if fmt == torch.int8 else pack_int4(codes)), scale


def dynamic_block_quant(
    emulation: Emulation,
    x: torch.Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_dynamic_block_quant of single rows to fp8: codes [..., K] and f32 scales [..., ceil(K / 128)].

    By the golden script of hicann/ops-nn: maxima of what is finite over the format's largest number; a block of zeros
    has the scale 0 and codes of 0.
    """
    op = "npu_dynamic_block_quant"
    require = emulation.require
    fmt = element(emulation, op, dst_type, torch.int8)
    require(op, x.dtype in _HALF, f"x cannot be {x.dtype}")
    require(op, x.dim() in (2, 3), f"x is {x.dim()}-dimensional")
    require(op, min_scale >= 0, f"min_scale is {min_scale}")
    require(op, round_mode == "rint", f"round_mode {round_mode!r} is not rint")
    require(op, fmt in (torch.int8, *_FP8), f"dst_type {dst_type} is not possible")
    require(op, fmt == torch.int8 or emulation.arch == "a5", "fp8 is for a5")
    if fmt == torch.int8 or (row_block_size, col_block_size) != (1, _BLOCK) or min_scale or dst_type_max:
        raise NotImplementedError(f"{op}: only fp8 in blocks of 1 x 128 is emulated, without limits of scales")
    assert isinstance(fmt, torch.dtype)
    columns = x.shape[-1]
    values = x.to(torch.float32)
    tiles = split_last(F.pad(values, (0, -columns % _BLOCK)), _BLOCK)
    scale = torch.where(torch.isfinite(tiles), tiles.abs(), 0.0).amax(-1) / _TOP[fmt]
    wide = scale.repeat_interleave(_BLOCK, dim=-1)[..., :columns]
    # 0 / 0 is 0 here, as NaN is.
    scaled = (values / wide).clamp(-_TOP[fmt], _TOP[fmt])
    return torch.nan_to_num(scaled, nan=0.0).to(fmt), scale


def kronecker_quant(
    emulation: Emulation,
    x: torch.Tensor,
    kronecker_p1: torch.Tensor,
    kronecker_p2: torch.Tensor,
    clip_ratio: float | None = None,
    dst_dtype: int | None = None,
    dst_type_max: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_kronecker_quant to int4: P1 @ (x @ P2) of every matrix of x [M, A, B], as int32 [M, A, B/8] and f32 [M].

    By the kernel of hicann/ops-nn: the inner product is rounded to the input's dtype, the outer one to f16; the scale
    is amax * clip / 7, codes are rint(value * (7 / clip / amax)), saturating.
    """
    op = "npu_kronecker_quant"
    require = emulation.require
    fmt = element(emulation, op, dst_dtype, torch.int32)
    require(op, fmt in (torch.int32, FP4), f"dst_dtype {dst_dtype} is not possible")
    if fmt == FP4 or dst_type_max:
        raise NotImplementedError(f"{op}: fp4, for which the kernel does not read clip_ratio, is not emulated")
    clip = 1.0 if clip_ratio is None else clip_ratio
    require(op, x.dim() == 3 and x.dtype in _HALF, f"x is {x.dtype} {list(x.shape)}, needed 16 bits [M, A, B]")
    rows, left, right = x.shape
    require(op, 0 < rows <= 262144, f"x has {rows} matrices")
    require(op, 0 < left <= 256 and 0 < right <= 256, f"matrices of {left} x {right}: at most 256")
    require(op, right % 8 == 0, f"the last axis is {right}, needed a multiple of 8")
    for name, matrix, size in (("kronecker_p1", kronecker_p1, left), ("kronecker_p2", kronecker_p2, right)):
        fits = matrix.dtype == x.dtype and tuple(matrix.shape) == (size, size)
        require(op, fits, f"{name} is {matrix.dtype} {list(matrix.shape)}, needed {x.dtype} [{size}, {size}]")
    require(op, 0 < clip <= 1, f"clip_ratio {clip} is not in (0, 1]")
    inner = (x.to(torch.float32) @ kronecker_p2.to(torch.float32)).to(x.dtype).to(torch.float32)
    outer = (kronecker_p1.to(torch.float32) @ inner).to(torch.float16).to(torch.float32).flatten(1)
    amax = outer.abs().amax(1)
    ratio = torch.tensor(clip, dtype=torch.float32)
    seven = torch.tensor(_TOP[INT4])
    factor = torch.where(amax == 0, seven, (seven / ratio) / torch.where(amax == 0, 1.0, amax))
    codes = torch.round(outer * factor.unsqueeze(1)).clamp(-8, 7).to(torch.int8)
    return pack_int4(codes).view(rows, left, right // 8), amax * ratio / seven


def quantize(
    emulation: Emulation,
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """npu_quantize to int8: round(x / scale + zero point), or times the scale where `div_mode` is False."""
    op = "npu_quantize"
    require = emulation.require
    if element(emulation, op, dtype, torch.int8) != torch.int8:
        raise NotImplementedError(f"{op}: only int8 outputs are emulated")
    require(op, input.dtype in (*_HALF, torch.float32), f"the input cannot be {input.dtype}")
    require(op, scales.dim() == 1, f"scales is {scales.dim()}-dimensional")
    require(op, scales.numel() in (1, input.shape[axis]), f"{scales.numel()} scales do not fit axis {axis}")
    kinds = (torch.float32, torch.bfloat16) if div_mode else (input.dtype,)
    require(op, scales.dtype in kinds, f"scales is {scales.dtype}, needed one of {kinds}")
    if zero_points is not None:
        offsets = (torch.int8, torch.uint8, torch.int32, torch.bfloat16) if div_mode else (input.dtype,)
        require(op, zero_points.dtype in offsets, f"zero_points is {zero_points.dtype}, needed one of {offsets}")
        require(op, zero_points.shape == scales.shape, "zero_points has another shape than scales")
    shape = [1] * input.dim()
    shape[axis] = -1
    values, scale = input.to(torch.float32), scales.to(torch.float32).reshape(shape)
    scaled = values / scale if div_mode else values * scale
    if zero_points is not None:
        scaled = scaled + zero_points.to(torch.float32).reshape(shape)
    return torch.round(scaled).clamp(-128, 127).to(torch.int8)


def trans_quant_param(
    emulation: Emulation, scale: torch.Tensor, offset: torch.Tensor | None = None, round_mode: int | None = 0
) -> torch.Tensor:
    """npu_trans_quant_param: f32 scales as int64 for the dequantization unit, 19 bits of each."""
    op = "npu_trans_quant_param"
    emulation.require(op, scale.dtype == torch.float32, f"scale is {scale.dtype}")
    if round_mode:
        raise NotImplementedError(f"{op}: round_mode {round_mode} is not emulated")
    kept = (scale.contiguous().view(torch.int32) & SCALE_MASK).to(torch.int64) & 0xFFFFFFFF
    found = kept | (1 << 46)
    if offset is not None:
        found = found | ((torch.round(offset).clamp(-256, 255).to(torch.int64) & 0x1FF) << 37)
    return found


def convert_weight_to_int4pack(emulation: Emulation, weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """npu_convert_weight_to_int4pack: int32 values from -8 to 7, eight to a word; on a5 f32 values of fp4 as well.

    A weight in NZ stays in it.
    """
    op = "npu_convert_weight_to_int4pack"
    dims = (2, 3) if emulation.arch == "a5" else (2,)
    emulation.require(op, weight.dim() in dims, f"the weight is {weight.dim()}-dimensional")
    emulation.require(op, weight.is_contiguous(), "the weight has to be contiguous")
    emulation.require(op, weight.shape[-1] % 8 == 0, "the last axis has to be a multiple of 8")
    if weight.dtype == torch.float32:
        emulation.require(op, emulation.arch == "a5", "float32 values are for a5")
        codes = fp4_codes(weight, "rint")
        emulation.require(op, torch.equal(e2m1_values(codes), weight), "a value is none of fp4's")
        return copy_format(weight, pack_int4(codes).view(torch.float32))
    emulation.require(op, weight.dtype == torch.int32, f"the weight is {weight.dtype}")
    low, high = (int(v) for v in torch.aminmax(weight)) if weight.numel() else (0, 0)
    emulation.require(op, low >= -8 and high <= 7, f"values from {low} to {high} are no int4")
    return copy_format(weight, pack_int4(weight))
