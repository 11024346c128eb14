"""What a layer of experts calls: sort rows by expert, multiply, activate, multiply again, add up.

Codes and scales lie stacked, [E, ...], as linear layers have them; products are given transposed views. Where nothing
lies between the two products but SwiGLU, one operator of the vendor does the first, the activation and its
quantization. Else the activation is float32, and so is what is quantized: the vendor's quantizers of whole rows take 16
bits only, so that torch's own operators do it. Sums over a row's experts are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from omniplat.portable.quantize import quantize_rows
from omniplat.runtime.activate import activate
from omniplat.runtime.routing import local_ids
from omniplat.scheme import TensorQuant
from omniplat_ascend.kernels.layouts import INT4_DAMPING, fp4_words_in_nz
from omniplat_ascend.kernels.numbers import FLOAT4_E2M1, FLOAT8_E4M3, FLOAT8_E8M0, PLAIN_FORMATS
from omniplat_ascend.kernels.products import Tensors

_INT8_TOKEN = TensorQuant("int8", "token", dynamic=True)
_FP8_TOKEN = TensorQuant("fp8_e4m3", "token", dynamic=True)
#: npu_moe_finalize_routing of experts of fixed capacity, choices in the order of tokens.
_PADDED_BY_TOKEN = 3
#: The smallest positive number of f16.
_LEAST_F16 = 2.0**-24
#: Rows and their scales; None where rows are not quantized.
Rows = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Groups:
    """`counts` int64 [E]: rows of each expert, all rows together; `expert` int64 [rows]: whose each row is."""

    counts: torch.Tensor
    expert: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """`quantize` takes rows [R, K], how codes are rounded and the layer's dtype; `multiply` gives [R, N], float32 or of
    the layer's dtype; `gated` fuses w13, SwiGLU and quantization, where an operator does."""

    quantize: Callable[[torch.Tensor, str, torch.dtype], Rows]
    multiply: Callable[[Rows, Tensors, Groups, torch.dtype], torch.Tensor]
    gated: Callable[[Rows, Tensors, Groups], Rows] | None = None


def experts(
    x: torch.Tensor,
    tensors: Tensors,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    product: ExpertProduct,
    rounding: str,
    activation: str,
    limit: float,
    alpha: float,
) -> torch.Tensor:
    """`x` [M, K], M > 0, to float32 [M, K]. `tensors` are those of w13 and w2 with these prefixes."""
    w13, w2 = (_of(tensors, prefix) for prefix in ("w13_", "w2_"))
    rows, position, groups = _sorted(x, topk_ids, expert_map, w13["codes"].shape[0])
    seen = product.quantize(rows, rounding, x.dtype)
    if product.gated is not None and activation == "silu" and not limit and rounding == "rint" and "bias" not in w13:
        hidden = product.gated(seen, w13, groups)
    else:
        both = _with_bias(product.multiply(seen, w13, groups, x.dtype).to(torch.float32), w13, groups)
        gate, up = both.chunk(2, dim=1)
        hidden = product.quantize(activate(gate, up, activation, limit, alpha), rounding, x.dtype)
    out = _with_bias(product.multiply(hidden, w2, groups, x.dtype).to(torch.float32), w2, groups)
    return _added_up(out, topk_weights, position)


def _of(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _sorted(
    x: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int
) -> tuple[torch.Tensor, torch.Tensor, Groups]:
    """Rows by expert [M * T, K], where each choice went (int32 [M * T], -1: nowhere), and the groups.

    Operators want groups to cover all rows: those of no expert are counted to the last one, and never looked at.
    """
    ids = local_ids(topk_ids, expert_map)
    ids = torch.where(ids < 0, experts, ids).to(torch.int32)
    rows, position, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        ids.contiguous(),
        expert_num=experts + 1,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
        row_idx_type=0,
    )
    total = rows.shape[0]
    counts = torch.cat((counts[:-1], (total - counts[:-1].sum()).reshape(1)))
    index = torch.arange(experts, device=x.device)
    owner = torch.repeat_interleave(index, counts, output_size=total)
    return rows, position, Groups(counts, owner)


