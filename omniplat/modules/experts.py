"""Modules that hold all experts of a layer in two stacked tensors: how they lie there, and what they compute.

The known form is transformers': `gate_up_proj` and `down_proj`, [E, N, K] or (`is_transposed`) [E, K, N], called with
the rows, the ids and the weights. What lies between the two products is not read off a name: it is recognised by what
the module's own gate makes of numbers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from omniplat.errors import UsageError
from omniplat.layer import ACTIVATIONS
from omniplat.runtime.activate import activate

GATE_UP, DOWN = "gate_up_proj", "down_proj"
#: Three-dimensional parameters that hold all experts of a layer, under the names that models give them.
STACKS = (GATE_UP, "gate_proj", "up_proj", "w13", DOWN, "w2")
#: How such a module is called.
_ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
#: What transformers' modules say of themselves, what they have to say, and what it means otherwise.
_REQUIRED = (
    ("has_gate", True, "has experts without a gate"),
    ("has_post_expert_norm", False, "normalizes what each expert returns"),
    ("_is_expert_parallel", False, "shares its experts with other ranks"),
)
#: Gates and values at which activations are told apart: both signs, and beyond any limit in use.
_PROBE = (-300.0, -6.5, -1.0, -0.3, 0.0, 0.2, 0.9, 3.0, 6.8, 12.0, 300.0)


@dataclass(frozen=True, slots=True)
class Gate:
    """What lies between the two products; the fields are those of `MoeSpec`."""

    activation: str
    limit: float = 0.0
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsForm:
    """E experts of w13 [2I, K] and w2 [K, I].

    `transposed`    the tensors are [E, K, 2I] and [E, I, K].
    `interleaved`   rows of gate and up take turns, gate first.
    `gate`          None where the module does not show it.
    """

    experts: int
    intermediate: int
    hidden: int
    transposed: bool
    interleaved: bool
    bias: bool
    gate: Gate | None

    def one(self, stacked: torch.Tensor, expert: int) -> torch.Tensor:
        """A view of one expert of a weight as [N, K], or of a bias as [N]; rows are in the module's order."""
        one = stacked[expert]
        return one.T if self.transposed and one.dim() == 2 else one

    def rows(self, half: int) -> slice:
        """Rows of the gate (0) or of up (1) in the module's `gate_up_proj`."""
        if self.interleaved:
            return slice(half, 2 * self.intermediate, 2)
        return slice(half * self.intermediate, (half + 1) * self.intermediate)


@dataclass(frozen=True, slots=True)
class ExpertKey:
    """A tensor of one expert, for a module that has them in stacks: `model.layers.0.mlp.experts.3.up_proj.weight`.

    `halves`    of `gate_up_proj` that it holds: gate (0), up (1) or both; empty for `down_proj`.
    """

    experts: str
    expert: int
    halves: tuple[int, ...]
    bias: bool


_KEY = re.compile(r"(.+)\.(\d+)\.(\w+)\.(weight|bias)")
#: What is called how in a checkpoint -> halves.
_HALVES: Mapping[str, tuple[int, ...]] = {
    "gate_proj": (0,),
    "w1": (0,),
    "up_proj": (1,),
    "w3": (1,),
    GATE_UP: (0, 1),
    DOWN: (),
    "w2": (),
}


def expert_key(name: str) -> ExpertKey | None:
    """What a checkpoint's tensor is of an expert; None for any other tensor."""
    match = _KEY.fullmatch(name)
    if match is None or match[3] not in _HALVES:
        return None
    return ExpertKey(match[1], int(match[2]), _HALVES[match[3]], match[4] == "bias")


def holds_stacks(module: nn.Module) -> bool:
    """True for a module with all experts of a layer in one tensor, of the known form or not."""
    return any(
        tensor is not None and tensor.dim() == 3 and name in STACKS for name, tensor in module._parameters.items()
    )


def experts_form(module: nn.Module) -> ExpertsForm:
    """Raises UsageError, saying what is different, for a module that is not of the known form."""
    label = f"is {type(module).__name__}"
    arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if "forward" in vars(module):
        raise UsageError(f"{label} with a forward of its own: take hooks off first (remove_hook_from_submodules)")
    # transformers wraps `forward` and keeps its signature
    if arguments not in _ARGUMENTS:
        raise UsageError(f"{label}, called with ({', '.join(arguments)}); known is ({', '.join(_ARGUMENTS[0])})")
    for name, needed, meaning in _REQUIRED:
        if getattr(module, name, needed) != needed:
            raise UsageError(f"{label}, which {meaning}")
    held = dict(module.named_parameters())
    if not {GATE_UP, DOWN} <= set(held) or held[GATE_UP].dim() != 3 or held[DOWN].dim() != 3:
        raise UsageError(f"{label} without {GATE_UP} and {DOWN} of three dimensions")
    transposed = bool(getattr(module, "is_transposed", False))
    interleaved = not getattr(module, "is_concatenated", True)
    bias = f"{GATE_UP}_bias" in held
    up, down = list(held[GATE_UP].shape), list(held[DOWN].shape)
    experts, rows, hidden = (up[0], up[2], up[1]) if transposed else up
    wanted = [experts, rows // 2, hidden] if transposed else [experts, hidden, rows // 2]
    if rows % 2 or down != wanted:
        raise UsageError(f"{label} with {GATE_UP} {up} and {DOWN} {down}, which do not belong together")
    known = {GATE_UP, DOWN, f"{GATE_UP}_bias", f"{DOWN}_bias"}
    if odd := sorted(set(held) - known):
        raise UsageError(f"{label} with parameters of unknown meaning: {', '.join(odd)}")
    return ExpertsForm(experts, rows // 2, hidden, transposed, interleaved, bias, _gate_of(module, interleaved))


def _gate_of(module: nn.Module, interleaved: bool) -> Gate | None:
    """What the module's own gate computes; None where it has none. Raises UsageError for one that is not known."""
    own, function = getattr(module, "_apply_gate", None), getattr(module, "act_fn", None)
    if not callable(own) and not callable(function):
        return None
    pairs = torch.tensor(list(product(_PROBE, _PROBE)))
    gate, up = pairs.unbind(dim=1)
    if callable(own):
        fused = pairs.reshape(-1) if interleaved else torch.cat([gate, up])
        found = own(fused[None])[0]
    else:
        assert callable(function)
        found = function(gate) * up
    for known in _candidates(module):
        made = activate(gate, up, known.activation, known.limit, known.alpha)
        if torch.allclose(found, made, rtol=1e-4, atol=1e-6):
            return known
    raise UsageError(f"is {type(module).__name__}, whose gate is none of {', '.join(ACTIVATIONS)}")


def _candidates(module: nn.Module) -> Iterator[Gate]:
    """Activations with every limit and alpha that the module may mean: the numbers among its attributes."""
    numbers = sorted({value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e6})
    for activation in ACTIVATIONS:
        alphas = numbers if activation == "swiglu-oai" else [1.0]
        yield from (Gate(activation, limit, alpha) for limit in (0.0, *numbers) for alpha in alphas)
