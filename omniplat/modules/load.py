"""`load_into`: a model's linear layers and experts, filled from a quantized checkpoint. All of it or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from omniplat.api import make_planned, require_files, require_runnable
from omniplat.checkpoint.folder import Checkpoint, Component, open_checkpoint
from omniplat.checkpoint.modules import split_name
from omniplat.checkpoint.reader import ShardReader
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.device import Device
from omniplat.document import Plan
from omniplat.errors import BackendUnavailableError, UsageError
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.modules.places import Names, Place, places_of, require_none, why_not, why_not_experts
from omniplat.modules.renames import renames_of
from omniplat.modules.slots import Slots
from omniplat.packed import PackedLayer, per_module
from omniplat.planner import Planned, PlannedLayer
from omniplat.runtime.kernel import Workspaces, load_kernel
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.load import load_layer
from omniplat.runtime.tensors import device_of, to_tensor

#: Scales of a quantized key-value cache: a model without such a cache has no place for them.
_CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point"})


def load_into(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device: str | Device | None = None,
    *,
    component: str | None = None,
    backend: str | None = None,
    allow: Iterable[str] = (),
    prefer: str | None = None,
    key_mapping: Mapping[str, str] | None = None,
) -> Plan:
    """Fill `model` from a quantized checkpoint: its quantized layers become omniplat's, the rest is loaded as it is.

    The model's modules have the checkpoint's names, or those that transformers gives them, or those that `key_mapping`
    does (expression -> replacement); either may have a prefix that the other lacks, and adapters may wrap layers. It
    may be built on `meta`. Parameters keep the model's dtype and go to the planned device. Of a
    pipeline, `component` says which part the model is. A layer that engines fuse is planned and loaded part by part.

    Raises before anything of the model changes: UnsupportedCombinationError, InvalidCheckpointError for a checkpoint
    that contradicts itself, UsageError where model and checkpoint do not fit.
    """
    require_files(checkpoint)
    opened = open_checkpoint(checkpoint)
    part = _component(opened, component)
    places = places_of(model)
    renames = renames_of(model, tuple(part.tensors), key_mapping)
    names = Names(places, (split_name(info)[0] for info in part.tensors.values()), renames)

    def divide(layer: PackedLayer) -> tuple[PackedLayer, ...]:
        place = places.get(names.module(layer.spec.name))
        if layer.spec.op == "moe" and place is not None and not isinstance(place.module, nn.ModuleList):
            return (layer,)
        return per_module(layer)

    planned = make_planned(
        opened,
        device,
        backend=backend,
        component=part.name or None,
        allow=allow,
        prefer=prefer,
        divide=divide,
        scan="needed",
    )
    require_runnable(planned.plan)
    where = device_of(planned.device)
    _Loading(model, places, names, planned, part, where).run()
    return planned.plan


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
    """One call of `load_into`: checks, then reading, then one pass of assignments that cannot fail."""

    def __init__(
        self,
        model: nn.Module,
        places: Mapping[str, Place],
        names: Names,
        planned: Planned,
        part: Component,
        device: torch.device,
    ) -> None:
        self._places = places
        self._names = names
        self._device = device
        self._part = part
        self._layers = [item for item in planned.layers if item.layer.status == "ok"]
        self._matrices = {module.name for resolution in planned.resolutions for module in resolution.modules}
        self._targets: dict[str, Place] = {}
        self._problems: list[str] = []
        for item in self._layers:
            self._fit(item)
        self._slots = Slots(model, self._targets.values())
        self._slots.tie({names.tensor(name) for name in part.tensors})
        self._values = self._plain()

    def run(self) -> None:
        require_none(f"model and checkpoint, matched {self._names}, do not fit", self._problems)
        reader = ShardReader(self._part.root)
        workspaces = Workspaces()
        made = {item.layer.name: self._load(item, reader, workspaces) for item in self._layers}
        read = {
            name: self._slots.converted(name, to_tensor(reader.read(info)), self._device, info.shard)
            for name, info in self._values.items()
        }
        for name, module in made.items():
            self._targets[name].put(module.train(self._targets[name].module.training))
        self._slots.fill(read, self._device)

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
        assert item.capability is not None
        if not item.capability.impl:
            raise BackendUnavailableError(str(item.layer.backend), f"kernel {item.capability.name} is only planned on")
        kernel = load_kernel(item.capability.impl)
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
