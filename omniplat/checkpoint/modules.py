"""Grouping tensors into checkpoint modules: a module's name is its weight's name without the role suffix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omniplat.checkpoint.tensors import TensorInfo

#: Leaves that hold the codes of a weight.
WEIGHT_LEAVES = frozenset({"weight", "weight_packed", "qweight"})


@dataclass(frozen=True, slots=True)
class Module:
    """All tensors of one checkpoint module, by leaf name (`weight`, `weight_scale`, `qzeros`, ...)."""

    name: str
    leaves: Mapping[str, TensorInfo]

    @property
    def signature(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """What the headers say about it, without its name: equal for repeated blocks."""
        return tuple((leaf, info.dtype, info.shape) for leaf, info in self.leaves.items())


def group_modules(tensors: Iterable[TensorInfo]) -> dict[str, Module]:
    """Modules by name. A tensor without a dot (a bare parameter) is a module of its own with the leaf ""."""
    leaves: dict[str, dict[str, TensorInfo]] = {}
    for info in tensors:
        name, dot, leaf = info.name.rpartition(".")
        if not dot:
            name, leaf = info.name, ""
        leaves.setdefault(name, {})[leaf] = info
    return {name: Module(name, dict(sorted(found.items()))) for name, found in leaves.items()}
