"""Places in a model: its modules under the names that a checkpoint uses, and whether one can be replaced."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from omniplat.errors import UsageError
from omniplat.layer import MoeSpec
from omniplat.modules.experts import Gate, experts_form
from omniplat.modules.renames import Renames

#: Problems that an error lists.
_SHOWN = 5
#: What adapters (PEFT's among them) call the layer that they wrap: no part of a checkpoint's name.
WRAPPED = "base_layer"


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
    """From a checkpoint's names to a model's: transformers may rename them, the model may be wrapped, or lack the
    checkpoint's prefix."""

    def __init__(self, known: Iterable[str], stored: Iterable[str], renames: Renames) -> None:
        """`known` are the model's module names, `stored` the names of the checkpoint's modules; empty where nobody
        knows them ahead: names are then renamed, and have no prefix."""
        model, wanted = set(known), sorted({name for name in stored if name})
        self._renames = renames
        changed = [renames.module(name) for name in wanted]
        plain = _prefixes(model, wanted)
        renamed = plain if changed == wanted else _prefixes(model, changed)
        self._renamed = renames.always or not wanted or renamed.fitting > plain.fitting
        self._prefixes = renamed if self._renamed else plain

    def module(self, name: str) -> str:
        """The model's name for a module of the checkpoint."""
        return self._prefixes.change(self._renames.module(name) if self._renamed else name)

    def tensor(self, name: str) -> str:
        """The model's name for a tensor of the checkpoint."""
        return self._prefixes.change(self._renames.tensor(name) if self._renamed else name)

    def conversion(self, module: str) -> str:
        """What transformers does to the weight of a checkpoint's module beside renaming it; "" for nothing."""
        return self._renames.conversion(self._renames.module(module) if self._renamed else module)

    def __str__(self) -> str:
        return f"{'renamed as transformers does and ' if self._renamed else ''}{self._prefixes}"


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """What is taken from the beginning of names and what is put there, and how many names then fit."""

    removed: str
    added: str
    fitting: int

    def change(self, name: str) -> str:
        return self.added + name.removeprefix(self.removed)

    def __str__(self) -> str:
        if not (self.removed or self.added):
            return "under the same names"
        return f"with {self.added or self.removed!r} {'put before' if self.added else 'taken from'} its names"


def _prefixes(model: Collection[str], wanted: Sequence[str]) -> _Prefixes:
    """The least change among those under which most of the wanted names are the model's."""
    votes: Counter[tuple[str, str]] = Counter({("", ""): sum(name in model for name in wanted)})
    heads: dict[str, list[str]] = defaultdict(list)
    for name in model:
        for start in _starts(name):
            heads[name[start:]].append(name[:start])
    for name in wanted:
        votes.update(("", head) for head in heads[name])
        votes.update((name[:start], "") for start in _starts(name) if name[start:] in model)
    best = max(votes, key=lambda pair: (votes[pair], -len(pair[0]) - len(pair[1]), pair))
    return _Prefixes(*best, votes[best])


def _starts(name: str) -> list[int]:
    """Where the parts of a dotted name begin, but for the first."""
    return [index + 1 for index, letter in enumerate(name) if letter == "."]


def require_none(what: str, problems: Sequence[str]) -> None:
    """Raise UsageError that lists the problems, or some of many."""
    if problems:
        more = len(problems) - _SHOWN
        shown = [*problems[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        raise UsageError(f"{what}:\n  " + "\n  ".join(shown))


def why_not(place: Place) -> str:
    """Why a linear layer cannot be replaced by one that only computes the same; "" where it can."""
    module = place.module
    if not isinstance(module, nn.Linear):
        return f"is {type(module).__name__}, not torch.nn.Linear"
    if why := why_not_below(place):
        return why
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


def why_not_below(place: Place) -> str:
    """Why the module below an adapter cannot be replaced; "" where it can, or where there is no adapter."""
    if place.attribute == WRAPPED and hasattr(place.owner, "parameter_name"):
        return f"has an adapter on its {place.owner.parameter_name}, which is no parameter once it is quantized"
    return ""


def why_not_experts(place: Place, moe: MoeSpec, hidden: int) -> str:
    """As `why_not`, for a module that holds all experts of a layer: `moe` is what the checkpoint has."""
    if why := why_not_below(place):
        return why
    try:
        form = experts_form(place.module)
    except UsageError as exc:
        return str(exc)
    if (form.experts, form.intermediate, form.hidden) != (moe.experts, moe.intermediate, hidden):
        return (
            f"has {form.experts} experts of {form.intermediate} x {form.hidden}; the checkpoint has {moe.experts} "
            f"experts of {moe.intermediate} x {hidden}"
        )
    stored = Gate(moe.activation, moe.limit, moe.alpha)
    if form.gate is not None and form.gate != stored:
        return f"computes {form.gate}; the checkpoint's configuration says {stored}"
    return ""