def _added_up(rows: torch.Tensor, topk_weights: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """float32 [M, K]: every token's rows times their weights.

    Only the operator's modes for experts of fixed capacity know rows that are nowhere, and they ask for rows in three
    axes and for no fewer experts than choices: T experts of M rows are as many rows as there are.
    """
    tokens, choices = topk_weights.shape
    found: torch.Tensor = torch.ops.npu.npu_moe_finalize_routing(
        rows.view(choices, tokens, -1),
        None,
        None,
        None,
        topk_weights.to(torch.float32).contiguous(),
        position,
        None,
        drop_pad_mode=_PADDED_BY_TOKEN,
    )
    return found


def _with_bias(y: torch.Tensor, weight: Tensors, groups: Groups) -> torch.Tensor:
    return y if "bias" not in weight else y + weight["bias"].to(torch.float32)[groups.expert]


def _grouped(
    rows: torch.Tensor,
    weight: torch.Tensor,
    groups: Groups,
    output: torch.dtype | None,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    token_scale: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    fp4_rows: bool = False,
    fp4_weight: bool = False,
    mx: bool = False,
) -> torch.Tensor:
    """npu_grouped_matmul of rows [R, K] and a stack [E, K, N], by groups of rows: [R, N] in `output`.

    `mx` says that what scales there are hold e8m0 bytes; fp4 lies in bytes too, and has to be named.
    """
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weight],
        bias=_listed(bias),
        scale=_listed(scale),
        antiquant_scale=_listed(antiquant_scale),
        antiquant_offset=_listed(antiquant_offset),
        per_token_scale=_listed(token_scale),
        group_list=groups.counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
        output_dtype=output,
        x_dtype=FLOAT4_E2M1 if fp4_rows else None,
        weight_dtype=FLOAT4_E2M1 if fp4_weight else None,
        scale_dtype=FLOAT8_E8M0 if mx and scale is not None else None,
        per_token_scale_dtype=FLOAT8_E8M0 if mx else None,
    )
    found: torch.Tensor = y
    return found


def _listed(tensor: torch.Tensor | None) -> list[torch.Tensor] | None:
    return None if tensor is None else [tensor]


# --- int8 ----------------------------------------------------------------------------------------------------------


def _int8_quantize(rows: torch.Tensor, rounding: str, dtype: torch.dtype) -> Rows:
    if rows.dtype == torch.float32:
        codes, scale = quantize_rows(rows, _INT8_TOKEN, None, None)
        return codes, scale.squeeze(1)
    codes, scale = torch.ops.npu.npu_dynamic_quant(rows)
    return codes, scale


def _int8_multiply(rows: Rows, weight: Tensors, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """The product as int32, scaled here: beside a bf16 output, a2 and a3 take scales in bf16 only."""
    codes, scale = rows
    assert scale is not None
    y = _grouped(codes, weight["codes"].transpose(1, 2), groups, torch.int32)
    return y.to(torch.float32) * weight["scale"][groups.expert] * scale.unsqueeze(1)


def _int8_gated(rows: Rows, weight: Tensors, groups: Groups) -> Rows:
    codes, scale = rows
    hidden, hidden_scale = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
        codes,
        [weight["codes"].transpose(1, 2)],
        [weight["scale"]],
        scale,
        groups.counts,
        dequant_dtype=torch.float32,
        group_list_type=1,
    )
    return hidden, hidden_scale


