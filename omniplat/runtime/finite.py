"""Codes and scales as bytes, none of which is NaN: what kernels look at before they lay a weight out."""

from __future__ import annotations

import torch

from omniplat.errors import InvalidCheckpointError
from omniplat.runtime.tensors import WeightTensors

#: Codes looked at in one step, so that working memory stays small beside the weight.
_SLICE = 1 << 24


def fp8_codes(codes: torch.Tensor, name: str) -> torch.Tensor:
    """Codes of e4m3fn, of any shape, as contiguous bytes; raises InvalidCheckpointError, naming the layer, for NaN."""
    stored = codes.contiguous().view(torch.uint8)
    for part in torch.split(stored.reshape(-1), _SLICE):
        if bool(((part & 0x7F) == 0x7F).any()):
            raise InvalidCheckpointError("fp8_e4m3 weight holds NaN", key=name)
    return stored


def e8m0_scale(scale: torch.Tensor, name: str) -> torch.Tensor:
    """Scales of e8m0, of any shape, as bytes; raises InvalidCheckpointError, naming the layer, for NaN."""
    stored = scale.view(torch.uint8)
    if bool((stored == 255).any()):
        raise InvalidCheckpointError("a scale is NaN", key=name)
    return stored


def multipliers(weight: WeightTensors, name: str) -> torch.Tensor:
    """The weight's scales as the numbers that they stand for, f32 of their own shape: e8m0 bytes are powers of two.

    Raises InvalidCheckpointError, naming the layer, for an e8m0 scale of NaN.
    """
    scale = weight.tensors["scale"]
    if weight.scheme.weight.scale_format != "e8m0":
        return scale.to(torch.float32)
    exponent = e8m0_scale(scale, name).to(torch.int32) - 127
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64, device=scale.device), exponent).to(torch.float32)
