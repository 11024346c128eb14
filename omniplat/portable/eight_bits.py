"""Weights and tokens in codes of 8 bits, as products take them: which weights, in which buffers, what they stand for.

A weight has scales of whole rows, and tokens have one each; or it has scales of blocks of so many rows by 128 columns
(fp8), and tokens have one for every 128 columns.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from omniplat.portable import quantize, quantize_groups
from omniplat.runtime.finite import fp8_codes, multipliers
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant


def why_not(weight: WeightTensors, weights: Collection[str], roles: Collection[str]) -> str:
    """What keeps a weight that is to be one of `weights`, with no tensors but `roles`, from being computed in 8 bits;
    "" where nothing does."""
    if weight.scheme.weight_id not in weights:
        return f"one of {', '.join(weights)}"
    if not weight.tensors.keys() <= set(roles):
        return f"no roles but {', '.join(sorted(roles))}"
    quant, activation = weight.scheme.weight, weight.scheme.activation
    if quant.granularity == "block":
        return quantize_groups.why_not(activation)
    if activation is None or activation.element != quant.element or activation.granularity != "token":
        return f"activations in {quant.element} with a scale for each token"
    return quantize.why_not(activation)


def coded_tensors(weight: WeightTensors, name: str) -> dict[str, torch.Tensor]:
    """Buffers of a weight that `why_not` allows: `codes` [N, K], uint8 (bytes of e4m3fn) or int8; `scale` f32 [N] of
    rows or [ceil(N/bn), ceil(K/128)] of blocks. Experts lead. Raises InvalidCheckpointError, naming the layer `name`,
    for NaN codes and e8m0 scales of NaN."""
    codes, scale, quant = weight.tensors["codes"], multipliers(weight, name), weight.scheme.weight
    return {
        "codes": codes.contiguous().view(torch.int8) if quant.is_integer else fp8_codes(codes, name),
        "scale": (scale if quant.granularity == "block" else scale.squeeze(-1)).contiguous(),
    }


def block_rows_of(weight: WeightTensors) -> int:
    """Rows of a block of the weight; 0 where whole rows have a scale."""
    return weight.scheme.weight.block[0]


def quantized(x: torch.Tensor, quant: TensorQuant, pre_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [M, K], M > 0, to codes [M, K], uint8 (bytes of e4m3fn) or int8, and multipliers f32 [G, M]: G is 1 where a
    token has one scale, else ceil(K / 128)."""
    if quant.granularity == "group":
        return quantize_groups.quantize_groups(x, quant, pre_scale)
    codes, scale = quantize.quantize_rows(x, quant, pre_scale, None)
    return codes, scale.view(1, -1)


def represented_codes(codes: torch.Tensor, scale: torch.Tensor, block_rows: int) -> torch.Tensor:
    """f32 [R, K]: codes [R, K] times `scale`: [ceil(R / block_rows), G] of 128 columns each, or with `block_rows` 0 one
    for each row."""
    numbers = as_numbers(codes).to(torch.float32)
    if not block_rows:
        return numbers * scale.reshape(-1, 1)
    rows, columns = codes.shape
    by_row = scale.repeat_interleave(block_rows, 0)[:rows]
    return numbers * by_row.repeat_interleave(quantize_groups.GROUP, 1)[:, :columns]


def as_numbers(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes as they are, bytes of e4m3fn as such."""
    return codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
