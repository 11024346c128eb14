"""Places in a model: its modules under the names that a checkpoint uses, and whether one can be replaced."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

#: What adapters (PEFT's among them) call the layer that they wrap: no part of a checkpoint's name.
WRAPPED = "base_layer"
#: How a module of stacked experts is called.
_EXPERTS_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


@dataclass(frozen=True, slots=True)
class Place:
    """A module of a model: `owner` has it as `attribute`. `name` is its path in the model."""

    name: str
    owner: nn.Module
    attribute: str
    module: nn.Module

    def put(self, module: nn.Module) -> None:
        self.owner._modules[self.attribute] = module


def plain_name(name: str) -> str:
    """A path in a model without the layers that adapters add."""
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def places_of(model: nn.Module) -> dict[str, Place]:
    """Every module below `model`, by its name without adapters; of a wrapper and what it wraps, the wrapped one."""
    by_path = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, Place] = {}
    for name, module in by_path.items():
        if name:
            owner, _, attribute = name.rpartition(".")
            found[plain_name(name)] = Place(name, by_path[owner], attribute, module)
    return found


class Names:
    """From a checkpoint's module names to a model's: the model may be wrapped, or lack the checkpoint's prefix."""

    def __init__(self, known: Iterable[str], stored: Iterable[str]) -> None:
        """`known` are the model's module names, `stored` the names of the checkpoint's modules."""
        model, wanted = set(known), sorted({name for name in stored if name})
        votes: Counter[tuple[str, str]] = Counter({("", ""): sum(name in model for name in wanted)})
        tails: dict[str, list[str]] = defaultdict(list)
        for name in model:
            tails[name.rpartition(".")[2]].append(name)
        for name in wanted:
            for candidate in tails[name.rpartition(".")[2]]:
                if candidate.endswith("." + name):
                    votes["", candidate.removesuffix(name)] += 1
                elif name.endswith("." + candidate):
                    votes[name.removesuffix(candidate), ""] += 1
        # The least change among those that fit as many modules.
        best = max(votes, key=lambda pair: (votes[pair], -len(pair[0]) - len(pair[1]), pair))
        self.removed, self.added = best

    def of(self, name: str) -> str:
        return self.added + name.removeprefix(self.removed)

    def __str__(self) -> str:
        if not (self.removed or self.added):
            return "under the same names"
        return f"with {self.added or self.removed!r} {'put before' if self.added else 'taken from'} its names"


def why_not(place: Place) -> str:
    """Why a linear layer cannot be replaced by one that only computes the same; "" where it can."""
    module = place.module
    if not isinstance(module, nn.Linear):
        return f"is {type(module).__name__}, not torch.nn.Linear"
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        if hasattr(module, "_hf_hook"):
            return "has a hook of accelerate: call remove_hook_from_submodules first, and dispatch the model afterwards"
        return f"is {type(module).__name__} with a forward of its own"
    if isinstance(place.owner, nn.MultiheadAttention):
        return "belongs to torch.nn.MultiheadAttention, which reads its weight instead of calling it"
    if parametrize.is_parametrized(module):
        return "has a parametrization, which would be lost"
    hooks: tuple[Mapping[int, object], ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks):
        return "has hooks, which would be lost: remove them first"
    return ""


def why_not_experts(place: Place, experts: int, intermediate: int, hidden: int) -> str:
    """As `why_not`, for a module that holds all experts of a layer."""
    module = place.module
    arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if arguments != _EXPERTS_ARGUMENTS or "forward" in vars(module):
        return f"is {type(module).__name__}, called with ({', '.join(arguments)}); known is {_EXPERTS_ARGUMENTS}"
    held = dict(module.named_parameters())
    for name, count in (("gate_up_proj", 2 * experts * intermediate * hidden), ("down_proj", hidden * intermediate)):
        expected = count if name == "gate_up_proj" else count * experts
        if name not in held or held[name].numel() != expected or held[name].shape[0] != experts:
            found = list(held[name].shape) if name in held else "absent"
            return f"{name} is {found}; the checkpoint has {experts} experts of {intermediate} x {hidden}"
    return ""
