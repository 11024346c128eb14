"""Fusing: the canonical weights of a layer's parts, written one by one into arrays of the whole layer.

The arrays of the whole are allocated when the first part arrives and nothing else is kept, so loading never
holds more than the layer and one part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from omniplat.canonical import ROW_ROLES, Array, CanonicalWeight
from omniplat.errors import InvalidCheckpointError
from omniplat.runtime.memory import layer_memory
from omniplat.scheme import Scheme, with_cut_blocks


class Assembly:
    """One weight of a runtime layer: `rows` x `columns`, and `experts` of those when that is not 0.

    Row roles (codes, scales, zero points, bias) are concatenated along N. A role that belongs to the columns
    or to the input (`group_index`, `pre_scale`, static input scales) must be the same in all parts of one
    weight: it is never merged. A part without bias in a layer with bias gets zeros.

    Where a part of a block-scaled layer starts inside a block, the whole gets blocks of fewer rows
    (`with_cut_blocks`), with the scales repeated: the same values.
    """

    def __init__(
        self,
        name: str,
        scheme: Scheme,
        rows: int,
        columns: int,
        *,
        experts: int = 0,
        starts: Sequence[int] = (),
    ) -> None:
        self._name = name
        self._declared = scheme
        self._scheme = replace(scheme, weight=with_cut_blocks(scheme.weight, starts))
        self._unit = self._scheme.weight.block[0] if scheme.weight.granularity == "block" else 1
        self._rows = rows
        self._columns = columns
        self._experts = experts
        self._arrays: dict[str, Array] = {}
        self._required: frozenset[str] = frozenset()
        self._filled = np.zeros((max(experts, 1), rows), np.bool_)
        self._seen: set[tuple[str, int]] = set()

    def put(self, part: CanonicalWeight, row: int, *, module: str, expert: int = 0) -> None:
        """Write `part` (of checkpoint module `module`) at `row`; raises InvalidCheckpointError if it does not fit."""
        if part.scheme != self._declared:
            raise InvalidCheckpointError(
                f"is {part.scheme.id}, the layer {self._name} is {self._declared.id}", key=module
            )
        if part.in_features != self._columns or row + part.out_features > self._rows or expert >= max(self._experts, 1):
            raise InvalidCheckpointError(
                f"{part.out_features} x {part.in_features} does not fit at row {row} of {self._name}, "
                f"{self._rows} x {self._columns}",
                key=module,
            )
        roles = frozenset(part.tensors) - {"bias"}
        if not self._required:
            self._required = roles
        elif roles != self._required:
            odd = ", ".join(sorted(roles ^ self._required))
            raise InvalidCheckpointError(f"differs from the other parts of {self._name} in having {odd}", key=module)
        for role, array in part.tensors.items():
            if role in ROW_ROLES:
                self._put_rows(role, np.asarray(array), row, part.out_features, expert, module)
            else:
                self._put_shared(role, np.asarray(array), expert, module)
        filled = self._filled[expert, row : row + part.out_features]
        if filled.any():
            raise InvalidCheckpointError(f"covers rows of {self._name} that another part covers", key=module)
        filled[:] = True

    @property
    def nbytes(self) -> int:
        """Of what was put so far, and of the room for what was not."""
        return sum(array.nbytes for array in self._arrays.values())

    def finish(self) -> CanonicalWeight:
        """The whole weight; raises InvalidCheckpointError when rows are missing."""
        if not self._filled.all():
            expert, row = (int(i) for i in np.argwhere(~self._filled)[0])
            where = f"row {row} of expert {expert}" if self._experts else f"row {row}"
            raise InvalidCheckpointError(f"no checkpoint module fills {where}", key=self._name)
        return CanonicalWeight(self._scheme, self._rows, self._columns, self._arrays)

    def _put_rows(self, role: str, array: Array, row: int, rows: int, expert: int, module: str) -> None:
        unit = 1
        if role == "scale" and self._declared.weight.granularity == "block":
            unit = self._unit
            if row % unit:
                raise InvalidCheckpointError(
                    f"starts at row {row} of {self._name}, which cuts a block of {unit} rows", key=module
                )
            array = np.repeat(array, self._declared.weight.block[0] // unit, axis=0)[: -(-rows // unit)]
        if array.shape[0] != -(-rows // unit):
            raise InvalidCheckpointError(f"{role} has {array.shape[0]} rows, needs {-(-rows // unit)}", key=module)
        whole = self._arrays.get(role)
        if whole is None:
            whole = self._allocate(role, (-(-self._rows // unit), *array.shape[1:]), array.dtype)
        target = (whole[expert] if self._experts else whole)[row // unit : row // unit + array.shape[0]]
        self._check(role, array, target, module)
        target[...] = array

    def _put_shared(self, role: str, array: Array, expert: int, module: str) -> None:
        whole = self._arrays.get(role)
        if whole is None:
            whole = self._allocate(role, array.shape, array.dtype)
        target = whole[expert] if self._experts else whole
        self._check(role, array, target, module)
        if (role, expert) not in self._seen:
            self._seen.add((role, expert))
            target[...] = array
        elif not np.array_equal(target, array):
            raise InvalidCheckpointError(
                f"{role} differs from that of the other parts of {self._name}; such parts cannot be fused", key=module
            )

    def _allocate(self, role: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        full = (self._experts, *shape) if self._experts else shape
        with layer_memory(self._name, prod(full) * dtype.itemsize):
            # Only a bias may be absent from a part, and absent means zero.
            array: Array = np.zeros(full, dtype) if role == "bias" else np.empty(full, dtype)
        self._arrays[role] = array
        return array

    def _check(self, role: str, array: Array, target: Array, module: str) -> None:
        if array.dtype != target.dtype or array.shape != target.shape:
            raise InvalidCheckpointError(
                f"{role} is {array.dtype} {list(array.shape)}; other parts of {self._name} have {target.dtype} "
                f"{list(target.shape)}",
                key=module,
            )
