"""Tensors of a model as they arrive, one by one: into layers that are quantized, or into parameters that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.modules.experts import DOWN, GATE_UP, ExpertKey, ExpertsForm, expert_key
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.modules.slots import Slots
from omniplat.runtime.kernel import Workspaces
from omniplat.runtime.online import OnlineExperts, OnlineLinear


class Arriving(Protocol):
    """A layer of a model that is quantized as soon as its tensors are there."""

    def take(self, leaf: str, tensor: torch.Tensor) -> None:
        """A tensor that the model's module has as `leaf`. Raises UsageError where it has none of that name."""

    def take_expert(self, key: ExpertKey, tensor: torch.Tensor) -> None:
        """A tensor of one expert. Raises InvalidCheckpointError where the layer has none."""

    @property
    def complete(self) -> bool: ...

    @property
    def missing(self) -> tuple[str, ...]: ...

    def finish(self, device: torch.device, workspaces: Workspaces) -> ModelLinear | ModelExperts: ...


class ArrivingLinear:
    """An `nn.Linear`."""

    def __init__(self, online: OnlineLinear) -> None:
        self._online = online

    def take(self, leaf: str, tensor: torch.Tensor) -> None:
        if leaf == "bias":
            self._online.put_bias(tensor)
        elif leaf == "weight":
            self._online.put(tensor)
        else:
            raise _unknown(self._online.spec.name, leaf)

    def take_expert(self, key: ExpertKey, tensor: torch.Tensor) -> None:
        raise InvalidCheckpointError("is of one expert, the model has a linear layer there", key=key.experts)

    @property
    def complete(self) -> bool:
        return self._online.complete

    @property
    def missing(self) -> tuple[str, ...]:
        return self._online.missing

    def finish(self, device: torch.device, workspaces: Workspaces) -> ModelLinear:
        return ModelLinear.of(self._online.finish(device, workspaces), workspaces)


class ArrivingExperts:
    """A module with all experts in stacks, which may arrive as stacks or one expert after the other."""

    def __init__(self, online: OnlineExperts, form: ExpertsForm) -> None:
        self._online = online
        self._form = form

    def take(self, leaf: str, tensor: torch.Tensor) -> None:
        if leaf.removesuffix("_bias") not in (GATE_UP, DOWN):
            raise _unknown(self._online.spec.name, leaf)
        if tensor.shape[:1] != (self._form.experts,):
            raise InvalidCheckpointError(
                f"{leaf} is {list(tensor.shape)}, of {self._form.experts} experts", key=self._online.spec.name
            )
        for expert in range(self._form.experts):
            one = self._form.one(tensor, expert)
            is_bias = leaf.endswith("_bias")
            if leaf.startswith(DOWN):
                self._put(one, expert, (), bias=is_bias)
            else:
                for half in (0, 1):
                    self._put(one[self._form.rows(half)], expert, (half,), bias=is_bias)

    def take_expert(self, key: ExpertKey, tensor: torch.Tensor) -> None:
        if key.expert >= self._form.experts:
            raise InvalidCheckpointError(f"has no expert {key.expert}", key=key.experts)
        self._put(tensor, key.expert, key.halves, bias=key.bias)

    def _put(self, tensor: torch.Tensor, expert: int, halves: tuple[int, ...], *, bias: bool) -> None:
        inner = self._form.intermediate
        rows = range(halves[0] * inner, (halves[-1] + 1) * inner) if halves else None
        if bias:
            self._online.put_bias(tensor, expert, down=not halves, rows=rows)
        elif halves:
            self._online.put_w13(tensor, expert, rows=rows)
        else:
            self._online.put_w2(tensor, expert)

    @property
    def complete(self) -> bool:
        return self._online.complete

    @property
    def missing(self) -> tuple[str, ...]:
        return self._online.missing

    def finish(self, device: torch.device, workspaces: Workspaces) -> ModelExperts:
        return ModelExperts.of(self._online.finish(device, workspaces), workspaces)


