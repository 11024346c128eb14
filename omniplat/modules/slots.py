"""Slots: a model's parameters and buffers outside the layers that are replaced, and how they are filled.

Nothing is assigned before everything is there, parameters that modules share stay shared, and dtypes stay the model's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from omniplat.errors import InvalidCheckpointError
from omniplat.modules.places import WRAPPED, Place, plain_name


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter or buffer of a model: `owner` has it as `leaf`. `name` is its path without adapters."""

    name: str
    owner: nn.Module
    leaf: str
    tensor: torch.Tensor

    @property
    def is_buffer(self) -> bool:
        return self.leaf in self.owner._buffers

    def put(self, tensor: torch.Tensor) -> None:
        if self.is_buffer:
            self.owner._buffers[self.leaf] = tensor
        elif isinstance(tensor, nn.Parameter):
            self.owner._parameters[self.leaf] = tensor
        else:
            self.owner._parameters[self.leaf] = nn.Parameter(tensor, self.tensor.requires_grad)


class Slots:
    """The slots of `model`, by name, without those of the modules in `replaced`."""

    def __init__(self, model: nn.Module, replaced: Iterable[Place]) -> None:
        self._model = model
        self._slots = _slots_of(model, replaced)

    def get(self, name: str) -> Slot | None:
        return self._slots.get(name)

    def tie(self, given: Collection[str]) -> None:
        """Share what a transformers model says it shares, which it may not do yet on `meta`, unless it is given."""
        declared = getattr(self._model, "all_tied_weights_keys", None)
        for name, source in declared.items() if isinstance(declared, Mapping) else ():
            if name in self._slots and source in self._slots and name not in given:
                self._slots[name] = replace(self._slots[name], tensor=self._slots[source].tensor)

    def misfit(self, name: str, shape: tuple[int, ...]) -> str:
        """Why a tensor of that name and shape has no place; "" where it has one."""
        slot = self._slots.get(name)
        if slot is None:
            return f"{name}: the model has no such parameter"
        if tuple(slot.tensor.shape) != shape:
            return f"{slot.name} is {list(slot.tensor.shape)}; the checkpoint has {list(shape)}"
        return ""

    def unfilled(self, given: Collection[str]) -> list[str]:
        """What is wrong with the slots that no tensor in `given` fills; adapters and buffers keep what they have."""
        problems = []
        filled = {id(self._slots[name].tensor) for name in given}
        adapters = tuple(f"{name}." for name, module in self._model.named_modules() if WRAPPED in module._modules)
        for slot in self._slots.values():
            if id(slot.tensor) in filled:
                continue
            if slot.is_buffer:
                if slot.tensor.is_meta:
                    problems.append(
                        f"{slot.name}: a buffer on meta that no checkpoint holds; build the model so that its buffers "
                        "exist (accelerate.init_empty_weights does)"
                    )
            elif slot.tensor.is_meta or not slot.name.startswith(adapters):
                problems.append(f"{slot.name}: the checkpoint has no such tensor")
        return problems

    def converted(self, name: str, tensor: torch.Tensor, device: torch.device, file: str = "") -> torch.Tensor:
        """`tensor` in the slot's dtype, on `device`; raises InvalidCheckpointError between floats and integers."""
        slot = self._slots[name]
        if tensor.dtype != slot.tensor.dtype and tensor.is_floating_point() != slot.tensor.is_floating_point():
            raise InvalidCheckpointError(f"is {tensor.dtype}; the model's is {slot.tensor.dtype}", file=file, key=name)
        return tensor.to(device=device, dtype=slot.tensor.dtype)

    def fill(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Assign `tensors`, by name; what none of them fills moves to `device`."""
        shared = {id(self._slots[name].tensor): tensor for name, tensor in tensors.items()}
        parameters = {key: nn.Parameter(tensor, requires_grad=False) for key, tensor in shared.items()}
        for slot in self._slots.values():
            key = id(slot.tensor)
            if key not in shared:
                if slot.tensor.device != device and not slot.tensor.is_meta:
                    slot.put(slot.tensor.detach().to(device))
            elif slot.is_buffer:
                slot.put(shared[key])
            else:
                slot.put(parameters[key].requires_grad_(slot.tensor.requires_grad))


def _slots_of(model: nn.Module, replaced: Iterable[Place]) -> dict[str, Slot]:
    gone = {place.name for place in replaced}
    found: dict[str, Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path in gone or any(path[:index] in gone for index, char in enumerate(path) if char == "."):
            continue
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = plain_name(f"{path}.{leaf}" if path else leaf)
                found[name] = Slot(name, module, leaf, tensor)
    return found