def _int4_multiply(rows: Rows, weight: Tensors, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """int4 by int8 in the vendor's own mode, which adds groups up in f16 and writes over the codes that it is given.

    `codes` int32 [E, K, N/8], `scale` int64 [E, K/256, N], `assist` f32 [E, N], as `layouts.int4_by_int8` gives them
    beside a `factor` f32 [E, N]. Both it and the scale per token stay outside, so that f16 holds every sum.
    """
    codes, scale = rows
    assert scale is not None
    damped = torch.full_like(scale, INT4_DAMPING)
    y = _grouped(
        codes,
        weight["codes"],
        groups,
        torch.float16,
        bias=weight["assist"],
        scale=weight["scale"],
        token_scale=damped,
    )
    return y.to(torch.float32) * weight["factor"][groups.expert] * scale.unsqueeze(1)


# --- fp8 -----------------------------------------------------------------------------------------------------------


def _fp8_quantize(rows: torch.Tensor, rounding: str, dtype: torch.dtype) -> Rows:
    if rows.dtype == torch.float32:
        codes, scale = quantize_rows(rows, _FP8_TOKEN, None, None)
        return codes.view(torch.float8_e4m3fn), scale.squeeze(1)
    codes, scale = torch.ops.npu.npu_dynamic_quant(rows, dst_type=FLOAT8_E4M3)
    return codes, scale


def _fp8_multiply(rows: Rows, weight: Tensors, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    codes, scale = rows
    assert scale is not None
    stack = weight["codes"].view(torch.float8_e4m3fn).transpose(1, 2)
    return _grouped(codes, stack, groups, torch.float32, scale=weight["scale"], token_scale=scale)


# --- MX ------------------------------------------------------------------------------------------------------------


def _mxfp8_quantize(rows: torch.Tensor, rounding: str, dtype: torch.dtype) -> Rows:
    codes, scale = torch.ops.npu.npu_dynamic_mx_quant(rows, dst_type=FLOAT8_E4M3)
    return codes, scale


def _mxfp4_quantize(rows: torch.Tensor, rounding: str, dtype: torch.dtype) -> Rows:
    codes, scale = torch.ops.npu.npu_dynamic_mx_quant(rows, dst_type=FLOAT4_E2M1, round_mode=rounding)
    return codes, scale


def _mx_weight(weight: Tensors, fp4: bool) -> torch.Tensor:
    codes = weight["codes"] if fp4 else weight["codes"].view(torch.float8_e4m3fn)
    return codes.transpose(1, 2)


def _mx_multiply(rows: Rows, weight: Tensors, groups: Groups, fp4: bool) -> torch.Tensor:
    codes, scale = rows
    assert scale is not None
    factors = weight["scale"].transpose(1, 2)
    stack = _mx_weight(weight, fp4)
    return _grouped(
        codes, stack, groups, torch.float32, scale=factors, token_scale=scale, fp4_rows=fp4, fp4_weight=fp4, mx=True
    )


def _mx_gated(rows: Rows, weight: Tensors, groups: Groups, fp4: bool) -> Rows:
    codes, scale = rows
    named = FLOAT4_E2M1 if fp4 else None
    hidden, hidden_scale = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
        codes,
        [_mx_weight(weight, fp4)],
        [weight["scale"].transpose(1, 2)],
        scale,
        groups.counts,
        dequant_mode=2,
        dequant_dtype=torch.float32,
        quant_mode=2,
        quant_dtype=FLOAT4_E2M1 if fp4 else FLOAT8_E4M3,
        group_list_type=1,
        x_dtype=named,
        weight_dtype=named,
        weight_scale_dtype=FLOAT8_E8M0,
        x_scale_dtype=FLOAT8_E8M0,
    )
    return hidden, hidden_scale


def _mxfp4_a8_multiply(rows: Rows, weight: Tensors, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    codes, scale = rows
    assert scale is not None
    stack, factors = weight["codes"].transpose(1, 2), weight["scale"]
    return _grouped(codes, stack, groups, dtype, antiquant_scale=factors, token_scale=scale, fp4_weight=True, mx=True)


# --- weight-only ---------------------------------------------------------------------------------------------------


def _plain(rows: torch.Tensor, rounding: str, dtype: torch.dtype) -> Rows:
    """Rows of 16 bits.

    In f16, whose range ends at 65504, each is divided by a power of two near its maximum: neither the product, which is
    f16 too, nor gate times up may leave that range where the layer's output does not.
    """
    if dtype != torch.float16:
        return rows.to(dtype), None
    values = rows.to(torch.float32)
    power = torch.exp2(torch.floor(torch.log2(values.abs().amax(1).clamp(min=_LEAST_F16))))
    return (values / power.unsqueeze(1)).to(dtype), power


def _weight_only_multiply(rows: Rows, weight: Tensors, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """`codes` int8 [E, N, K] or int32 [E, K, N/8], `scale` and `offset` [E, N] or [E, G, N], `factor` f32 [E, N]."""
    codes = weight["codes"]
    stack = codes if codes.dtype == torch.int32 else codes.transpose(1, 2)
    y = _grouped(rows[0], stack, groups, None, antiquant_scale=weight["scale"], antiquant_offset=weight["offset"])
    found = y if "factor" not in weight else y * weight["factor"][groups.expert]
    return found if rows[1] is None else found * rows[1].unsqueeze(1)


def _mxfp4_a16_multiply(rows: Rows, weight: Tensors, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """`codes` int32 [E, K, N/8] in the NZ format, `scale` uint8 [E, K/32, N]. Codes that have lost the format, on the
    way through another device or a state dict, are cast anew in every call."""
    codes = weight["codes"]
    if torch.ops.npu.get_npu_format(codes) in PLAIN_FORMATS:
        codes = fp4_words_in_nz(codes)
    return _grouped(rows[0], codes.view(torch.float32), groups, None, antiquant_scale=weight["scale"])


EXPERTS: Mapping[str, ExpertProduct] = {
    "int8": ExpertProduct(_int8_quantize, _int8_multiply, _int8_gated),
    "int4_a8": ExpertProduct(_int8_quantize, _int4_multiply),
    "fp8": ExpertProduct(_fp8_quantize, _fp8_multiply),
    "mxfp8": ExpertProduct(
        _mxfp8_quantize,
        lambda rows, weight, groups, dtype: _mx_multiply(rows, weight, groups, False),
        lambda rows, weight, groups: _mx_gated(rows, weight, groups, False),
    ),
    "mxfp4": ExpertProduct(
        _mxfp4_quantize,
        lambda rows, weight, groups, dtype: _mx_multiply(rows, weight, groups, True),
        lambda rows, weight, groups: _mx_gated(rows, weight, groups, True),
    ),
    "mxfp4_a8": ExpertProduct(_mxfp8_quantize, _mxfp4_a8_multiply),
    "mxfp4_a16": ExpertProduct(_plain, _mxfp4_a16_multiply),
    "weight_only": ExpertProduct(_plain, _weight_only_multiply),
}
