"""Cutting a canonical weight for one rank of a tensor- or expert-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

from omniplat.canonical import CanonicalWeight
from omniplat.errors import UsageError


@dataclass(frozen=True, slots=True)
class Rank:
    """Which slice of every layer this process holds. `split` is "none", "rows" (N) or "columns" (K)."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    split: str = "none"

    @property
    def is_whole(self) -> bool:
        return (self.split == "none" or self.tp_size == 1) and self.ep_size == 1


#: A process that holds everything.
WHOLE = Rank()


def slice_for_rank(weight: CanonicalWeight, rank: Rank) -> CanonicalWeight:
    """The part of `weight` (canonical row order) that `rank` holds; the weight itself for `WHOLE`.

    Raises UsageError for a real split: layers are not cut yet.
    """
    if rank.is_whole:
        return weight
    raise UsageError(
        f"loading a slice (tensor parallel {rank.tp_rank} of {rank.tp_size}, "
        f"expert parallel {rank.ep_rank} of {rank.ep_size}) is not implemented"
    )
