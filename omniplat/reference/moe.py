"""Experts: rows are sorted by the expert that they chose, and every expert runs once over its own.

The layer's input is quantized once, before rows are gathered, where all experts see it alike; an expert with a static
scale or a smoothing vector of its own quantizes the rows that it gets. w2's input is quantized expert by expert.
Everything between input and output is float32; but where the input is bf16 and every operand is a bf16 number, both
products give bf16 on CPUs that have units for it, as the model's own code does. The weighted sum is float32 always.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omniplat.oracle.moe import INPUT_ROLES
from omniplat.reference.activations import Quantized
from omniplat.reference.decode import Tensors
from omniplat.reference.linear import multiply, quantize_input, runs_in_bf16
from omniplat.runtime.activate import activate
from omniplat.runtime.routing import local_ids
from omniplat.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Experts:
    """How the experts of one layer compute: schemes of w13 and w2, their `splits` (see `linear`), the activation."""

    w13: Scheme
    w2: Scheme
    splits: tuple[int, int] = (0, 0)
    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 1.0


def experts(
    x: torch.Tensor,
    tensors: Tensors,
    how: Experts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`x` [M, K] through its experts, [M, K] in `out_dtype`.

    `tensors` holds stacked weights as `w13_<role>` and `w2_<role>`. An id of -1, or one that `expert_map` maps to
    -1, contributes nothing.
    """
    count, width = tensors["w13_codes"].shape[0], tensors["w2_codes"].shape[1]
    y = torch.zeros((x.shape[0], width), dtype=torch.float32)
    ids = local_ids(topk_ids.reshape(-1), expert_map)
    if not ids.numel():
        return y.to(out_dtype)
    order = torch.argsort(ids, stable=True)
    rows = order // topk_ids.shape[1]
    weights = topk_weights.reshape(-1)[order].to(torch.float32).unsqueeze(1)
    ends = torch.bincount(ids + 1, minlength=count + 1).cumsum(0).tolist()
    inner = torch.bfloat16 if x.dtype == torch.bfloat16 and _is_bf16(tensors, how) else torch.float32
    shared = None if _differ(tensors) else quantize_input(x, how.w13, {})
    for expert in range(count):
        start, stop = ends[expert], ends[expert + 1]
        if start == stop:
            continue
        chosen = rows[start:stop]
        w13, w2 = _of(tensors, "w13_", expert), _of(tensors, "w2_", expert)
        seen = shared.rows(chosen) if shared is not None else quantize_input(x.index_select(0, chosen), how.w13, w13)
        out = _mlp(seen, w13, w2, how, inner).to(torch.float32)
        y.index_add_(0, chosen, out.mul_(weights[start:stop]))
    return y.to(out_dtype)


def _mlp(x: Quantized, w13: Tensors, w2: Tensors, how: Experts, inner: torch.dtype) -> torch.Tensor:
    in_bf16 = inner is torch.bfloat16
    both = multiply(x, how.w13, w13, w13.get("bias"), how.splits[0], inner, in_bf16=in_bf16)
    gate, up = both.to(torch.float32).chunk(2, dim=1)
    hidden = activate(gate, up, how.activation, how.limit, how.alpha).to(inner)
    return multiply(
        quantize_input(hidden, how.w2, w2), how.w2, w2, w2.get("bias"), how.splits[1], inner, in_bf16=in_bf16
    )


def _is_bf16(tensors: Tensors, how: Experts) -> bool:
    return all(
        runs_in_bf16(scheme, tensors[f"{name}_codes"], tensors.get(f"{name}_bias"))
        for name, scheme in (("w13", how.w13), ("w2", how.w2))
    )


def _differ(tensors: Tensors) -> bool:
    """True where every expert sees the layer's input in its own way."""
    return any("w13_" + role in tensors for role in INPUT_ROLES)


def _of(tensors: Tensors, prefix: str, expert: int) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor[expert] for name, tensor in tensors.items() if name.startswith(prefix)}
