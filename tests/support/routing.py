"""What Triton's form of routing is compared with: tiles of experts in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omniplat.portable.routing import Sorted

if TYPE_CHECKING:
    from omniplat.portable.weight_only_triton import ExpertTiles


def tiles_of(order: Sorted, tokens: int) -> ExpertTiles:
    """Tiles of at most `tokens` rows, none with rows of two experts: as many as could be needed, the rest empty."""
    from omniplat.portable.weight_only_triton import ExpertTiles

    rows, experts = len(order.rows), len(order.ends)
    ends = order.ends.to(torch.int64)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    behind = ((ends - starts + tokens - 1) // tokens).cumsum(0)
    tile = torch.arange(min(rows, experts) + rows // tokens, device=ends.device)
    found = torch.searchsorted(behind, tile, right=True)
    expert = found.clamp(max=experts - 1)
    within = tile - torch.nn.functional.pad(behind[:-1], (1, 0))[expert]
    first = starts[expert] + within * tokens
    end = torch.where(found < experts, torch.minimum(ends[expert], first + tokens), first)
    parts = [part.to(torch.int32) for part in (expert, first, end)]
    return ExpertTiles(order.rows, parts[0], parts[1], parts[2], tokens)
