"""Matrix products of quantized operands, with the checks that the device's operators make before they run.

Sources of the modes and of what goes with what: op-plugin's documentation of each operator, and its C++ adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omniplat.emulation.ascend.dtypes import FP4, element, floating
from omniplat.emulation.ascend.layout import is_nz, is_transposed, require_matrix
from omniplat.emulation.ascend.quantize import SCALE_MASK, unpack_int4
from omniplat.emulation.core import Emulation
from omniplat.emulation.microscaling import e2m1_values, e8m0_values, unpack_nibbles

_HALF = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (*_HALF, torch.float32)
_BYTES = (torch.uint8, torch.int8)
_MX_GROUP = 32
_BLOCK = 128
_DUAL_GROUP = 512


def quant_matmul(
    emulation: Emulation,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """npu_quant_matmul of x1 [M, K] and x2 [K, N], both quantized. Dtypes of operands and scales choose the mode."""
    op = "npu_quant_matmul"
    if offset is not None or y_scale is not None:
        raise NotImplementedError(f"{op}: offset and y_scale are not emulated")
    left = element(emulation, op, x1_dtype, x1.dtype)
    right = element(emulation, op, x2_dtype, x2.dtype)
    emulation.require(op, x1.is_contiguous() and x1.dim() == 2, "x1 has to be a contiguous matrix")
    emulation.require(op, x2.dim() == 2, f"x2 is {x2.dim()}-dimensional")
    require_matrix(emulation, op, "x1", x1)
    require_matrix(emulation, op, "x2", x2)
    if FP4 in (left, right) or element(emulation, op, scale_dtype, scale.dtype) == torch.float8_e8m0fnu:
        scales = (scale, scale_dtype), (pertoken_scale, pertoken_scale_dtype)
        return _mx_matmul(emulation, x1, x2, left, right, scales, bias, output_dtype, group_sizes)
    emulation.require(op, group_sizes is None or left in _FP8, f"group_sizes {group_sizes} is for fp8 and MX operands")
    emulation.require(op, left == right, f"x1 is {left}, x2 {right}")
    if left in _FP8:
        emulation.require(op, emulation.arch == "a5", "fp8 is for a5")
        if group_sizes is not None:
            groups = list(group_sizes)
            return _block_matmul(emulation, x1, x2, scale, pertoken_scale, bias, output_dtype, groups)
        return _fp8_matmul(emulation, x1, x2, scale, pertoken_scale, bias, output_dtype)
    emulation.require(op, left in (torch.int8, torch.int32), f"x1 cannot be {left}")
    return _integer_matmul(emulation, x1, x2, scale, pertoken_scale, bias, output_dtype)


def _vector(emulation: Emulation, op: str, name: str, tensor: torch.Tensor, sizes: tuple[int, ...]) -> None:
    shape = list(tensor.shape)
    emulation.require(op, tensor.dim() == 1 and shape[0] in sizes, f"{name} is {shape}, needed one of {sizes}")
    emulation.require(op, tensor.is_contiguous(), f"{name} has to be contiguous")


def _integer_matmul(
    emulation: Emulation,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    pertoken_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_dtype: int | None,
) -> torch.Tensor:
    """int8 by int8, or int4 by int4 in int32 words; exact in int32, then scaled in f32."""
    op = "npu_quant_matmul"
    require = emulation.require
    is_int4 = x1.dtype == torch.int32
    if is_int4:
        a, b = unpack_int4(x1), unpack_int4(x2.t()).t() if is_transposed(x2) else unpack_int4(x2)
    else:
        a, b = x1, x2
    require(op, a.shape[1] == b.shape[0], f"K is {a.shape[1]} in x1 and {b.shape[0]} in x2")
    rows, columns = a.shape[0], b.shape[1]
    _vector(emulation, op, "scale", scale, (1, columns))
    out = floating(emulation, op, output_dtype, (*_HALF, torch.int32) if not is_int4 else _HALF)
    require(op, scale.dtype in (torch.float32, torch.bfloat16, torch.int64), f"scale cannot be {scale.dtype}")
    if pertoken_scale is not None:
        _vector(emulation, op, "pertoken_scale", pertoken_scale, (rows,))
        require(op, pertoken_scale.dtype == torch.float32, f"pertoken_scale is {pertoken_scale.dtype}")
        scales = (torch.float32, torch.bfloat16) if out == torch.bfloat16 and not is_int4 else (torch.float32,)
        require(op, scale.dtype in scales, f"scale is {scale.dtype} for {out}, needed one of {scales}")
        require(op, out != torch.int32, "an int32 output takes no pertoken_scale")
        biases: tuple[torch.dtype, ...] = () if is_int4 else (torch.int32, torch.float32, out)
    elif out == torch.bfloat16:
        require(op, scale.dtype in (torch.float32, torch.bfloat16) and not is_int4, f"scale is {scale.dtype} for {out}")
        biases = (torch.int32, torch.float32, torch.bfloat16)
    else:
        biases = (torch.int32,)
    if bias is not None:
        _vector(emulation, op, "bias", bias, (columns,))
        require(op, bias.dtype in biases, f"bias is {bias.dtype} for {out}, needed one of {biases}")
    # Sums of products of int8 are exact in float64, and float64 has a fast product.
    total = (a.to(torch.float64) @ b.to(torch.float64)).to(torch.int64)
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias
    if out == torch.int32:
        return total.to(torch.int32)
    factor = scale if scale.dtype == torch.int64 else scale.to(torch.float32)
    if scale.dtype == torch.int64 or (pertoken_scale is None and out == torch.float16):
        factor = _fixed(scale)
        if scale.dtype != torch.int64 and not torch.equal(factor, scale.to(torch.float32)):
            emulation.record(op, "scale-cut", "beside an f16 output without pertoken_scale, 19 bits of a scale count")
    y = total.to(torch.float32) * factor
    if pertoken_scale is not None:
        y = y * pertoken_scale.unsqueeze(1)
    if bias is not None and bias.dtype != torch.int32:
        y = y + bias.to(torch.float32)
    return y.to(out)


def _fixed(scale: torch.Tensor) -> torch.Tensor:
    """f32 scales as the dequantization unit has them: 19 bits of those in int64, or of f32 ones that become int64."""
    if scale.dtype == torch.int64:
        return (scale & (SCALE_MASK & 0xFFFFFFFF)).to(torch.int32).view(torch.float32)
    return (scale.to(torch.float32).contiguous().view(torch.int32) & SCALE_MASK).view(torch.float32)


def _fp8_matmul(
    emulation: Emulation,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    pertoken_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_dtype: int | None,
) -> torch.Tensor:
    """fp8 by fp8 with f32 scales per token and per column."""
    op = "npu_quant_matmul"
    require = emulation.require
    if pertoken_scale is None:
        raise NotImplementedError(f"{op}: fp8 without pertoken_scale is not emulated")
    require(op, x1.shape[1] == x2.shape[0], f"K is {x1.shape[1]} in x1 and {x2.shape[0]} in x2")
    _vector(emulation, op, "scale", scale, (1, x2.shape[1]))
    _vector(emulation, op, "pertoken_scale", pertoken_scale, (x1.shape[0],))
    for name, tensor in (("scale", scale), ("pertoken_scale", pertoken_scale)):
        require(op, tensor.dtype == torch.float32, f"{name} is {tensor.dtype}")
    out = floating(emulation, op, output_dtype, _FLOATS)
    y = (x1.to(torch.float32) @ x2.to(torch.float32)) * scale * pertoken_scale.unsqueeze(1)
    if bias is not None:
        require(op, bias.dtype == torch.float32, f"bias is {bias.dtype}")
        emulation.record(op, "fp8-bias", "vllm-ascend reports wrong results of fp8 products with a bias")
        y = y + bias
    return y.to(out)


def _block_matmul(
    emulation: Emulation,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    pertoken_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_dtype: int | None,
    groups: list[int],
) -> torch.Tensor:
    """fp8 by fp8, f32 scales per token and 128 columns [M, ceil(K/128)] and per tile [ceil(K/128), ceil(N/128)]."""
    op = "npu_quant_matmul"
    require = emulation.require
    if groups == [_BLOCK, _BLOCK, _BLOCK]:
        raise NotImplementedError(f"{op}: tiles of inputs are not emulated")
    require(op, groups == [1, _BLOCK, _BLOCK], f"group_sizes is {groups}, needed [1, {_BLOCK}, {_BLOCK}]")
    require(op, pertoken_scale is not None, "pertoken_scale is missing")
    assert pertoken_scale is not None
    require(op, bias is None, "fp8 in tiles takes no bias")
    (rows, depth), columns = x1.shape, x2.shape[1]
    require(op, depth == x2.shape[0], f"K is {depth} in x1 and {x2.shape[0]} in x2")
    loops = -(-depth // _BLOCK)
    for name, tensor, shape in (
        ("scale", scale, (loops, -(-columns // _BLOCK))),
        ("pertoken_scale", pertoken_scale, (rows, loops)),
    ):
        fits = tensor.dtype == torch.float32 and tuple(tensor.shape) == shape
        require(op, fits, f"{name} is {tensor.dtype} {list(tensor.shape)}, needed float32 {list(shape)}")
    same = 1 in scale.shape or is_transposed(x2) == is_transposed(scale)
    require(op, same, "x2 and its scale are transposed differently")
    out = floating(emulation, op, output_dtype, _FLOATS)
    a, b = x1.to(torch.float32), x2.to(torch.float32)
    y = torch.zeros((rows, columns))
    for loop in range(loops):
        part = slice(loop * _BLOCK, (loop + 1) * _BLOCK)
        factors = scale[loop].repeat_interleave(_BLOCK)[:columns]
        y = y + (a[:, part] @ b[part]) * pertoken_scale[:, loop].unsqueeze(1) * factors
    return y.to(out)


def mx_operand(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """f32 [rows, K] of codes' f32 values [rows, K] and paired scales [rows, ceil(K/64), 2]."""
    factors = e8m0_values(scale.contiguous()).flatten(-2).repeat_interleave(_MX_GROUP, dim=-1)
    return values * factors[..., : values.shape[-1]]


