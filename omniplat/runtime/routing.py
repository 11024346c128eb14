"""How the logits of a router choose experts, as a pure function; `Routing` says which way.

Routing is an input of a layer of experts: an engine that has its own brings `topk_ids` and `topk_weights`.
"""

from __future__ import annotations

import torch

from omniplat.errors import UsageError
from omniplat.layer import Routing


def route(
    logits: torch.Tensor, top_k: int, routing: Routing, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk_ids` int64 [M, top_k] and `topk_weights` f32 [M, top_k] for `logits` [M, E], the best expert first.

    Scores are float32 whatever the logits are. `correction_bias` [E] is added to them for choosing, not for weighing.
    Traces with any number of rows. Raises UsageError for a scoring that is not known, and for more experts than may
    be chosen.
    """
    rows, experts = logits.shape
    allowed = experts // routing.groups * routing.topk_groups
    if experts % routing.groups or not 1 <= top_k <= allowed:
        raise UsageError(
            f"cannot choose {top_k} of {experts} experts in {routing.topk_groups} of {routing.groups} groups"
        )
    scores = _scores(logits.to(torch.float32), routing.scoring)
    choice = scores if correction_bias is None else scores + correction_bias.to(torch.float32).reshape(experts)
    if routing.groups > 1:
        grouped = choice.view(rows, routing.groups, experts // routing.groups)
        worth = grouped.topk(min(2 if routing.group_score == "top2" else 1, grouped.shape[2]), dim=2).values.sum(2)
        best = worth.topk(routing.topk_groups, dim=1).indices
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter(1, best, True)
        choice = grouped.masked_fill(~kept.unsqueeze(2), -torch.inf).view(rows, experts)
    topk_ids = choice.topk(top_k, dim=1).indices
    weights = scores.gather(1, topk_ids)
    if routing.renormalize:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return topk_ids, weights * routing.scale


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """`topk_ids`, of any shape, as int64 numbers of the experts that a rank holds; negative where it holds none.

    `expert_map` int32 [global experts] gives the local number of an expert, -1 for one that another rank holds.
    """
    ids = topk_ids.to(torch.int64)
    return ids if expert_map is None else torch.where(ids < 0, -1, expert_map.to(torch.int64)[ids.clamp(min=0)])


def _scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "softmax":
        return logits.softmax(1)
    if scoring == "sigmoid":
        return logits.sigmoid()
    raise UsageError(f"scoring {scoring!r} is none of softmax, sigmoid: bring topk_ids and topk_weights")
