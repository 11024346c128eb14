"""What a linear layer calls: quantize the input, multiply, add the bias before the one rounding to the output.

Each function takes rows [M, K], M > 0, the tensors that its kernel prepared, a bias or None, how codes are rounded (""
where they are not) and the output's dtype; it returns [M, N]. A smoothing vector (`pre_scale`) multiplies in float32; a
quantizer that takes 16 bits only sees the product rounded to the input's dtype, as the vendor's own smoothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from omniplat_ascend.kernels.numbers import FLOAT4_E2M1, FLOAT8_E4M3, FLOAT8_E8M0, FRACTAL_NZ, QINT8, QUINT4X2

Tensors = Mapping[str, torch.Tensor]
Product = Callable[[torch.Tensor, Tensors, torch.Tensor | None, str, torch.dtype], torch.Tensor]

_FP8_BLOCK = 128
_MX_GROUPS = (1, 1, 32)
_MX_WEIGHT_ONLY_GROUPS = (0, 0, 32)
#: How the device calls a rounding.
ROUND_MODES = {"": "rint", "nearest-even": "rint", "half-away": "round", "floor": "floor"}


def _f32(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.to(torch.float32)


def _smoothed(x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """The input times `pre_scale`, float32; as it is without one."""
    return x * tensors["pre_scale"] if "pre_scale" in tensors else x


def int8_dynamic(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, rounding: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """int8 by int8 with a scale per token. `codes` int8 [N, K], `scale` f32 [N]."""
    codes, token_scale = torch.ops.npu.npu_dynamic_quant(_smoothed(x, tensors).to(x.dtype))
    y: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        codes,
        tensors["codes"].t(),
        tensors["scale"],
        pertoken_scale=token_scale,
        bias=_f32(bias),
        output_dtype=out_dtype,
    )
    return y


def int8_static(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, rounding: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """int8 by int8 under one scale of the file, `input_scale` f32 [1], and a zero point, `input_zero_point` int32 [1].

    The scale is given per token: beside a 16-bit float output the operator keeps 19 bits of any other. What the zero
    point adds to every column, `correction` f32 [N], joins the bias.
    """
    values = _smoothed(x, tensors).to(torch.float32)
    scale = tensors["input_scale"]
    codes = torch.ops.npu.npu_quantize(values, scale, tensors.get("input_zero_point"), QINT8, -1, True)
    added = _f32(bias)
    if "correction" in tensors:
        added = tensors["correction"] if added is None else added + tensors["correction"]
    y: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        codes,
        tensors["codes"].t(),
        tensors["scale"],
        pertoken_scale=scale.expand(x.shape[0]).contiguous(),
        bias=added,
        output_dtype=out_dtype,
    )
    return y


def int4_dynamic(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, rounding: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """int4 by int4 with a scale per token. `codes` int32 [N, K/8], eight to a word; `scale` f32 [N]. No bias."""
    codes, token_scale = torch.ops.npu.npu_dynamic_quant(_smoothed(x, tensors).to(x.dtype), dst_type=QUINT4X2)
    y: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        codes, tensors["codes"].t(), tensors["scale"], pertoken_scale=token_scale, output_dtype=out_dtype
    )
    return y


#: Matrices that npu_kronecker_quant takes at once.
_KRONECKER_ROWS = 262144


def int4_transformed(x: torch.Tensor, tensors: Tensors, clip_ratio: float, out_dtype: torch.dtype) -> torch.Tensor:
    """As `int4_dynamic`, of inputs [M, A * B] that one operator multiplies by `left` [A, A] and `right` [B, B] and
    quantizes. Both have the input's dtype, and the result is rounded to f16 before it is quantized."""
    left, right = tensors["left"], tensors["right"]
    codes, scales = [], []
    matrices = _smoothed(x, tensors).to(x.dtype).view(-1, left.shape[0], right.shape[0])
    for part in torch.split(matrices, _KRONECKER_ROWS):
        quantized, scale = torch.ops.npu.npu_kronecker_quant(
            part, left, right, clip_ratio=clip_ratio, dst_dtype=torch.int32
        )
        codes.append(quantized)
        scales.append(scale)
    y: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        torch.cat(codes).view(x.shape[0], -1),
        tensors["codes"].t(),
        tensors["scale"],
        pertoken_scale=torch.cat(scales),
        output_dtype=out_dtype,
    )
    return y


def fp8_dynamic(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, rounding: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """fp8 by fp8 with a scale per token. `codes` uint8 (e4m3) [N, K], `scale` f32 [N].

    A bias is added to a float32 output: inside the operator it is reported wrong.
    """
    values = _smoothed(x, tensors).to(x.dtype)
    codes, token_scale = torch.ops.npu.npu_dynamic_quant(values, dst_type=FLOAT8_E4M3)
    y: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        codes,
        tensors["codes"].view(torch.float8_e4m3fn).t(),
        tensors["scale"],
        pertoken_scale=token_scale,
        output_dtype=out_dtype if bias is None else torch.float32,
    )
    return y if bias is None else (y + bias).to(out_dtype)


