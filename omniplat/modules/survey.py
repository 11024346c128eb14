"""What a model has to quantize, linear layers and stacks of experts: what each gets, and why some get nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from omniplat.errors import UsageError
from omniplat.models.advice import FLOAT_COMPONENT_REASON, FLOAT_COMPONENTS, is_diffusion, why_sensitive
from omniplat.modules.experts import ExpertsForm, experts_form, holds_stacks
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.modules.places import WRAPPED, Place, places_of, plain_name, require_none, why_not, why_not_below
from omniplat.online import Method, Routing, block_of, ignored_by, no_leading_blocks
from omniplat.packing import family_of
from omniplat.registry import MODELS, Registry


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one layer gets, linear or experts in stacks: a method, or none and the reason.

    `name`      in what was surveyed; `place.name` is that in its component.
    `model`     the configuration of the model that the layer belongs to.
    `is_advice` nobody asked for leaving it alone.
    `form`      of experts that get a method; None for linear layers.
    """

    name: str
    place: Place
    method: Method | None
    reason: str
    model: Mapping[str, Any]
    is_advice: bool = False
    form: ExpertsForm | None = None

    @property
    def local(self) -> str:
        """The layer's name in its component, without adapters: under which options know it."""
        return plain_name(self.place.name)


def components_of(model: object) -> dict[str, nn.Module]:
    """The parts of a pipeline (an object with `components`, as diffusers' are), or the model itself under ""."""
    if isinstance(model, nn.Module):
        return {"": model}
    parts = getattr(model, "components", None)
    found = {name: part for name, part in (parts or {}).items() if isinstance(part, nn.Module)}
    if not found:
        raise UsageError(f"{type(model).__name__} is neither a torch.nn.Module nor a pipeline with components")
    return found


def all_places(model: object) -> dict[str, Place]:
    """Every module of a model or of a pipeline's components, by name."""
    found: dict[str, Place] = {}
    for component, root in components_of(model).items():
        prefix = f"{component}." if component else ""
        if component:
            found[component] = Place(component, root, "", root)
        found |= {prefix + name: place for name, place in places_of(root).items()}
    return found


def config_of(module: nn.Module) -> dict[str, Any]:
    """The configuration of a transformers or diffusers model, with its class; the class alone for others."""
    config = getattr(module, "config", None)
    to_dict: Callable[[], dict[str, Any]] | None = getattr(config, "to_dict", None)
    values = dict(config) if isinstance(config, Mapping) else to_dict() if callable(to_dict) else {}
    return {**values, "_class_name": type(module).__name__}


def adapter_modules(model: object) -> frozenset[int]:
    """Ids of the modules that adapters add around the layers that they wrap."""
    found: set[int] = set()
    for root in components_of(model).values():
        for wrapper in root.modules():
            wrapped = wrapper._modules.get(WRAPPED)
            if wrapped is not None:
                found |= {id(module) for module in wrapper.modules()} - {id(module) for module in wrapped.modules()}
    return frozenset(found)


