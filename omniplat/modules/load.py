"""`load_into`: a model's linear layers and experts, filled from a quantized checkpoint. All of it or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from omniplat.api import make_planned, require_files, require_runnable, runtime_device
from omniplat.checkpoint.folder import Checkpoint, Component, open_checkpoint
from omniplat.checkpoint.modules import split_name
from omniplat.checkpoint.reader import ShardReader
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.device import Device
from omniplat.document import Plan
from omniplat.errors import UsageError
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.modules.places import Names, Place, places_of, require_none, why_not, why_not_experts
from omniplat.modules.renames import renames_of
from omniplat.modules.slots import Slots
from omniplat.modules.survey import components_of
from omniplat.packed import PackedLayer, per_module
from omniplat.planner import Planned, PlannedLayer
from omniplat.portable.ahead import TOKENS, compile_kernels
from omniplat.runtime.kernel import Workspaces, load_kernel
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.load import load_layer
from omniplat.runtime.tensors import to_tensor

#: Scales of a quantized key-value cache: a model without such a cache has no place for them.
_CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point"})


def load_into(
    model: object,
    checkpoint: str | os.PathLike[str],
    device: str | Device | None = None,
    *,
    component: str | None = None,
    backend: str | None = None,
    allow: Iterable[str] = (),
    prefer: str | None = None,
    key_mapping: Mapping[str, str] | None = None,
    compile_for: Iterable[int] | None = None,
) -> Plan:
    """Fill `model` from a quantized checkpoint: its quantized layers become omniplat's, the rest is loaded as it is.

    The model's modules have the checkpoint's names, or those that transformers gives them, or those that `key_mapping`
    does (expression -> replacement); either may have a prefix that the other lacks, and adapters may wrap layers. It
    may be built on `meta`. Parameters keep the model's dtype and go to the planned device. A layer that engines fuse is
    planned and loaded part by part.

    Of a checkpoint with several components, `component` says which one the model is. A pipeline (an object with
    `components`) is filled as a whole: every component that the checkpoint has quantized, by its own metadata; with
    `component`, that one. Its other components stay as they are.

    Raises before anything of the model changes: UnsupportedCombinationError, InvalidCheckpointError for a checkpoint
    that contradicts itself, UsageError where model and checkpoint do not fit.
    """
    require_files(checkpoint)
    opened = open_checkpoint(checkpoint)
    targets = {target.part.name: target for target in _targets(model, opened, component, key_mapping)}

    def divide(layer: PackedLayer) -> tuple[PackedLayer, ...]:
        target = targets.get(layer.spec.component)
        place = target.places.get(target.names.module(layer.spec.name)) if target is not None else None
        if layer.spec.op == "moe" and place is not None and not isinstance(place.module, nn.ModuleList):
            return (layer,)
        return per_module(layer)

    planned = make_planned(
        opened,
        device,
        backend=backend,
        component=next(iter(targets)) or None if len(targets) == 1 else None,
        allow=allow,
        prefer=prefer,
        divide=divide,
        scan="needed",
        runs=True,
    )
    require_runnable(planned.plan)
    where = runtime_device(planned)
    quantized = {item.layer.component for item in planned.layers if item.layer.status == "ok"}
    if absent := sorted(quantized - set(targets)):
        raise UsageError(f"the checkpoint has {', '.join(absent)} quantized, and the pipeline has no such component")
    if isinstance(model, nn.Module):
        quantized |= set(targets)
    elif not quantized:
        raise UsageError("none of the pipeline's components is quantized in the checkpoint")
    loadings = [_Loading(target, planned, where) for name, target in targets.items() if name in quantized]
    for loading in loadings:
        loading.check()
    for loading in loadings:
        loading.read()
    made = [layer for loading in loadings for layer in loading.made]
    compile_kernels(made, TOKENS if compile_for is None else compile_for)
    for loading in loadings:
        loading.put()
    return planned.plan


@dataclass(frozen=True, slots=True)
class _Target:
    """A model, the component of the checkpoint that it is, and how the names of one become those of the other."""

    model: nn.Module
    part: Component
    places: Mapping[str, Place]
    names: Names


def _targets(
    model: object, opened: Checkpoint, component: str | None, key_mapping: Mapping[str, str] | None
) -> list[_Target]:
    if isinstance(model, nn.Module):
        return [_target(model, _component(opened, component), key_mapping)]
    models = components_of(model)
    if component is not None and component not in models:
        raise UsageError(f"the pipeline has no component {component!r}; it has: {', '.join(models)}")
    parts = [_component(opened, component)] if component is not None else opened.components
    found = [_target(models[part.name], part, key_mapping) for part in parts if part.name in models]
    if not found:
        names = ", ".join(part.name or "(itself)" for part in parts)
        raise UsageError(f"the pipeline has {', '.join(models)}; the checkpoint has: {names}")
    return found


def _target(model: nn.Module, part: Component, key_mapping: Mapping[str, str] | None) -> _Target:
    places = places_of(model)
    renames = renames_of(model, tuple(part.tensors), key_mapping)
    return _Target(model, part, places, Names(places, (split_name(info)[0] for info in part.tensors.values()), renames))


def _component(opened: Checkpoint, name: str | None) -> Component:
    known = {item.name: item for item in opened.components}
    if name is None and len(known) == 1:
        return opened.components[0]
    if name is None:
        raise UsageError(f"the checkpoint has several components; say which one the model is: {', '.join(known)}")
    if name not in known:
        raise UsageError(f"no component {name!r}; the checkpoint has: {', '.join(n or '(itself)' for n in known)}")
    return known[name]


class _Loading:
    """One model of a call of `load_into`: checks, then reading, then assignments that cannot fail."""

    def __init__(self, target: _Target, planned: Planned, device: torch.device) -> None:
        self._places = target.places
        self._names = target.names
        self._device = device
        self._part = target.part
        own = [item for item in planned.layers if item.layer.component == target.part.name]
        self._layers = [item for item in own if item.layer.status == "ok"]
        self._matrices = {
            module.name
            for resolution in planned.resolutions
            if resolution.component.name == target.part.name
            for module in resolution.modules
        }
        self._targets: dict[str, Place] = {}
        self._problems: list[str] = []
        for item in self._layers:
            self._fit(item)
        self._slots = Slots(target.model, self._targets.values())
        self._slots.tie({target.names.tensor(name) for name in target.part.tensors})
        self._values = self._plain()
        self._made: dict[str, ModelLinear | ModelExperts] = {}
        self._read: dict[str, torch.Tensor] = {}

    def check(self) -> None:
        of = f" of {self._part.name}" if self._part.name else ""
        require_none(f"model and checkpoint{of}, matched {self._names}, do not fit", self._problems)

    def read(self) -> None:
        reader = ShardReader(self._part.root)
        workspaces = Workspaces()
        self._made = {item.layer.name: self._load(item, reader, workspaces) for item in self._layers}
        self._read = {
            name: self._slots.converted(name, to_tensor(reader.read(info)), self._device, info.shard)
            for name, info in self._values.items()
        }

    @property
    def made(self) -> tuple[ModelLinear | ModelExperts, ...]:
        return tuple(self._made.values())

    def put(self) -> None:
        for name, module in self._made.items():
            self._targets[name].put(module.train(self._targets[name].module.training))
        self._slots.fill(self._read, self._device)

    # -- checks -------------------------------------------------------------------------------------

    def _fit(self, item: PlannedLayer) -> None:
        spec, name = item.packed.spec, item.layer.name
        place = self._places.get(self._names.module(name))
        # Experts that the checkpoint has one by one are stacked by the loader, as transformers does.
        conversion = self._names.conversion(name) if spec.moe is None else ""
        if place is None:
            made = f"; transformers makes something else of it ({conversion})" if conversion else ""
            self._problems.append(f"{name} ({spec.scheme.id}): the model has no such module{made}")
            return
        if conversion:
            problem = f"transformers converts its weight ({conversion}), which cannot be done to a quantized one"
        elif spec.moe is not None:
            problem = why_not_experts(place, spec.moe, spec.in_features)
        else:
            problem = why_not(place) or _sizes_differ(place.module, item)
        if problem:
            self._problems.append(f"{place.name}: {problem}")
        self._targets[name] = place

    def _plain(self) -> dict[str, TensorInfo]:
        """The tensors that are loaded as they are, by the model's name for them."""
        quantized = {module.name for item in self._layers for module in item.packed.modules}
        used = {info.name for item in self._layers for m in item.packed.modules for info in m.tensors.values()}
        found: dict[str, TensorInfo] = {}
        for name, info in self._part.tensors.items():
            owner, leaf = split_name(info)
            if name in used or owner in quantized or leaf in _CACHE_SCALES:
                continue
            target = self._names.tensor(name)
            conversion = self._names.conversion(owner) if leaf == "weight" else ""
            if conversion:
                self._problems.append(f"{name}: transformers converts it ({conversion}), which is not done here")
            elif problem := self._slots.misfit(target, info.shape):
                # Beside a weight that is not quantized after all: the plan's `unexpected-tensor`.
                if owner not in self._matrices or leaf in ("weight", "bias"):
                    self._problems.append(problem if target == name else f"{name}: {problem}")
            else:
                found[target] = info
        self._problems += self._slots.unfilled(found)
        return found

    # -- reading ------------------------------------------------------------------------------------

    def _load(self, item: PlannedLayer, reader: ShardReader, workspaces: Workspaces) -> ModelLinear | ModelExperts:
        kernel = load_kernel(item.impl)
        layer = load_layer(item.packed, kernel, reader, device=self._device, workspaces=workspaces)
        if isinstance(layer, QuantExperts):
            return ModelExperts.of(layer, workspaces)
        return ModelLinear.of(layer, workspaces)


def _sizes_differ(module: nn.Module, item: PlannedLayer) -> str:
    """What is different about the model's linear layer; "" where it has the checkpoint's sizes."""
    assert isinstance(module, nn.Linear)
    spec = item.packed.spec
    if (module.out_features, module.in_features) != (spec.out_features, spec.in_features):
        return (
            f"is {module.out_features} x {module.in_features}; the checkpoint has "
            f"{spec.out_features} x {spec.in_features} ({spec.scheme.id})"
        )
    if (module.bias is not None) != spec.bias:
        return "has no bias, the checkpoint has one" if spec.bias else "has a bias, the checkpoint has none"
    return ""