def paired(emulation: Emulation, op: str, name: str, scale: torch.Tensor, number: int | None) -> None:
    """MX scales: bytes that are said to be e8m0, [..., 2]."""
    fmt = element(emulation, op, number, scale.dtype)
    emulation.require(op, fmt == torch.float8_e8m0fnu, f"{name} is {fmt}: its dtype has to be given as e8m0")
    emulation.require(op, scale.element_size() == 1, f"{name} is {scale.dtype}, which is no byte")
    emulation.require(op, scale.shape[-1] == 2, f"{name} is {list(scale.shape)}: scales come in pairs")


def codes_of(emulation: Emulation, op: str, name: str, tensor: torch.Tensor, fmt: torch.dtype | str) -> torch.Tensor:
    """f32 values of fp8 codes, or of packed fp4 whose packed axis is the last one in memory."""
    if fmt == FP4:
        emulation.require(op, tensor.dtype in _BYTES, f"{name} is {tensor.dtype}: packed fp4 lies in bytes")
        return e2m1_values(unpack_nibbles(tensor))
    emulation.require(op, fmt in _FP8 and tensor.dtype == fmt, f"{name} is {tensor.dtype}, called {fmt}")
    return tensor.to(torch.float32)


_Scale = tuple[torch.Tensor | None, int | None]