def _unknown(layer: str, leaf: str) -> UsageError:
    return UsageError(f"{layer}.{leaf}: the model has no such parameter; only weights in 16 or 32 bit are quantized")


class Arrivals:
    """Where tensors of a model go. Layers are finished, and given to `done`, as soon as they are complete; nothing of
    the model changes."""

    def __init__(
        self,
        layers: Mapping[str, Arriving],
        slots: Slots,
        stacks: Mapping[str, ExpertsForm],
        device: torch.device,
        done: Callable[[str, Arriving], None],
    ) -> None:
        """`layers` by the names of the modules, `stacks` the modules of experts that stay as they are."""
        self._open = dict(layers)
        self._finished: set[str] = set()
        self._slots = slots
        self._stacks = stacks
        self._device = device
        self._done = done
        self._experts: dict[str, set[tuple[int, tuple[int, ...]]]] = {}
        #: What the slots will hold.
        self.values: dict[str, torch.Tensor] = {}

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """One tensor, under the model's name for it; True when it was the last one of a layer.

        Raises UsageError where it has no place or does not fit, InvalidCheckpointError for what cannot be quantized.
        """
        owner, _, leaf = name.rpartition(".")
        key = expert_key(name)
        if owner in self._finished or (key is not None and key.experts in self._finished):
            raise InvalidCheckpointError("is there twice, or the model has no such parameter", key=name)
        if owner in self._open:
            self._open[owner].take(leaf, tensor)
            return self._finish(owner)
        if key is not None and key.experts in self._open:
            self._open[key.experts].take_expert(key, tensor)
            return self._finish(key.experts)
        if key is not None and key.experts in self._stacks:
            self._stack(key, tensor)
        elif problem := self._slots.misfit(name, tuple(tensor.shape)):
            raise UsageError(problem)
        elif name in self.values:
            raise InvalidCheckpointError("was delivered twice", key=name)
        else:
            # a copy: what arrives may be a view of something larger, or be reused for the next tensor
            self.values[name] = self._slots.converted(name, tensor.detach().clone(), self._device)
        return False

    def problems(self) -> list[str]:
        """What is missing at the end."""
        missing = [f"{name}: nothing brought {layer.missing[0]}" for name, layer in self._open.items()]
        for name, form in ((name, self._stacks[name.rpartition(".")[0]]) for name in self._experts):
            parts = 1 if name.endswith(DOWN) else 2
            if len(self._experts[name]) != parts * form.experts:
                missing.append(f"{name}: not all experts came")
        return missing + self._slots.unfilled(self.values)

    def _finish(self, name: str) -> bool:
        if not self._open[name].complete:
            return False
        self._finished.add(name)
        self._done(name, self._open.pop(name))
        return True

    def _stack(self, key: ExpertKey, tensor: torch.Tensor) -> None:
        """One expert of a stack that stays: its rows of the model's tensor."""
        form = self._stacks[key.experts]
        name = f"{key.experts}.{GATE_UP if key.halves else DOWN}{'_bias' if key.bias else ''}"
        slot = self._slots.get(name)
        if slot is None or key.expert >= form.experts:
            raise UsageError(f"{name}: the model has no expert {key.expert} of that")
        tensor = self._slots.converted(name, tensor, self._device)
        if name not in self.values:
            self.values[name] = torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype, device=self._device)
            self._experts[name] = set()
        one = form.one(self.values[name], key.expert)
        pieces: Iterator[tuple[tuple[int, ...], torch.Tensor]] = iter([((), one)])
        if key.halves:
            pieces = (((half,), one[form.rows(half)]) for half in key.halves)
        for (half, target), part in zip(pieces, tensor.chunk(max(len(key.halves), 1)), strict=True):
            if target.shape != part.shape:
                raise UsageError(f"{name} of expert {key.expert} is {list(target.shape)}, not {list(part.shape)}")
            if (key.expert, half) in self._experts[name]:
                raise InvalidCheckpointError(f"expert {key.expert} was delivered twice", key=name)
            self._experts[name].add((key.expert, half))
            target.copy_(part)