class Survey:
    """The linear layers and stacks of experts of a model under a routing. Raises UsageError for what cannot be meant.

    `arriving`  weights come from elsewhere: the model may be on `meta`.
    `calibrated`    static scales of inputs will be found.
    """

    def __init__(
        self,
        model: object,
        routing: Routing,
        registry: Registry,
        *,
        arriving: bool = False,
        calibrated: bool = False,
    ) -> None:
        self._arriving = arriving
        self._calibrated = calibrated
        self.places = all_places(model)
        self._routing = routing
        self._is_pipeline = not isinstance(model, nn.Module)
        self._whole = config_of(model) if isinstance(model, nn.Module) else {"_class_name": type(model).__name__}
        self._models = self._diffusion_models(model)
        self._families = [family for name in registry.names(MODELS) for family in registry.load(MODELS, name)]
        self._shared = Counter(id(p) for place in self.places.values() for p in place.module._parameters.values())
        self._adapters = adapter_modules(model)
        self._layers = {
            name: place
            for name, place in self.places.items()
            if isinstance(place.module, nn.Linear) or holds_stacks(place.module)
        }
        self._require_fresh()
        self._require_components()
        self._blocks = self._transformer_blocks()
        self._kept = self._leading_blocks()
        self._ignored = self._ignored_layers()

    def verdicts(self) -> list[Verdict]:
        """One for every layer, in the model's order."""
        found = [self._verdict(name, place) for name, place in self._layers.items()]
        problems = [f"{v.place.name}: {why}" for v in found if v.method is not None and (why := self._problem(v))]
        require_none("cannot be quantized; ignored_layers leaves them out", problems)
        self._require_some(found)
        self._require_blocks(found)
        self._require_scales(found)
        return found

    def _verdict(self, name: str, place: Place) -> Verdict:
        config, local = self._model_of(name)
        method = self._routing.of(name)

        def stays(reason: str, *, is_advice: bool = False) -> Verdict:
            return Verdict(name, place, None, reason, config, is_advice)

        if method is None:
            return stays("no method for this component")
        if id(place.module) in self._adapters:
            return stays("part of an adapter")
        if self._routing.component_of(name) is None and FLOAT_COMPONENTS.fullmatch(name.partition(".")[0]):
            return stays(FLOAT_COMPONENT_REASON, is_advice=True)
        if name in self._ignored:
            return stays(self._ignored[name])
        if name in self._kept:
            return stays(f"num_bf16_fallback_layers={method.leading_blocks}")
        if method.keep_sensitive and (reason := why_sensitive(local, config)):
            return stays(reason, is_advice=True)
        if any(self._shared[id(p)] > 1 for p in place.module._parameters.values() if p is not None):
            return stays("its weight is another module's too", is_advice=True)
        if isinstance(place.owner, nn.MultiheadAttention):
            return stays(why_not(place), is_advice=True)
        if isinstance(place.module, nn.Linear):
            return Verdict(name, place, method, method.name, config)
        try:
            form = experts_form(place.module)
        except UsageError as exc:
            raise UsageError(f"{name} {exc}; ignored_layers leaves it out") from exc
        return Verdict(name, place, method, method.name, config, form=form)

    def _problem(self, verdict: Verdict) -> str:
        """Why the layer's method cannot run on it; "" where it can."""
        method, module = verdict.method, verdict.place.module
        assert method is not None
        if verdict.form is None:
            assert isinstance(module, nn.Linear)
            if why := why_not(verdict.place):
                return why
            weights, columns = [module.weight], [module.in_features]
        else:
            if why := why_not_below(verdict.place):
                return why
            if verdict.form.gate is None:
                return "shows neither an act_fn nor a gate: what its experts compute is not known"
            if method.is_static:
                return "holds experts, whose second input nobody sees: they have no static activations"
            weights, columns = list(module.parameters()), [verdict.form.hidden, verdict.form.intermediate]
        for weight in weights:
            if weight.is_meta and not self._arriving:
                return "is on meta: it has no values"
            if not weight.is_floating_point():
                return f"is {weight.dtype}"
        for width in columns:
            if method.weight.granularity == "group" and width % method.weight.group_size:
                return f"{width} columns are not a multiple of {method.name}'s group of {method.weight.group_size}"
        if method.is_static and not self._calibrated and verdict.local not in method.input_scales:
            return "has no entry in input_scales"
        return ""

    # -- what cannot be meant -----------------------------------------------------------------------

    def _require_fresh(self) -> None:
        done = [name for name, place in self.places.items() if isinstance(place.module, (ModelLinear, ModelExperts))]
        if done:
            raise UsageError(f"is quantized already ({done[0]} and {len(done) - 1} more): omniplat.restore undoes it")

    def _require_components(self) -> None:
        for component in self._routing.components:
            if component not in self.places:
                tops = sorted({name.partition(".")[0] for name in self.places})
                raise UsageError(f"no component {component!r}; the model has: {', '.join(tops)}")

    def _require_some(self, found: list[Verdict]) -> None:
        """Every component that was given a method has something for it to do."""
        wanted: dict[str | None, Method] = {k: m for k, m in self._routing.components.items() if m is not None}
        if self._routing.default is not None:
            wanted[None] = self._routing.default
        for component, method in wanted.items():
            own = [verdict for verdict in found if self._routing.component_of(verdict.name) == component]
            unreached = component is None and not own and self._routing.components
            if unreached or any(verdict.method is not None for verdict in own):
                continue
            label = f"component {component!r}" if component is not None else "the model"
            if not own:
                raise UsageError(
                    f"{label} has neither linear layers nor experts: there is nothing for {method.name} to quantize"
                )
            reasons = "; ".join(f"{count} x {text}" for text, count in Counter(v.reason for v in own).most_common(4))
            raise UsageError(f"{label} has nothing for {method.name} to quantize: {reasons}")

    def _require_blocks(self, found: list[Verdict]) -> None:
        """A method that leaves leading blocks alone sees blocks: all would be quantized without a word otherwise."""
        for verdict in found:
            method = verdict.method
            if method is not None and method.leading_blocks and self._group(verdict.name) not in self._blocks:
                raise no_leading_blocks(method, f"around {verdict.name}")

    def _require_scales(self, found: list[Verdict]) -> None:
        """Static scales belong to layers and are positive."""
        for component, method in ((None, self._routing.default), *self._routing.components.items()):
            own = {v.local for v in found if self._routing.component_of(v.name) == component}
            for name, scale in method.input_scales.items() if method is not None else ():
                if name not in own:
                    raise UsageError(f"input_scales: {name!r} is no layer of the model")
                if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
                    raise UsageError(f"input_scales: {name!r}: {scale!r} is not a positive number")

    # -- which layers stay --------------------------------------------------------------------------

    def _diffusion_models(self, model: object) -> dict[str, dict[str, Any]]:
        """Diffusion transformers among the modules, by name."""
        named = {name: place.module for name, place in self.places.items()}
        if isinstance(model, nn.Module):
            named = {"": model, **named}
        configs = ((name, config_of(module)) for name, module in named.items())
        return {name: config for name, config in configs if is_diffusion(config)}

    def _model_of(self, name: str) -> tuple[Mapping[str, Any], str]:
        """Configuration of the model that a module belongs to, and the module's name in it."""
        parts = name.split(".")
        for end in range(len(parts)):
            prefix = ".".join(parts[:end])
            if prefix in self._models:
                return self._models[prefix], ".".join(parts[end:])
        return self._whole, name

    def _group(self, name: str) -> tuple[str | None, str]:
        """What has leading blocks of its own: each part of a pipeline, under each named prefix."""
        return self._routing.component_of(name), name.partition(".")[0] if self._is_pipeline else ""

    def _transformer_blocks(self) -> dict[tuple[str | None, str], list[tuple[str, int]]]:
        """The transformer blocks of every group, in the model's order."""
        blocks: dict[tuple[str | None, str], dict[tuple[str, int], None]] = {}
        for name in self.places:
            if block := block_of(name):
                blocks.setdefault(self._group(name), {})[block] = None
        return {group: list(found) for group, found in blocks.items()}

    def _leading_blocks(self) -> frozenset[str]:
        """Modules of the blocks that a method leaves alone because they come first."""
        kept: set[str] = set()
        for name in self.places:
            method, block = self._routing.of(name), block_of(name)
            if method is not None and block:
                leading = self._blocks[self._group(name)][: method.leading_blocks]
                kept |= {name} if block in leading else set()
        return frozenset(kept)

    def _ignored_layers(self) -> dict[str, str]:
        """Module -> the entry that names it. An entry that names nothing is an error."""
        found: dict[str, str] = {}
        routes: dict[str | None, Method | None] = {None: self._routing.default}
        routes.update(self._routing.components.items())
        for component, method in routes.items():
            if method is None:
                continue
            prefix = f"{component}." if component is not None else ""
            names = [
                name.removeprefix(prefix) for name in self._layers if self._routing.component_of(name) == component
            ]
            root = self.places[component].module if component is not None else None
            config = config_of(root) if root is not None else self._whole
            parts_of = family_of(config, self._families).parts_of
            for entry in method.ignored_layers:
                hits = ignored_by(entry, names, parts_of)
                hits |= {n.removeprefix(prefix) for n in ignored_by(entry, [prefix + n for n in names], parts_of)}
                if not hits:
                    raise UsageError(f"ignored_layers: {entry!r} names no layer of the model")
                for name in hits:
                    found.setdefault(prefix + name, f"ignored_layers[{entry!r}]")
        return found