def _mx_matmul(
    emulation: Emulation,
    x1: torch.Tensor,
    x2: torch.Tensor,
    left: torch.dtype | str,
    right: torch.dtype | str,
    scales: tuple[_Scale, _Scale],
    bias: torch.Tensor | None,
    output_dtype: int | None,
    group_sizes: Sequence[int] | None,
) -> torch.Tensor:
    """fp8 by fp8, fp4 by fp4, or fp8 by fp4, in groups of 32 under e8m0 scales."""
    op = "npu_quant_matmul"
    require = emulation.require
    require(op, emulation.arch == "a5", "MX formats are for a5")
    (scale, scale_dtype), (token, token_dtype) = scales
    assert scale is not None
    require(op, token is not None, "pertoken_scale is missing")
    assert token is not None
    paired(emulation, op, "scale", scale, scale_dtype)
    paired(emulation, op, "pertoken_scale", token, token_dtype)
    weight_only = right == FP4 and left != FP4
    groups = list(group_sizes) if group_sizes is not None else []
    legal = ([1, 1, 32], [0, 0, 32]) if weight_only else ([1, 1, 32],)
    require(op, groups in legal, f"group_sizes is {groups}, needed {legal[-1]}")
    require(op, left == right or weight_only, f"x1 is {left}, x2 {right}")
    transposed = is_transposed(x2)
    require(op, transposed == is_transposed(scale, 2), "x2 and its scale are transposed differently")
    require(op, not weight_only or transposed, "an fp4 weight for fp8 inputs has to be transposed")
    weight = codes_of(emulation, op, "x2", x2.t() if transposed or right != FP4 else x2, right)
    if right == FP4 and not transposed:
        weight = weight.t()  # packed along N
    x = codes_of(emulation, op, "x1", x1, left)
    rows, depth = x.shape
    require(op, depth > 2 and weight.shape[1] == depth, f"K is {depth} in x1 and {weight.shape[1]} in x2")
    pairs = -(-depth // (2 * _MX_GROUP))
    for name, tensor, shape in (
        ("scale", scale, (pairs, weight.shape[0], 2)),
        ("pertoken_scale", token, (rows, pairs, 2)),
    ):
        require(op, tuple(tensor.shape) == shape, f"{name} is {list(tensor.shape)}, needed {list(shape)}")
    out = floating(emulation, op, output_dtype, _HALF if weight_only else _FLOATS)
    y = mx_operand(x, token) @ mx_operand(weight, scale.transpose(0, 1)).t()
    if bias is not None:
        needed = out if weight_only else torch.float32
        size = [1, weight.shape[0]] if weight_only else [weight.shape[0]]
        fits = bias.dtype == needed and list(bias.shape) == size
        require(op, fits, f"bias is {bias.dtype} {list(bias.shape)}, needed {needed} {size}")
        y = y + bias.to(torch.float32)
    return y.to(out)


def dual_level_quant_matmul(
    emulation: Emulation,
    x1: torch.Tensor,
    x2: torch.Tensor,
    x1_level0_scale: torch.Tensor,
    x2_level0_scale: torch.Tensor,
    x1_level1_scale: torch.Tensor,
    x2_level1_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    output_dtype: int = 15,
) -> torch.Tensor:
    """npu_dual_level_quant_matmul: x1 [M, K/2] by x2 [N, K/2], both fp4 under scales of 512 and of 32 columns.

    x2 has to be in the NZ format, and its level 0 lies as [K/512, N].
    """
    op = "npu_dual_level_quant_matmul"
    require = emulation.require
    require(op, x1.dim() == 2 and x2.dim() == 2, "both operands are matrices")
    require(op, is_nz(x2), "x2 is not in the FRACTAL_NZ format")
    require(op, x1.is_contiguous() and x2.is_contiguous(), "both operands have to be contiguous")
    left, right = (codes_of(emulation, op, name, t, FP4) for name, t in (("x1", x1), ("x2", x2)))
    (rows, depth), columns = left.shape, right.shape[0]
    require(op, right.shape[1] == depth, f"K is {depth} in x1 and {right.shape[1]} in x2")
    wide, pairs = -(-depth // _DUAL_GROUP), -(-depth // (2 * _MX_GROUP))
    for name, tensor, dtype, shape in (
        ("x1_level0_scale", x1_level0_scale, torch.float32, (rows, wide)),
        ("x2_level0_scale", x2_level0_scale, torch.float32, (wide, columns)),
        ("x1_level1_scale", x1_level1_scale, torch.uint8, (rows, pairs, 2)),
        ("x2_level1_scale", x2_level1_scale, torch.uint8, (columns, pairs, 2)),
    ):
        fits = tensor.dtype == dtype and tuple(tensor.shape) == shape
        require(op, fits, f"{name} is {tensor.dtype} {list(tensor.shape)}, needed {dtype} {list(shape)}")
        require(op, tensor.is_contiguous(), f"{name} has to be contiguous")
    out = floating(emulation, op, output_dtype, _HALF)
    a, b = mx_operand(left, x1_level1_scale), mx_operand(right, x2_level1_scale)
    y = torch.zeros((rows, columns))
    for group in range(wide):
        part = slice(group * _DUAL_GROUP, (group + 1) * _DUAL_GROUP)
        factor = x1_level0_scale[:, group, None] * x2_level0_scale[group]
        y = y + factor * (a[:, part] @ b[:, part].t())
    if bias is not None:
        fits = bias.dtype == torch.float32 and tuple(bias.shape) == (columns,)
        require(op, fits, f"bias is {bias.dtype} {list(bias.shape)}, needed float32 [{columns}]")
        y = y + bias
    return y.to(out)


def weight_quant_batchmatmul(
    emulation: Emulation,
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> torch.Tensor:
    """npu_weight_quant_batchmatmul: x [M, K] by (weight [K, N] + offset) * scale, the weight int8 or int4 in int32."""
    op = "npu_weight_quant_batchmatmul"
    require = emulation.require
    if quant_scale is not None or quant_offset is not None or weight_dtype is not None or inner_precise:
        raise NotImplementedError(f"{op}: quantized outputs, weight_dtype and inner_precise are not emulated")
    require(op, x.dim() == 2 and x.dtype in _HALF, f"x is {x.dtype} {list(x.shape)}")
    require(op, x.numel() > 0, "x is empty")
    require(op, weight.dtype in (torch.int8, torch.int32), f"weight cannot be {weight.dtype}")
    require_matrix(emulation, op, "weight", weight)
    require(op, not is_nz(weight), "an NZ weight is for graph mode only")
    packed = weight.dtype == torch.int32
    codes = weight if not packed else unpack_int4(weight.t()).t() if is_transposed(weight) else unpack_int4(weight)
    depth, columns = codes.shape
    require(op, x.shape[1] == depth, f"K is {x.shape[1]} in x and {depth} in weight")
    require(op, antiquant_scale.dtype == x.dtype, f"antiquant_scale is {antiquant_scale.dtype}, x {x.dtype}")
    size = antiquant_group_size
    shapes = [[1], [1, 1], [columns], [1, columns]]
    if size:
        require(op, size % 32 == 0 and 32 <= size <= depth - 1, f"groups of {size} for K {depth}")
        shapes = [[-(-depth // size), columns]]
    shape = list(antiquant_scale.shape)
    require(op, shape in shapes, f"antiquant_scale is {shape}, needed one of {shapes}")
    values = codes.to(torch.float32)
    step = size or depth
    if antiquant_offset is not None:
        fits = antiquant_offset.dtype == x.dtype and antiquant_offset.shape == antiquant_scale.shape
        require(op, fits, "antiquant_offset needs the dtype and shape of antiquant_scale")
        values = values + _per_row(antiquant_offset, step, depth)
    dense = (values * _per_row(antiquant_scale, step, depth)).to(x.dtype).to(torch.float32)
    y = x.to(torch.float32) @ dense
    if bias is not None:
        needed = torch.float32 if x.dtype == torch.bfloat16 else torch.float16
        fits = bias.dtype == needed and bias.numel() == columns and bias.is_contiguous()
        require(op, fits, f"bias is {bias.dtype} {list(bias.shape)}, needed {needed} [{columns}]")
        y = y + bias.to(torch.float32).reshape(-1)
    return y.to(x.dtype)


def _per_row(tensor: torch.Tensor, step: int, depth: int) -> torch.Tensor:
    """Scales or offsets of groups of `step` rows, [K, N] or [K, 1]."""
    values = tensor.to(torch.float32)
    values = values.reshape(1, -1) if values.dim() == 1 else values
    return values.repeat_interleave(step, dim=0)[:depth]
