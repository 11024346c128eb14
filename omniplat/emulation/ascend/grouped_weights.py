"""Weights of experts that are dequantized, or multiplied as int4, by inputs of another width.

Sources: the documentation of aclnnGroupedMatmulV4 and aclnnGroupedMatmulWeightNz, op-plugin's adapter and its tests.
"""

from __future__ import annotations

import torch

from omniplat.emulation.ascend.dtypes import floating
from omniplat.emulation.ascend.groups import by_group
from omniplat.emulation.ascend.layout import is_nz, is_transposed
from omniplat.emulation.ascend.quantize import unpack_int4
from omniplat.emulation.core import Emulation
from omniplat.emulation.microscaling import e2m1_values, e8m0_values

_OP = "npu_grouped_matmul"
_HALF = (torch.float16, torch.bfloat16)
_MX_GROUP = 32
#: Rows of K under one scale, and the longest K, of int4 by int8.
_INT4_GROUP = 256
_INT4_DEPTH = 18432
#: What is left of the inputs of int4 by int8, which the operator takes apart in place.
_OVERWRITTEN = -128


def antiquant(
    emulation: Emulation,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_dtype: int | None,
) -> torch.Tensor:
    """Inputs of 16 bits by int8 (a scale per column) or int4 in int32 (per column or group)."""
    op = "npu_grouped_matmul"
    require = emulation.require
    if bias is not None:
        raise NotImplementedError(f"{op}: a bias of weight-only products is not emulated")
    require(op, weight.dtype in (torch.int8, torch.int32), f"weight cannot be {weight.dtype}")
    if weight.dtype == torch.int32 and is_transposed(weight):
        raise NotImplementedError(f"{op}: int4 that is packed along K is not emulated")
    codes = unpack_int4(weight) if weight.dtype == torch.int32 else weight
    depth, columns = codes.shape[1:]
    require(op, x.shape[1] == depth, f"K is {x.shape[1]} in x and {depth} in weight")
    require(op, scale.dtype == x.dtype, f"antiquant_scale is {scale.dtype}, x {x.dtype}")
    grouped = scale.dim() == 3
    require(op, not grouped or weight.dtype == torch.int32, "int8 takes one scale per column")
    groups = scale.shape[1] if grouped else 1
    shape = [len(counts), groups, columns] if grouped else [len(counts), columns]
    require(op, list(scale.shape) == shape, f"antiquant_scale is {list(scale.shape)}, needed {shape}")
    require(op, depth % groups == 0, f"{groups} groups do not divide K {depth}")
    require(op, offset is not None or emulation.arch == "a5", "antiquant_offset is missing")
    factors = scale.to(torch.float32).reshape(len(counts), groups, columns)
    shifts = torch.zeros_like(factors)
    if offset is not None:
        fits = offset.dtype == x.dtype and offset.shape == scale.shape
        require(op, fits, "antiquant_offset needs the dtype and shape of antiquant_scale")
        shifts = offset.to(torch.float32).reshape(factors.shape)
    out = x.dtype if output_dtype is None else floating(emulation, op, output_dtype, (x.dtype,))
    values = x.to(torch.float32)
    size = depth // groups

    def product(expert: int, part: slice) -> torch.Tensor:
        wide = [tensor[expert].repeat_interleave(size, dim=0) for tensor in (factors, shifts)]
        dense = ((codes[expert].to(torch.float32) + wide[1]) * wide[0]).to(x.dtype).to(torch.float32)
        return values[part] @ dense

    return by_group(values, counts, columns, product).to(out)


