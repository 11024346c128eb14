"""Products of rows that are sorted by expert with a stack of weights, and what fuses them with SwiGLU.

What lies behind the last group is not written on the device; here it is filled with what no result may depend on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from omniplat.emulation.ascend.dtypes import FP4, element, floating
from omniplat.emulation.ascend.grouped_weights import antiquant, antiquant_mx, int4_by_int8
from omniplat.emulation.ascend.groups import TensorList, by_group, group_counts, only, owners
from omniplat.emulation.ascend.layout import is_transposed, require_matrix
from omniplat.emulation.ascend.matmul import codes_of, mx_operand, paired
from omniplat.emulation.ascend.mx import mx_quantize
from omniplat.emulation.core import Emulation

_HALF = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (*_HALF, torch.float32)


def swiglu(emulation: Emulation, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """npu_swiglu: silu of the first half times the second."""
    emulation.require("npu_swiglu", input.shape[dim] % 2 == 0, f"axis {dim} of {input.shape[dim]} has no halves")
    first, second = input.to(torch.float32).chunk(2, dim=dim)
    return (F.silu(first) * second).to(input.dtype)


def grouped_matmul(
    emulation: Emulation,
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: TensorList = None,
    scale: TensorList = None,
    offset: TensorList = None,
    antiquant_scale: TensorList = None,
    antiquant_offset: TensorList = None,
    per_token_scale: TensorList = None,
    group_list: torch.Tensor | None = None,
    activation_input: TensorList = None,
    activation_quant_scale: TensorList = None,
    activation_quant_offset: TensorList = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[torch.Tensor]:
    """npu_grouped_matmul, groups of rows of one matrix with one stack [E, K, N]: [x_e @ weight_e] in one tensor."""
    op = "npu_grouped_matmul"
    require = emulation.require
    beside = (offset, activation_input, activation_quant_scale, activation_quant_offset, tuning_config)
    if any(tensors for tensors in beside) or act_type:
        raise NotImplementedError(f"{op}: offsets, activations and tuning_config are not emulated")
    if group_type != 0 or split_item not in (2, 3) or group_list is None:
        raise NotImplementedError(f"{op}: only groups of rows (group_type 0, split_item 2 or 3) are emulated")
    rows, stack = only(emulation, op, "x", x), only(emulation, op, "weight", weight)
    require(op, rows is not None and stack is not None, "x and weight are lists of one tensor")
    assert rows is not None
    assert stack is not None
    require(op, rows.dim() == 2 and rows.is_contiguous(), f"x has to be a contiguous matrix, is {list(rows.shape)}")
    require(op, stack.dim() == 3, f"weight is {list(stack.shape)}, needed [E, K, N]")
    require_matrix(emulation, op, "x", rows)
    require_matrix(emulation, op, "weight", stack)
    for name, number in (("x_dtype", x_dtype), ("weight_dtype", weight_dtype)):
        known = number is None or element(emulation, op, number, FP4) == FP4
        require(op, known, f"{name} {number}: only fp4 is named, other dtypes are the tensors' own")
    counts = group_counts(emulation, op, group_list, group_list_type or 0, stack.shape[0], rows.shape[0], whole=True)
    left = element(emulation, op, x_dtype, rows.dtype)
    right = element(emulation, op, weight_dtype, stack.dtype)
    factor, token = only(emulation, op, "scale", scale), only(emulation, op, "per_token_scale", per_token_scale)
    anti = only(emulation, op, "antiquant_scale", antiquant_scale)
    shift = only(emulation, op, "antiquant_offset", antiquant_offset)
    added = only(emulation, op, "bias", bias)
    if anti is not None and left in _HALF:
        dequantized = antiquant_mx if right == torch.float32 else antiquant
        return [dequantized(emulation, rows, stack, counts, anti, shift, added, output_dtype)]
    if left == torch.int8 and right == torch.int32:
        kind = group_list_type or 0
        return [int4_by_int8(emulation, rows, stack, counts, kind, factor, token, added, output_dtype)]
    if FP4 in (left, right) or scale_dtype is not None or per_token_scale_dtype is not None:
        dtypes = (scale_dtype, per_token_scale_dtype)
        operands = (left, right)
        return [_mx(emulation, rows, stack, counts, operands, factor, anti, token, added, dtypes, output_dtype)]
    require(op, left == right, f"x is {left}, weight {right}")
    if left in _FP8:
        require(op, emulation.arch == "a5", "fp8 is for a5")
        require(op, added is None, "fp8 takes no bias")
        out = floating(emulation, op, output_dtype, _FLOATS)
        require(op, factor is not None and token is not None, "fp8 needs scale and per_token_scale")
        assert factor is not None
        assert token is not None
        shapes = factor.dtype == token.dtype == torch.float32 and tuple(factor.shape) == (len(counts), stack.shape[2])
        require(op, shapes and tuple(token.shape) == (rows.shape[0],), "scales are f32 [E, N] and f32 [M]")
        y = by_group(
            rows,
            counts,
            stack.shape[2],
            lambda e, part: (
                (rows[part].to(torch.float32) @ stack[e].to(torch.float32)) * factor[e] * token[part].unsqueeze(1)
            ),
        )
        return [y.to(out)]
    require(op, left == torch.int8, f"x cannot be {left}")
    return [_int8(emulation, rows, stack, counts, factor, token, added, output_dtype)]


def _int8(
    emulation: Emulation,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    scale: torch.Tensor | None,
    token: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_dtype: int | None,
) -> torch.Tensor:
    op = "npu_grouped_matmul"
    require = emulation.require
    if bias is not None:
        raise NotImplementedError(f"{op}: a bias of int8 products is not emulated")
    out = floating(emulation, op, output_dtype, (*_HALF, torch.int32))
    y = by_group(x, counts, weight.shape[2], lambda e, part: x[part].to(torch.float64) @ weight[e].to(torch.float64))
    if out == torch.int32:
        require(op, scale is None and token is None, "an int32 output takes no scales")
        return torch.nan_to_num(y, nan=2.0**30).to(torch.int32)
    require(op, scale is not None and token is not None, f"{out} needs scale and per_token_scale")
    assert scale is not None
    assert token is not None
    kinds: tuple[torch.dtype, ...] = (torch.float32,) if out == torch.float16 else (torch.bfloat16,)
    if emulation.arch == "a5" and out == torch.bfloat16:
        kinds = (torch.bfloat16, torch.float32)
    require(op, scale.dtype in kinds, f"scale is {scale.dtype} for {out} on {emulation.arch}, needed one of {kinds}")
    require(op, tuple(scale.shape) == (len(counts), weight.shape[2]), f"scale is {list(scale.shape)}, needed [E, N]")
    require(op, token.dtype == torch.float32 and tuple(token.shape) == (x.shape[0],), "per_token_scale is f32 [M]")
    expert = owners(counts)
    return (y * scale.to(torch.float32)[expert] * token.unsqueeze(1)).to(out)


def _mx(
    emulation: Emulation,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    operands: tuple[torch.dtype | str, torch.dtype | str],
    scale: torch.Tensor | None,
    anti: torch.Tensor | None,
    token: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtypes: tuple[int | None, int | None],
    output_dtype: int | None,
) -> torch.Tensor:
    """fp8 by fp8, fp4 by fp4 (scale [E, K/64, N, 2]), or fp8 by fp4 (antiquant_scale [E, N, K/64, 2])."""
    op = "npu_grouped_matmul"
    require = emulation.require
    require(op, emulation.arch == "a5", "MX formats are for a5")
    left, right = operands
    mixed = right == FP4 and left != FP4
    require(op, left == right or mixed, f"x is {left}, weight {right}")
    require(op, token is not None, "per_token_scale is missing")
    assert token is not None
    paired(emulation, op, "per_token_scale", token, dtypes[1])
    if mixed:
        require(op, anti is not None and scale is None, "an fp4 weight for fp8 inputs has antiquant_scale")
        assert anti is not None
        require(op, anti.dtype == torch.uint8, f"antiquant_scale is {anti.dtype}, needed uint8")
        require(op, is_transposed(weight), "an fp4 weight for fp8 inputs has to be transposed")
        factors = anti
    else:
        require(op, scale is not None and anti is None, "scale is missing")
        assert scale is not None
        paired(emulation, op, "scale", scale, dtypes[0])
        require(op, scale.dim() == 4, f"scale is {list(scale.shape)}")
        require(op, is_transposed(weight) == is_transposed(scale, 2), "weight and scale are transposed differently")
        factors = scale.transpose(1, 2)
    operand = dense_stack(emulation, op, weight, right)
    values = codes_of(emulation, op, "x", x, left)
    depth, columns = values.shape[1], operand.shape[1]
    pairs = -(-depth // 64)
    require(op, operand.shape[2] == depth, f"K is {depth} in x and {operand.shape[2]} in weight")
    shape = (len(counts), columns, pairs, 2)
    require(op, tuple(factors.shape) == shape, f"the weight's scale fits {list(factors.shape)}, needed {list(shape)}")
    require(op, tuple(token.shape) == (x.shape[0], pairs, 2), f"per_token_scale is {list(token.shape)}")
    out = floating(emulation, op, output_dtype, _HALF if mixed else _FLOATS)
    needed = out if mixed else torch.float32
    require(op, bias is None or right == FP4, "fp8 takes no bias")
    require(op, bias is None or bias.dtype == needed, f"bias is not {needed}")
    rows = mx_operand(values, token)
    y = by_group(rows, counts, columns, lambda e, part: rows[part] @ mx_operand(operand[e], factors[e]).t())
    if bias is not None:
        y = y + bias.to(torch.float32)[owners(counts)]
    return y.to(out)


def dense_stack(emulation: Emulation, op: str, weight: torch.Tensor, fmt: torch.dtype | str) -> torch.Tensor:
    """f32 values [E, N, K] of a stack [E, K, N], which may be a transposed view."""
    if fmt != FP4 or is_transposed(weight):
        return codes_of(emulation, op, "weight", weight.transpose(1, 2), fmt)
    return codes_of(emulation, op, "weight", weight, fmt).transpose(1, 2)


def grouped_matmul_swiglu_quant_v2(
    emulation: Emulation,
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    smooth_scale: torch.Tensor | None = None,
    weight_assist_matrix: TensorList = None,
    bias: torch.Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = 6,
    quant_mode: int | None = 0,
    quant_dtype: int | None = 1,
    group_list_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    weight_scale_dtype: int | None = None,
    x_scale_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_grouped_matmul_swiglu_quant_v2: silu(first half) * second half of x_e @ weight_e, quantized again."""
    op = "npu_grouped_matmul_swiglu_quant_v2"
    require = emulation.require
    require(op, smooth_scale is None and not weight_assist_matrix and bias is None, "these have to be None so far")
    require(op, not tuning_config or emulation.arch != "a5", "tuning_config is not for a5")
    stack, factor = (only(emulation, op, name, t) for name, t in (("weight", weight), ("weight_scale", weight_scale)))
    require(op, stack is not None and factor is not None, "weight and weight_scale are lists of one tensor")
    assert stack is not None
    assert factor is not None
    require(op, x.dim() == 2 and stack.dim() == 3, f"x is {list(x.shape)}, weight {list(stack.shape)}")
    require_matrix(emulation, op, "weight", stack)
    require(
        op, (x_dtype is None) == (weight_dtype is None), "x_dtype and weight_dtype are given together or not at all"
    )
    counts = group_counts(emulation, op, group_list, group_list_type or 0, stack.shape[0], x.shape[0], whole=False)
    named = element(emulation, op, dequant_dtype or None, torch.float32)
    require(op, named == torch.float32 or emulation.arch == "a5", f"dequant_dtype {dequant_dtype} is for a5")
    modes = (dequant_mode or 0, quant_mode or 0)
    target = element(emulation, op, quant_dtype, torch.int8)
    if modes == (0, 0):
        require(op, x.dtype == stack.dtype == torch.int8, f"x is {x.dtype}, weight {stack.dtype}, needed int8")
        require(op, target == torch.int8, f"quant_dtype {quant_dtype} is not int8")
        kinds = (torch.float32,) if emulation.arch != "a5" else _FLOATS
        fits = factor.dtype in kinds and tuple(factor.shape) == (len(counts), stack.shape[2])
        require(op, fits, f"weight_scale is {factor.dtype} {list(factor.shape)}, needed {kinds} [E, N]")
        require(op, x_scale.dtype == torch.float32 and tuple(x_scale.shape) == (x.shape[0],), "x_scale is f32 [M]")
        y = by_group(x, counts, stack.shape[2], lambda e, part: x[part].to(torch.float64) @ stack[e].to(torch.float64))
        expert = owners(counts)
        y[: len(expert)] *= factor.to(torch.float32)[expert] * x_scale[: len(expert)].unsqueeze(1)
        return _int8_rows(_gated(y))
    require(op, modes == (2, 2) and emulation.arch == "a5", f"dequant_mode and quant_mode {modes} on {emulation.arch}")
    left, right = element(emulation, op, x_dtype, x.dtype), element(emulation, op, weight_dtype, stack.dtype)
    require(op, left == right and left in (FP4, *_FP8), f"x is {left}, weight {right}")
    paired(emulation, op, "weight_scale", factor, weight_scale_dtype)
    paired(emulation, op, "x_scale", x_scale, x_scale_dtype)
    require(op, factor.dim() == 4, f"weight_scale is {list(factor.shape)}")
    require(op, is_transposed(stack) == is_transposed(factor, 2), "weight and its scale are transposed differently")
    operand = dense_stack(emulation, op, stack, right)
    values = codes_of(emulation, op, "x", x, left)
    pairs, columns = -(-values.shape[1] // 64), operand.shape[1]
    multiple = 4 if right == FP4 else 2
    require(op, columns % multiple == 0, f"N is {columns}, needed a multiple of {multiple}")
    shape = (len(counts), pairs, columns, 2)
    require(op, tuple(factor.shape) == shape, f"weight_scale is {list(factor.shape)}, needed {list(shape)}")
    require(op, tuple(x_scale.shape) == (x.shape[0], pairs, 2), f"x_scale is {list(x_scale.shape)}")
    require(op, target in (FP4, *_FP8), f"quant_dtype {quant_dtype} is no MX format")
    rows = mx_operand(values, x_scale)
    factors = factor.transpose(1, 2)
    y = by_group(rows, counts, columns, lambda e, part: rows[part] @ mx_operand(operand[e], factors[e]).t())
    return mx_quantize(_gated(y), target, "rint", 0, 0.0, 32)


def _gated(y: torch.Tensor) -> torch.Tensor:
    first, second = y.to(torch.float32).chunk(2, dim=1)
    return F.silu(first) * second


def _int8_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes and f32 scales of max / 127 per row."""
    amax = values.abs().amax(1)
    scale = amax / torch.full_like(amax, 127.0)
    safe = torch.where(scale == 0, 1.0, scale).unsqueeze(1)
    codes = torch.nan_to_num(torch.round(values / safe), nan=127.0).clamp(-128, 127)
    return codes.to(torch.int8), scale
