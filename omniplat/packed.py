"""PackedLayer: one runtime layer and the checkpoint modules whose rows it concatenates."""

from __future__ import annotations

from dataclasses import dataclass

from omniplat.formats.resolved import ResolvedModule
from omniplat.layer import LayerSpec
from omniplat.roworder import AS_IS, RowOrder


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint module of a layer and the row order in which it lies on disk."""

    module: ResolvedModule
    row_order: RowOrder = AS_IS


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A linear layer has `parts`, concatenated along N in this order.

    A moe layer has `w13` and `w2` instead: per expert the parts of the gate-and-up weight (gate then up, or one
    fused part) and of the down weight. A stacked 3-D weight is one part for all experts (`stacked` is True).
    """

    spec: LayerSpec
    parts: tuple[Part, ...] = ()
    w13: tuple[tuple[Part, ...], ...] = ()
    w2: tuple[tuple[Part, ...], ...] = ()
    stacked: bool = False
    fused: bool = False

    @property
    def modules(self) -> tuple[ResolvedModule, ...]:
        groups = self.w13 + self.w2
        return tuple(part.module for part in self.parts) + tuple(part.module for group in groups for part in group)
