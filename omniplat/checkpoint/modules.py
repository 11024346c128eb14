"""Grouping tensors into checkpoint modules: a module's name is its weight's name without the role suffix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omniplat.checkpoint.tensors import TensorInfo

#: Leaves that hold the codes of a weight.
WEIGHT_LEAVES = frozenset({"weight", "weight_packed", "qweight"})

#: What modelopt appends to the names of stacked expert tensors.
COLUMN_STACK_SUFFIXES = ("_weight_scale_2", "_weight_scale", "_input_scale")
#: What is appended to them by anyone: by gpt-oss, by transformers for FP8. The first that fits counts.
STACKED_SUFFIXES = (*COLUMN_STACK_SUFFIXES, "_blocks", "_scales", "_bias", "_scale_inv", "_scale")
#: Names that end like those and belong to the module itself.
_OWN_STEMS = ("weight", "input", "output", "k", "v", "q")


@dataclass(frozen=True, slots=True)
class Module:
    """All tensors of one checkpoint module, by leaf name (`weight`, `weight_scale`, `qzeros`, ...)."""

    name: str
    leaves: Mapping[str, TensorInfo]

    @property
    def signature(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """What the headers say about it, without its name: equal for repeated blocks."""
        return tuple((leaf, info.dtype, info.shape) for leaf, info in self.leaves.items())


def split_name(info: TensorInfo) -> tuple[str, str]:
    """(module, leaf) of a tensor.

    `a.b.weight_scale` is leaf `weight_scale` of `a.b`; `a.b.weight.absmax` (quantizers that hang their state below
    the weight) is leaf `weight.absmax` of `a.b`; `experts.gate_up_proj_blocks` is leaf `_blocks` of
    `experts.gate_up_proj`; a 3-D parameter of an experts module (`experts.gate_up_proj`) is the `weight` of a module
    of its own name. A tensor without a dot is a module of its own with the leaf "".
    """
    name = info.name
    owner, below, tail = name.rpartition(".weight.")
    if below:
        return owner, f"weight.{tail}"
    parent, dot, leaf = name.rpartition(".")
    if not dot:
        return name, ""
    if leaf == "mul_scale" and parent.endswith(".div"):
        # msModelSlim wraps a smoothed layer: `a.div.mul_scale` multiplies the input of `a.linear`
        return f"{parent.removesuffix('.div')}.linear", leaf
    if parent.endswith("experts"):
        for suffix in STACKED_SUFFIXES:
            if leaf.endswith(suffix) and leaf.removesuffix(suffix) not in _OWN_STEMS:
                return f"{parent}.{leaf.removesuffix(suffix)}", suffix
        if len(info.shape) == 3 and leaf not in WEIGHT_LEAVES:
            return name, "weight"
    return parent, leaf


def group_modules(tensors: Iterable[TensorInfo]) -> dict[str, Module]:
    """Modules by name, each with its tensors by leaf."""
    leaves: dict[str, dict[str, TensorInfo]] = {}
    for info in tensors:
        name, leaf = split_name(info)
        leaves.setdefault(name, {})[leaf] = info
    return {name: Module(name, dict(sorted(found.items()))) for name, found in leaves.items()}
