"""Which layers of a checkpoint in 16 bit an engine quantizes while it loads them. Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omniplat.errors import UsageError
from omniplat.integrations.vllm_names import EngineLayers
from omniplat.models.advice import why_sensitive
from omniplat.online import Method, block_of, ignored_by, no_leading_blocks
from omniplat.packed import PackedLayer, Part
from omniplat.planner import PlannedLayer
from omniplat.scheme import Scheme


@dataclass(frozen=True, slots=True)
class OnlineChoice:
    """What a method does with the modules of one component: `kept` maps those that stay in 16 bit to the reason."""

    method: Method
    kept: Mapping[str, str]

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.method.weight, self.method.activation)

    def takes(self, planned: PlannedLayer) -> bool:
        """Whether a layer is quantized. Raises UsageError where a part of it is to stay and another is not."""
        names = [module.name for module in planned.packed.modules]
        kept = [name for name in names if name in self.kept]
        if kept and len(kept) < len(names):
            raise UsageError(
                f"{planned.layer.name} runs as one layer: {kept[0]} cannot stay in 16 bit ({self.kept[kept[0]]}) "
                f"while {next(name for name in names if name not in self.kept)} is quantized"
            )
        return not kept


def choose_online(method: Method, layers: EngineLayers) -> OnlineChoice:
    """Apply a method's options and what is known of sensitive layers to a component. Raises UsageError for an entry of
    `ignored_layers` that names nothing, for leading blocks that are not recognised, and for options that no engine can
    honour."""
    if method.input_scales:
        raise UsageError(f"{method.name}: static input scales cannot be given to an engine")
    component = layers.component.name
    names = [module.name for planned in layers.planned_layers for module in planned.packed.modules]
    kept: dict[str, str] = {}
    for entry in method.ignored_layers:
        prefix = f"{component}." if component else ""
        hits = ignored_by(entry.removeprefix(prefix), names, layers.family.parts_of)
        # What runs as no layer, such as experts in a layout that is not known, has tensors all the same.
        if not hits and not ignored_by(entry.removeprefix(prefix), layers.component.tensors):
            raise UsageError(f"ignored_layers: {entry!r} names no layer of the checkpoint")
        kept |= dict.fromkeys(hits, f"ignored_layers[{entry!r}]")
    if method.leading_blocks and not any(block_of(name) for name in names):
        raise no_leading_blocks(method, f"in {component or 'the model'}")
    for name in names:
        block = block_of(name)
        if block is not None and block[1] < method.leading_blocks:
            kept.setdefault(name, f"num_bf16_fallback_layers={method.leading_blocks}")
        if method.keep_sensitive and (reason := why_sensitive(name, layers.component.config)):
            kept.setdefault(name, reason)
    return OnlineChoice(method, kept)


def as_quantized(layer: PackedLayer, scheme: Scheme) -> PackedLayer:
    """A layer that is stored in 16 bit as it will be once it is quantized."""

    def parts(group: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(
            replace(part, module=replace(part.module, declared=scheme, scheme=scheme, status="ok")) for part in group
        )

    w13, w2 = (tuple(parts(group) for group in groups) for groups in (layer.w13, layer.w2))
    return replace(layer, spec=replace(layer.spec, scheme=scheme), parts=parts(layer.parts), w13=w13, w2=w2)
