"""Reading checkpoint modules: all roles of one, as stored and in canonical form. The first half of the load path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from omniplat.canonical import Array, CanonicalWeight
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.resolved import ResolvedModule
from omniplat.formats.unpack import canonicalise
from omniplat.roworder import AS_IS, RowOrder
from omniplat.roworder_apply import to_canonical_rows


class TensorReader(Protocol):
    """What loading needs of a checkpoint."""

    def read(self, info: TensorInfo) -> Array:
        """The tensor's values, with ml_dtypes for bf16 and fp8. May be a read-only view of a mapped file."""


def read_roles(module: ResolvedModule, reader: TensorReader, expert: int | None = None) -> dict[str, Array]:
    """All roles of one checkpoint module as stored; of one expert of a stacked module when `expert` is given. What is
    not stacked, a scale of the whole tensor, every expert has."""
    arrays = {role: reader.read(info) for role, info in module.tensors.items()}
    if expert is None:
        return arrays
    is_stacked = {role: array.shape[:1] == (module.experts,) for role, array in arrays.items()}
    return {role: array[expert] if is_stacked[role] else array for role, array in arrays.items()}


def read_canonical(
    module: ResolvedModule, reader: TensorReader, order: RowOrder = AS_IS, expert: int | None = None
) -> CanonicalWeight:
    """`canonical_module` of a module that `reader` reads."""
    return canonical_module(module, read_roles(module, reader, expert), order)


def canonical_module(module: ResolvedModule, arrays: Mapping[str, Array], order: RowOrder = AS_IS) -> CanonicalWeight:
    """One checkpoint module, or one expert of a stacked one, in canonical form and row order.

    `arrays` are its roles as stored. Raises InvalidCheckpointError naming file and module when they fit no weight of
    its scheme, or a scale is not finite.
    """
    file = module.tensors["codes"].shard if "codes" in module.tensors else ""
    weight = canonicalise(
        arrays,
        module.storage,
        module.scheme,
        module.out_features,
        module.in_features,
        file=file,
        module=module.name,
    )
    return to_canonical_rows(weight, order)
