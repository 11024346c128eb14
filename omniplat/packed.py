"""PackedLayer: one runtime layer and the checkpoint modules whose rows it concatenates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omniplat.formats.resolved import ResolvedModule
from omniplat.layer import LayerSpec
from omniplat.moe_block import MoeBlock
from omniplat.roworder import AS_IS, RowOrder


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint module of a layer and the row order in which it lies on disk."""

    module: ResolvedModule
    row_order: RowOrder = AS_IS


@dataclass(frozen=True, slots=True)
class Split:
    """How engines divide a linear layer over tensor-parallel ranks.

    `style`     "column" (every part along N), "row" (along K) or "replicated".
    `heads`, `kv_heads`   head counts where the rows are attention heads; 0 for every other layer.
    `kv`        for such a layer: which of the spec's parts are keys or values.
    """

    style: str = "replicated"
    heads: int = 0
    kv_heads: int = 0
    kv: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A linear layer has `parts`, concatenated along N in this order; `split` says how ranks share it.

    A moe layer has `w13` and `w2` instead: per expert the parts of the gate-and-up weight (gate then up, or one
    fused part) and of the down weight. A stacked 3-D weight is one part for all experts (`stacked` is True); where
    it lies as [E, K, N] on disk, `transposed` is True. `block` is what stands beside the routed experts.
    """

    spec: LayerSpec
    parts: tuple[Part, ...] = ()
    w13: tuple[tuple[Part, ...], ...] = ()
    w2: tuple[tuple[Part, ...], ...] = ()
    stacked: bool = False
    transposed: bool = False
    block: MoeBlock | None = None
    fused: bool = False
    split: Split = Split()

    @property
    def modules(self) -> tuple[ResolvedModule, ...]:
        groups = self.w13 + self.w2
        return tuple(part.module for part in self.parts) + tuple(part.module for group in groups for part in group)


def select_part(layer: PackedLayer, index: int) -> PackedLayer:
    """One checkpoint module of a linear layer as a layer of its own, for an engine that does not fuse it."""
    if len(layer.parts) == 1:
        return layer
    part, split = layer.parts[index], layer.split
    spec = replace(
        layer.spec,
        name=part.module.name,
        out_features=part.module.out_features,
        parts=(part.module.out_features,),
        bias="bias" in part.module.tensors,
    )
    return PackedLayer(spec, (part,), split=replace(split, kv=split.kv[index : index + 1]))


def per_module(layer: PackedLayer) -> tuple[PackedLayer, ...]:
    """A layer as linear layers, one for each checkpoint module, with rows as they lie on disk: what a model has that
    fuses nothing, its experts one by one. Stacks of experts are no linear layers and stay whole."""
    if layer.spec.op == "linear":
        parts = [replace(part, row_order=AS_IS) for part in layer.parts]
        if len(parts) == 1:
            return (replace(layer, parts=tuple(parts)),)
        unfused = (select_part(layer, index) for index in range(len(parts)))
        return tuple(replace(item, parts=(part,), fused=False) for item, part in zip(unfused, parts, strict=True))
    if layer.stacked:
        return (layer,)
    return tuple(_expert_linear(layer, module) for module in layer.modules)


def _expert_linear(layer: PackedLayer, module: ResolvedModule) -> PackedLayer:
    spec = replace(
        layer.spec,
        name=module.name,
        op="linear",
        out_features=module.out_features,
        in_features=module.in_features,
        scheme=module.scheme,
        bias="bias" in module.tensors,
        parts=(module.out_features,),
        moe=None,
    )
    return PackedLayer(spec, (Part(module),))
