"""Experts, one at a time: the rows that chose an expert are gathered once and run through its two linears."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omniplat.errors import UsageError
from omniplat.reference.decode import Tensors
from omniplat.reference.linear import linear
from omniplat.scheme import Scheme


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up, float32; raises UsageError for an activation that is not known."""
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu":
        return F.gelu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "relu2":
        return F.relu(gate).square_() * up
    raise UsageError(f"activation {activation!r} is none of silu, gelu, gelu_tanh, relu2")


def experts(
    x: torch.Tensor,
    tensors: Tensors,
    schemes: tuple[Scheme, Scheme],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`x` [M, K] through its experts, [M, K] in `out_dtype`; everything between is float32.

    `tensors` holds stacked weights as `w13_<role>` and `w2_<role>`. Raises UsageError for an expert id that is
    out of range; -1 (also from `expert_map`) contributes nothing.
    """
    count = tensors["w13_codes"].shape[0]
    ids = topk_ids.to(torch.int64)
    known = expert_map.numel() if expert_map is not None else count
    if ids.numel() and not bool(((ids >= -1) & (ids < known)).all()):
        raise UsageError(f"topk_ids holds ids outside 0..{known - 1}")
    if expert_map is not None:
        ids = torch.where(ids < 0, -1, expert_map.to(torch.int64)[ids.clamp(min=0)])
    y = torch.zeros((x.shape[0], tensors["w2_codes"].shape[1]), dtype=torch.float32)
    for expert in torch.unique(ids).tolist():
        if expert < 0:
            continue
        rows, slots = torch.nonzero(ids == expert, as_tuple=True)
        w13, w2 = _of(tensors, "w13_", expert), _of(tensors, "w2_", expert)
        hidden = linear(x[rows], schemes[0], w13, w13.get("bias"), torch.float32)
        gate, up = hidden.chunk(2, dim=1)
        out = linear(activate(gate, up, activation), schemes[1], w2, w2.get("bias"), torch.float32)
        y.index_add_(0, rows, out * topk_weights[rows, slots].to(torch.float32).unsqueeze(1))
    return y.to(out_dtype)


def _of(tensors: Tensors, prefix: str, expert: int) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor[expert] for name, tensor in tensors.items() if name.startswith(prefix)}
