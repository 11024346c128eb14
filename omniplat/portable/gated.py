"""silu(gate) * up, quantized to 8 bits in the same pass: what a layer of experts does between its two products."""

from __future__ import annotations

import torch

from omniplat.scheme import TensorQuant


def quantize_gated(both: torch.Tensor, quant: TensorQuant) -> tuple[torch.Tensor, torch.Tensor]:
    """`both` [M, 2I], gate first, contiguous, to codes [M, I] and multipliers f32, on a device of Triton's.

    The activation is computed in f32 and not rounded; codes and scales of it are those of `quantize_rows`, of
    `regroup_rows` where `quant` is an MX scheme, or of `quantize_groups` where other groups have scales.
    """
    from omniplat.portable import mx_grid_triton, quantize_groups_triton, quantize_triton

    if quant.is_microscaled:
        return mx_grid_triton.regroup_rows(both, quant, None, gated=True)
    if quant.granularity == "group":
        return quantize_groups_triton.quantize_groups(both, quant, None, gated=True)
    return quantize_triton.quantize_rows(both, quant, None, None, gated=True)
