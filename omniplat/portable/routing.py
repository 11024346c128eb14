"""Rows of a layer of experts sorted by expert, without asking the device for a number: it records under CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omniplat.portable.quantize import has_triton
from omniplat.runtime.routing import local_ids


@dataclass(frozen=True, slots=True)
class Sorted:
    """R = M * T pairs of a token and an expert, sorted by expert; those that no expert here runs come last.

    `rows` int64 [R]   the token of each; `place` int64 [M, T] where each went; `ends` int32 [E] behind each expert's.
    """

    rows: torch.Tensor
    place: torch.Tensor
    ends: torch.Tensor


def sort_by_expert(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> Sorted:
    """`topk_ids` [M, T], -1 for no expert, through `expert_map` (see `MoeKernel.apply`), M > 0."""
    if topk_ids.device.type != "cpu" and has_triton():
        from omniplat.portable import routing_triton

        return routing_triton.sort_by_expert(topk_ids, expert_map, experts)
    return sort_by_expert_torch(topk_ids, expert_map, experts)


def sort_by_expert_torch(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> Sorted:
    """`sort_by_expert` in plain torch."""
    slots = topk_ids.shape[1]
    ids = local_ids(topk_ids.reshape(-1), expert_map)
    ranked, order = torch.sort(torch.where(ids < 0, experts, ids), stable=True)
    known = torch.arange(experts, device=ids.device)
    ends = torch.searchsorted(ranked, known, right=True, out_int32=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return Sorted(order // slots, place.view(-1, slots), ends)


def weighted_sum(
    out: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, held: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Sum over slots of `weights` [M, T] times rows `place` [M, T] of `out` [R, K], in f32, to [M, K] in `dtype`.

    Rows from `held` (one int32) on count as 0, whatever lies there.
    """
    chosen = torch.where((place < held)[:, :, None], out[place].to(torch.float32), 0.0)
    return (chosen * weights.to(torch.float32)[:, :, None]).sum(1).to(dtype)
