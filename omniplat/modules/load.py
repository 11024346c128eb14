"""`load_into`: a model's linear layers and experts, filled from a quantized checkpoint. All of it or nothing."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from omniplat.api import make_planned, require_files, require_runnable
from omniplat.checkpoint.folder import Checkpoint, Component, open_checkpoint
from omniplat.checkpoint.modules import split_name
from omniplat.checkpoint.reader import ShardReader
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.device import Device
from omniplat.document import Plan
from omniplat.errors import BackendUnavailableError, InvalidCheckpointError, UsageError
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.modules.places import WRAPPED, Names, Place, places_of, plain_name, why_not, why_not_experts
from omniplat.packed import PackedLayer, per_module
from omniplat.planner import Planned, PlannedLayer
from omniplat.runtime.kernel import Workspaces, load_kernel
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.load import load_layer
from omniplat.runtime.tensors import device_of, to_tensor

#: Scales of a quantized key-value cache: a model without such a cache has no place for them.
_CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point"})
#: Problems that an error lists.
_SHOWN = 5


def load_into(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device: str | Device | None = None,
    *,
    component: str | None = None,
    backend: str | None = None,
    allow: Iterable[str] = (),
    prefer: str | None = None,
) -> Plan:
    """Fill `model` from a quantized checkpoint: its quantized layers become omniplat's, the rest is loaded as it is.

    The model's modules have the checkpoint's names; either may have a prefix that the other lacks, and adapters may
    wrap layers. It may be built on `meta`. Parameters keep the model's dtype and go to the planned device. Of a
    pipeline, `component` says which part the model is. A layer that engines fuse is planned and loaded part by part.

    Raises before anything of the model changes: UnsupportedCombinationError, InvalidCheckpointError for a checkpoint
    that contradicts itself, UsageError where model and checkpoint do not fit.
    """
    require_files(checkpoint)
    opened = open_checkpoint(checkpoint)
    part = _component(opened, component)
    places = places_of(model)
    names = Names(places, (split_name(info)[0] for info in part.tensors.values()))

    def divide(layer: PackedLayer) -> tuple[PackedLayer, ...]:
        place = places.get(names.of(layer.spec.name))
        if layer.spec.op == "moe" and place is not None and not isinstance(place.module, nn.ModuleList):
            return (layer,)
        return per_module(layer)

    planned = make_planned(
        opened, device, backend=backend, component=part.name or None, allow=allow, prefer=prefer, divide=divide
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


@dataclass(frozen=True, slots=True)
class _Slot:
    """One parameter or buffer of a model: `owner` has it as `leaf`."""

    name: str
    owner: nn.Module
    leaf: str
    tensor: torch.Tensor

    def put(self, tensor: torch.Tensor) -> None:
        if self.leaf in self.owner._parameters:
            self.owner._parameters[self.leaf] = (
                tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, self.tensor.requires_grad)
            )
        else:
            self.owner._buffers[self.leaf] = tensor


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
        self._targets: dict[str, Place] = {}
        self._problems: list[str] = []
        for item in self._layers:
            self._fit(item)
        self._slots = _slots_of(model, self._targets.values())
        stored = {names.of(name) for name in part.tensors}
        for name, source in _ties(model).items():
            if name in self._slots and source in self._slots and name not in stored:
                self._slots[name] = replace(self._slots[name], tensor=self._slots[source].tensor)
        self._values = self._plain(model)

    def run(self) -> None:
        if self._problems:
            shown = self._problems[:_SHOWN]
            more = len(self._problems) - len(shown)
            text = "\n  ".join(shown + ([f"and {more} more"] if more else []))
            raise UsageError(f"model and checkpoint, matched {self._names}, do not fit:\n  {text}")
        reader = ShardReader(self._part.root)
        workspaces = Workspaces()
        made = {item.layer.name: self._load(item, reader, workspaces) for item in self._layers}
        read = {name: self._convert(info, self._slots[name], reader) for name, info in self._values.items()}
        for name, module in made.items():
            self._targets[name].put(module.train(self._targets[name].module.training))
        shared: dict[int, torch.Tensor] = {id(self._slots[name].tensor): tensor for name, tensor in read.items()}
        parameters = {key: _parameter(tensor) for key, tensor in shared.items()}
        for slot in self._slots.values():
            if id(slot.tensor) not in shared:
                if slot.tensor.device != self._device and not slot.tensor.is_meta:
                    slot.put(slot.tensor.detach().to(self._device))
            elif slot.leaf in slot.owner._parameters:
                slot.put(parameters[id(slot.tensor)].requires_grad_(slot.tensor.requires_grad))
            else:
                slot.put(shared[id(slot.tensor)])

    # -- checks -------------------------------------------------------------------------------------

    def _fit(self, item: PlannedLayer) -> None:
        spec, name = item.packed.spec, item.layer.name
        place = self._places.get(self._names.of(name))
        if place is None:
            self._problems.append(f"{name} ({spec.scheme.id}): the model has no such module")
            return
        if spec.moe is not None:
            problem = why_not_experts(place, spec.moe.experts, spec.moe.intermediate, spec.in_features)
        else:
            problem = why_not(place) or _sizes_differ(place.module, item)
        if problem:
            self._problems.append(f"{place.name}: {problem}")
        self._targets[name] = place

    def _plain(self, model: nn.Module) -> dict[str, TensorInfo]:
        """The tensors that are loaded as they are, by the model's name for them."""
        quantized = {module.name for item in self._layers for module in item.packed.modules}
        used = {info.name for item in self._layers for m in item.packed.modules for info in m.tensors.values()}
        found: dict[str, TensorInfo] = {}
        for name, info in self._part.tensors.items():
            owner, leaf = split_name(info)
            if name in used or owner in quantized or leaf in _CACHE_SCALES:
                continue
            target = self._names.of(name)
            slot = self._slots.get(target)
            if slot is None:
                self._problems.append(f"{name}: the model has no such parameter")
            elif tuple(slot.tensor.shape) != info.shape:
                self._problems.append(
                    f"{slot.name} is {list(slot.tensor.shape)}; the checkpoint has {list(info.shape)}"
                )
            else:
                found[target] = info
        filled = {id(self._slots[name].tensor) for name in found}
        adapters = tuple(name + "." for name, module in model.named_modules() if WRAPPED in module._modules)
        for slot in self._slots.values():
            if id(slot.tensor) in filled:
                continue
            if slot.leaf in slot.owner._buffers:
                if slot.tensor.is_meta:
                    self._problems.append(
                        f"{slot.name}: a buffer on meta that no checkpoint holds; build the model so that its buffers "
                        "exist (accelerate.init_empty_weights does)"
                    )
            elif slot.tensor.is_meta or not slot.name.startswith(adapters):
                self._problems.append(f"{slot.name}: the checkpoint has no such tensor")
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

    def _convert(self, info: TensorInfo, slot: _Slot, reader: ShardReader) -> torch.Tensor:
        tensor = to_tensor(reader.read(info))
        if tensor.dtype != slot.tensor.dtype and tensor.is_floating_point() != slot.tensor.is_floating_point():
            raise InvalidCheckpointError(
                f"is {info.dtype}; the model's {slot.name} is {slot.tensor.dtype}", file=info.shard, key=info.name
            )
        return tensor.to(device=self._device, dtype=slot.tensor.dtype)


def _ties(model: nn.Module) -> dict[str, str]:
    """Parameters that a transformers model says it shares, which it may not yet do on `meta`: name -> whose it is."""
    declared = getattr(model, "all_tied_weights_keys", None)
    return dict(declared) if isinstance(declared, Mapping) else {}


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


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


def _slots_of(model: nn.Module, replaced: Iterable[Place]) -> dict[str, _Slot]:
    """Parameters and buffers outside the modules that are replaced, by names without adapters."""
    gone: dict[str, bool] = defaultdict(bool, {place.name: True for place in replaced})
    found: dict[str, _Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if gone[path] or any(gone[path[:index]] for index, char in enumerate(path) if char == "."):
            continue
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = f"{path}.{leaf}" if path else leaf
                found[plain_name(name)] = _Slot(name, module, leaf, tensor)
    return found