def antiquant_mx(
    emulation: Emulation,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_dtype: int | None,
) -> torch.Tensor:
    """Inputs of 16 bits by fp4, eight codes to a float32 along N [E, K, N/8] in NZ, under e8m0 bytes [E, K/32, N]."""
    require = emulation.require
    require(_OP, emulation.arch == "a5", "MX formats are for a5")
    require(_OP, is_nz(weight), "an fp4 weight for 16-bit inputs has to be FRACTAL_NZ")
    require(_OP, not is_transposed(weight), "an fp4 weight for 16-bit inputs cannot be transposed")
    require(_OP, offset is None, "fp4 takes no antiquant_offset")
    codes = unpack_int4(weight.contiguous().view(torch.int32)).view(torch.uint8) & 0xF
    depth, columns = codes.shape[1:]
    require(_OP, x.shape[1] == depth, f"K is {x.shape[1]} in x and {depth} in weight")
    require(_OP, depth % _MX_GROUP == 0, f"K is {depth}, needed a multiple of {_MX_GROUP}")
    require(_OP, scale.dtype == torch.uint8, f"antiquant_scale is {scale.dtype}, needed uint8")
    shape = [len(counts), depth // _MX_GROUP, columns]
    require(_OP, list(scale.shape) == shape, f"antiquant_scale is {list(scale.shape)}, needed {shape}")
    require(_OP, scale.is_contiguous(), "antiquant_scale is transposed and weight is not")
    if bias is not None:
        raise NotImplementedError(f"{_OP}: a bias of weight-only products is not emulated")
    out = x.dtype if output_dtype is None else floating(emulation, _OP, output_dtype, (x.dtype,))
    values, factors = x.to(torch.float32), e8m0_values(scale)

    def product(expert: int, part: slice) -> torch.Tensor:
        wide = factors[expert].repeat_interleave(_MX_GROUP, dim=0)
        return values[part] @ (e2m1_values(codes[expert]) * wide).to(x.dtype).to(torch.float32)

    return by_group(values, counts, columns, product).to(out)


def int4_by_int8(
    emulation: Emulation,
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    group_list_type: int,
    scale: torch.Tensor | None,
    token: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_dtype: int | None,
) -> torch.Tensor:
    """int8 inputs by int4, eight codes to an int32 along N [E, K, N/8], under scales of 256 rows; a2 and a3.

    The inputs are taken apart into 16 * high + (low + 8), in place, and each part is a product of int4 by int4 whose
    groups are added up in f16. `scale` int64 [E, K/256, N] has the bits of an f32 below; `bias` f32 [E, N] is no bias:
    it is 8 * sum(weight * scale), which brings back what was taken from the low part.
    """
    require = emulation.require
    if emulation.arch == "a5":
        raise NotImplementedError(f"{_OP}: int4 by int8 on a5, whose documentation and tests disagree about scales")
    require(_OP, not is_transposed(weight), "an int4 weight for int8 inputs cannot be transposed")
    codes = unpack_int4(weight)
    depth, columns = codes.shape[1:]
    require(_OP, x.shape[1] == depth, f"K is {x.shape[1]} in x and {depth} in weight")
    fits = depth % _INT4_GROUP == 0 and depth <= _INT4_DEPTH
    require(_OP, fits, f"K is {depth}, needed a multiple of {_INT4_GROUP} up to {_INT4_DEPTH}")
    require(_OP, scale is not None and token is not None, "int4 by int8 needs scale and per_token_scale")
    require(_OP, bias is not None, "int4 by int8 needs a bias, 8 * sum(weight * scale)")
    assert scale is not None
    assert token is not None
    assert bias is not None
    groups = depth // _INT4_GROUP
    shape = [len(counts), groups, columns]
    fits = scale.dtype == torch.int64 and list(scale.shape) == shape
    require(_OP, fits, f"scale is {scale.dtype} {list(scale.shape)}, needed int64 {shape}")
    fits = token.dtype == torch.float32 and token.numel() == x.shape[0]
    require(_OP, fits, f"per_token_scale is {token.dtype} {list(token.shape)}, needed float32 [M]")
    fits = bias.dtype == torch.float32 and list(bias.shape) == [len(counts), columns]
    require(_OP, fits, f"bias is {bias.dtype} {list(bias.shape)}, needed float32 [E, N]")
    out = floating(emulation, _OP, output_dtype, _HALF)
    if group_list_type != 1:
        emulation.record(_OP, "counts-assumed", "int4 by int8 takes group_list for counts, whatever its type says")
    factors = (scale & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
    tiles = codes.to(torch.float64).reshape(len(counts), groups, _INT4_GROUP, columns)
    sums = (tiles.sum(2) * factors).sum(1) * 8
    if not torch.allclose(bias.to(torch.float64), sums, rtol=1e-3, atol=1e-3 * float(sums.abs().max() + 1e-30)):
        emulation.record(_OP, "assist-bias", "the bias of int4 by int8 is not 8 * sum(weight * scale)")
    parts = (x >> 4).to(torch.float64), ((x & 0xF) - 8).to(torch.float64)
    x.fill_(_OVERWRITTEN)

    def product(expert: int, part: slice) -> torch.Tensor:
        halves = []
        for values in parts:
            total = torch.zeros((part.stop - part.start, columns), dtype=torch.float16)
            for group in range(groups):
                inputs = values[part, group * _INT4_GROUP : (group + 1) * _INT4_GROUP]
                exact = (inputs @ tiles[expert, group]).to(torch.float32)
                total = total + (exact * factors[expert, group]).to(torch.float16)
            halves.append(total.to(torch.float32))
        return (halves[0] * 16 + halves[1] + bias[expert]) * token.reshape(-1)[part].unsqueeze(1)

    return by_group(x, counts, columns, product).to(out)
