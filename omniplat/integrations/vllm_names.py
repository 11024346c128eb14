"""Which layers of a plan an engine's module runs: from the engine's name to checkpoint modules. Imports no engine."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property

from omniplat.checkpoint.folder import Component
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.engines import Tensors, tensors_below, undeliverable
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.formats.kv_cache import cache_scales
from omniplat.models.family import Family
from omniplat.packed import select_part
from omniplat.packing import family_of
from omniplat.planner import Planned, PlannedLayer
from omniplat.registry import MODELS, default_registry


def parameter_name(leaf: str) -> str:
    """The name of the parameter that stands for a tensor of a module; modules allow no dots in it."""
    return leaf.replace(".", "__")


@dataclass(frozen=True, slots=True)
class EnginePart:
    """One checkpoint module that an engine's module packs: number `position` there, part `index` of `layer` here."""

    position: int
    layer: PlannedLayer
    index: int

    @property
    def name(self) -> str:
        return self.layer.packed.parts[self.index].module.name


def installed_family(component: Component) -> Family:
    """The table of the model that a component is."""
    registry = default_registry()
    families = [family for name in registry.names(MODELS) for family in registry.load(MODELS, name)]
    return family_of(component.config, families)


class EngineLayers:
    """The layers of one component of a plan, found by an engine's names."""

    def __init__(self, planned: Planned, component: str, engine: str) -> None:
        """Raises UsageError for a component that is not there, InvalidCheckpointError where `engine` cannot load it."""
        self.planned = planned
        resolution = next((item for item in planned.resolutions if item.component.name == component), None)
        if resolution is None:
            raise UsageError(f"the plan has no component {component!r}")
        self.component: Component = resolution.component
        self.family = installed_family(resolution.component)
        self._layers = [layer for layer in planned.layers if layer.layer.component == component]
        names = [module.name for layer in self._layers for module in layer.packed.modules]
        self._below: Tensors = tensors_below(names, resolution.component.tensors.values())
        for layer in self._layers:
            if layer.layer.status == "ok":
                for reason, modules in undeliverable(engine, self.family, layer.packed, self._below).items():
                    raise InvalidCheckpointError(f"{engine} cannot load it: {reason}", key=modules[0])
        self.rename(lambda name: name)

    @cached_property
    def cache_scales(self) -> tuple[str, ...]:
        """Tensors of the component that are scales of the KV cache."""
        return tuple(cache_scales(self.component.tensors))

    @cached_property
    def dotted_leaves(self) -> tuple[str, ...]:
        """What follows a quantized module's name in its tensors' where that has a dot: `weight.absmax`."""
        rests = (
            info.name.removeprefix(f"{module.name}.")
            for layer in self._layers
            if layer.layer.status == "ok"
            for module in layer.packed.modules
            for info in self._below[module.name]
        )
        return tuple(dict.fromkeys(rest for rest in rests if "." in rest))

    def rename(self, engine_name: Callable[[str], str | None]) -> None:
        """Set how the engine renames a checkpoint's tensors; None stands for one that it does not load."""
        self._parts: dict[str, tuple[PlannedLayer, int]] = {}
        self._experts: dict[str, PlannedLayer] = {}
        for layer in self._layers:
            for index, part in enumerate(layer.packed.parts):
                name = engine_name(f"{part.module.name}.weight")
                if name is not None:
                    self._parts[name.removesuffix(".weight")] = (layer, index)
            if layer.packed.spec.moe is not None:
                name = engine_name(f"{layer.packed.spec.name}.weight")
                if name is not None:
                    self._experts[name.removesuffix(".weight")] = layer

    def linear(self, prefix: str) -> tuple[EnginePart, ...]:
        """What a linear module packs, in its order; empty when the checkpoint has nothing of that name."""
        found = []
        for position, name in enumerate(self._candidates(prefix, self._parts)):
            if name in self._parts:
                layer, index = self._parts[name]
                found.append(EnginePart(position, layer, index))
        return tuple(found)

    def experts(self, prefix: str) -> PlannedLayer | None:
        """The experts that a module of experts holds."""
        names = self._candidates(prefix, self._experts)
        return next((self._experts[name] for name in names if name in self._experts), None)

    @property
    def planned_layers(self) -> tuple[PlannedLayer, ...]:
        return tuple(self._layers)

    def signature(self, prefix: str) -> tuple[object, ...]:
        """What is stored for an engine's module, whatever the values: equal where two components store the same."""
        experts = self.experts(prefix)
        found = [experts] if experts is not None else [part.layer for part in self.linear(prefix)]
        return tuple((item.layer.status, item.layer.stored, item.layer.declared, _shapes(item)) for item in found)

    def tensors(self, module: str) -> tuple[TensorInfo, ...]:
        """All tensors below a checkpoint module."""
        return self._below[module]

    def _candidates(self, prefix: str, known: Container[str]) -> tuple[str, ...]:
        """The name itself, or the names of the parts that the family's table gives for it."""
        if prefix in known:
            return (prefix,)
        for engine, parts in self.family.parts_of.items():
            if prefix == engine or prefix.endswith("." + engine):
                head = prefix.removesuffix(engine)
                names = tuple(head + part for part in parts)
                if any(name in known for name in names):
                    return names
        return ()


def _shapes(planned: PlannedLayer) -> tuple[object, ...]:
    return tuple(
        (module.name, tuple(sorted((role, info.dtype, info.shape) for role, info in module.tensors.items())))
        for module in planned.packed.modules
    )


def own_layers(parts: tuple[EnginePart, ...]) -> tuple[tuple[PlannedLayer, tuple[EnginePart, ...]], ...]:
    """The parts of one engine module by the layer that runs them.

    A layer that the module packs whole stays one; of a layer that it packs only in part, each part is its own.
    """
    groups: list[tuple[PlannedLayer, tuple[EnginePart, ...]]] = []
    for part in parts:
        of_layer = tuple(other for other in parts if other.layer is part.layer)
        if [other.index for other in of_layer] == list(range(len(part.layer.packed.parts))):
            if part is of_layer[0]:
                groups.append((part.layer, of_layer))
            continue
        alone = PlannedLayer(part.layer.layer, select_part(part.layer.packed, part.index), part.layer.capability)
        groups.append((alone, (EnginePart(part.position, alone, 0),)))
    return tuple(groups)
