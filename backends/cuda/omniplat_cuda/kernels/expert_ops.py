"""The operator over torch's grouped fp8 product, registered in torch's library `omniplat` on import.

Rows are sorted by the expert that they chose; nothing is read back to the host, so that it records under CUDA graphs.
"""

from __future__ import annotations

import torch

from omniplat.portable.gated import quantize_gated
from omniplat.portable.quantize import has_triton
from omniplat.portable.routing import sort_by_expert, weighted_sum
from omniplat.runtime.activate import activate
from omniplat.runtime.operators import experts_fake, new_library, register
from omniplat.runtime.quant_text import decode_quant
from omniplat.scheme import TensorQuant
from omniplat_cuda.kernels.ops import quantize_to_fp8

_LIBRARY = new_library()


def _experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    first: str,
    second: str,
    activation: str,
    limit: float,
    alpha: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Codes uint8 [E, 2I, K] and [E, K, I] (bytes of e4m3fn), scales f32 [E, 2I] and [E, K]; x [M, K] in bf16."""
    if not len(x):
        return x.new_empty(x.shape, dtype=out_dtype)
    order = sort_by_expert(topk_ids, expert_map, len(w13))
    codes, scale = quantize_to_fp8(x, decode_quant(first), None, None)
    both = _grouped(codes[order.rows], scale[order.rows, 0], w13, w13_scale, order.ends)
    hidden, hidden_scale = _activated(both, decode_quant(second), activation, limit, alpha)
    out = _grouped(hidden, hidden_scale[:, 0], w2, w2_scale, order.ends)
    if x.is_cuda and has_triton():
        from omniplat.portable.experts_triton import combine

        return combine(out, order.place, topk_weights, order.ends[-1:], out_dtype)
    return weighted_sum(out, order.place, topk_weights, order.ends[-1:], out_dtype)


def _activated(
    both: torch.Tensor, quant: TensorQuant, activation: str, limit: float, alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of what w2 sees of gate and up."""
    if activation == "silu" and not limit and both.is_cuda and has_triton():
        return quantize_gated(both, quant)
    gate, up = both.to(torch.float32).chunk(2, dim=1)
    return quantize_to_fp8(activate(gate, up, activation, limit, alpha).to(both.dtype), quant, None, None)


def _grouped(
    codes: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor, weight_scale: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Rows up to ends[e] by the weight of expert e, bf16 [R, N]; rows beyond the last end hold anything."""
    a, b = codes.view(torch.float8_e4m3fn), weights.view(torch.float8_e4m3fn)
    if codes.is_cuda:
        return torch._scaled_grouped_mm(
            a, b.transpose(1, 2), scale, weight_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    y = torch.full((len(codes), weights.shape[1]), torch.nan, dtype=torch.bfloat16)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        rows = slice(start, end)
        product = a[rows].to(torch.float32) @ b[expert].to(torch.float32).t()
        y[rows] = (product * scale[rows, None] * weight_scale[expert]).to(torch.bfloat16)
        start = end
    return y


register(
    _LIBRARY,
    "cuda_scaled_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, Tensor w13, "
    "Tensor w13_scale, Tensor w2, Tensor w2_scale, str first, str second, str activation, float limit, float alpha, "
    "ScalarType out_dtype) -> Tensor",
    dict.fromkeys(("CUDA", "CPU"), _experts),
    experts_fake,
)
