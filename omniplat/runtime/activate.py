"""What lies between the two products of a gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omniplat.errors import UsageError
from omniplat.layer import ACTIVATIONS


def activate(
    gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float = 0.0, alpha: float = 1.0
) -> torch.Tensor:
    """What w2 sees of gate and up (see `MoeSpec`); raises UsageError for an activation that is not known."""
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu":
        return F.gelu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "relu2":
        return F.relu(gate).square() * up
    if activation == "swiglu-oai":
        return torch.sigmoid(gate * alpha) * gate * (up + 1.0)
    raise UsageError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