def fp8_block(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, rounding: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """fp8 by fp8 under scales of 1 x 128 inputs and of tiles of 128 x 128 weights.

    `codes` uint8 (e4m3) [N, K], `scale` f32 [ceil(N/128), ceil(K/128)]. The operator takes no bias: it is added to a
    float32 output.
    """
    codes, token_scale = torch.ops.npu.npu_dynamic_block_quant(
        _smoothed(x, tensors).to(x.dtype), dst_type=FLOAT8_E4M3, row_block_size=1, col_block_size=_FP8_BLOCK
    )
    y: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        codes,
        tensors["codes"].view(torch.float8_e4m3fn).t(),
        tensors["scale"].t(),
        pertoken_scale=token_scale,
        output_dtype=out_dtype if bias is None else torch.float32,
        group_sizes=(1, _FP8_BLOCK, _FP8_BLOCK),
    )
    return y if bias is None else (y + bias).to(out_dtype)


def mxfp8(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, rounding: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """fp8 by fp8 in groups of 32. `codes` uint8 (e4m3) [N, K], `scale` uint8 [N, K/64, 2]."""
    codes, token_scale = torch.ops.npu.npu_dynamic_mx_quant(_smoothed(x, tensors), dst_type=FLOAT8_E4M3)
    y: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        codes,
        tensors["codes"].view(torch.float8_e4m3fn).t(),
        tensors["scale"].transpose(0, 1),
        pertoken_scale=token_scale,
        bias=_f32(bias),
        output_dtype=out_dtype,
        pertoken_scale_dtype=FLOAT8_E8M0,
        scale_dtype=FLOAT8_E8M0,
        group_sizes=_MX_GROUPS,
    )
    return y


def mxfp4(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, rounding: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """fp4 by fp4 in groups of 32. `codes` uint8 [N, K/2], `scale` uint8 [N, K/64, 2]."""
    codes, token_scale = torch.ops.npu.npu_dynamic_mx_quant(
        _smoothed(x, tensors), dst_type=FLOAT4_E2M1, round_mode=rounding
    )
    y: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        codes,
        tensors["codes"].t(),
        tensors["scale"].transpose(0, 1),
        pertoken_scale=token_scale,
        bias=_f32(bias),
        output_dtype=out_dtype,
        x1_dtype=FLOAT4_E2M1,
        x2_dtype=FLOAT4_E2M1,
        pertoken_scale_dtype=FLOAT8_E8M0,
        scale_dtype=FLOAT8_E8M0,
        group_sizes=_MX_GROUPS,
    )
    return y


def mxfp4_a8(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, rounding: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """fp8 inputs by an fp4 weight, both in groups of 32. Tensors as for `mxfp4`."""
    codes, token_scale = torch.ops.npu.npu_dynamic_mx_quant(_smoothed(x, tensors), dst_type=FLOAT8_E4M3)
    y: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        codes,
        tensors["codes"].t(),
        tensors["scale"].transpose(0, 1),
        pertoken_scale=token_scale,
        bias=None if bias is None else bias.to(out_dtype).reshape(1, -1),
        output_dtype=out_dtype,
        x2_dtype=FLOAT4_E2M1,
        pertoken_scale_dtype=FLOAT8_E8M0,
        scale_dtype=FLOAT8_E8M0,
        group_sizes=_MX_WEIGHT_ONLY_GROUPS,
    )
    return y


def mxfp4_dual(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, rounding: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """fp4 by fp4 under scales of 512 and of 32 columns.

    `codes` int8 [N, K/2] in the NZ format, `scale` uint8 [N, K/64, 2], `scale2` f32 [ceil(K/512), N]. A weight that
    has lost the format, on the way through another device or a state dict, is cast anew in every call.
    """
    codes, level0, level1 = torch.ops.npu.npu_dynamic_dual_level_mx_quant(
        _smoothed(x, tensors).to(x.dtype), round_mode=rounding
    )
    weight = tensors["codes"]
    if torch.ops.npu.get_npu_format(weight) != FRACTAL_NZ:
        weight = torch.ops.npu.npu_format_cast(weight, FRACTAL_NZ, customize_dtype=torch.int8)
    y: torch.Tensor = torch.ops.npu.npu_dual_level_quant_matmul(
        codes, weight, level0, tensors["scale2"], level1, tensors["scale"], bias=_f32(bias),
        output_dtype=out_dtype,
    )  # fmt: skip
    return y


def weight_only(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, rounding: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """Integers of 8 or 4 bits by an input of 16.

    `codes` int8 [N, K], or int32 [N, K/8]; `scale` and `offset` [G, N] in the input's dtype, G of 1 for whole rows,
    which have a `factor` f32 [N] for the output as well.
    """
    scale, factor = tensors["scale"], tensors.get("factor")
    groups = scale.shape[0]
    inside = None
    if bias is not None and factor is None:
        inside = bias.to(torch.float16 if x.dtype == torch.float16 else torch.float32)
    y: torch.Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
        _smoothed(x, tensors).to(x.dtype),
        tensors["codes"].t(),
        scale,
        tensors.get("offset"),
        bias=inside,
        antiquant_group_size=x.shape[1] // groups if groups > 1 else 0,
    )
    if factor is not None:
        y = y * factor
        y = y if bias is None else y + bias
    return y.to(out_dtype)


PRODUCTS: Mapping[str, Product] = {
    "int8_dynamic": int8_dynamic,
    "int8_static": int8_static,
    "int4_dynamic": int4_dynamic,
    "fp8_dynamic": fp8_dynamic,
    "fp8_block": fp8_block,
    "mxfp8": mxfp8,
    "mxfp4": mxfp4,
    "mxfp4_a8": mxfp4_a8,
    "mxfp4_dual": mxfp4_dual,
    "weight_only": weight_only,
}
