"""The one load path. Its unit is one checkpoint module with all its roles:

roles -> canonical form -> canonical row order -> this rank's slice -> fused -> `kernel.prepare` -> buffers.

Formats never see slices, the slicer never sees dialects, kernels see neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from omniplat.canonical import Array, CanonicalWeight
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.legality import cut_layer, rank_spec
from omniplat.packed import PackedLayer, Part
from omniplat.reading import TensorReader, canonical_module, read_roles
from omniplat.runtime.assemble import Assembly
from omniplat.runtime.kernel import Kernel, LinearKernel, MoeKernel, Workspaces
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.memory import layer_memory
from omniplat.runtime.slicer import (
    WHOLE,
    Rank,
    column_range,
    expert_range,
    row_ranges,
    take_columns,
    take_rows,
    without_bias,
)
from omniplat.runtime.tensors import to_torch


def load_layer(
    layer: PackedLayer,
    kernel: Kernel,
    reader: TensorReader,
    *,
    rank: Rank = WHOLE,
    device: torch.device | None = None,
    workspaces: Workspaces | None = None,
) -> QuantLinear | QuantExperts:
    """Load what `rank` holds of one planned layer, for `kernel`.

    Holds at most the layer and one of its checkpoint modules beside the memory-mapped files. `device` is the
    CPU when None. `workspaces` is what it shares with layers that never run at the same time; a layer that is given
    none has its own. Raises InvalidCheckpointError; UsageError when kernel and layer are of different kinds, and,
    before anything is read, when ranks cannot share the layer like this.
    """
    if isinstance(kernel, MoeKernel):
        moe = MoeLoader(layer, kernel, rank)
        for slot in moe.slots():
            moe.put(slot, read_roles(moe.part_of(slot).module, reader, slot.expert if layer.stacked else None))
        return moe.finish(device, workspaces)
    linear = LinearLoader(layer, kernel, rank)
    for index, part in enumerate(layer.parts):
        linear.put(index, read_roles(part.module, reader))
    return linear.finish(device, workspaces)


class LinearLoader:
    """A linear layer that is being loaded: takes the roles of its checkpoint modules, in any order of modules."""

    def __init__(self, layer: PackedLayer, kernel: LinearKernel[Any], rank: Rank = WHOLE) -> None:
        """Raises UsageError for a layer of another kind, and when ranks cannot share the layer like this."""
        if layer.spec.op != "linear":
            raise UsageError(f"{kernel.name} is a kernel for linear layers; {layer.spec.name} is {layer.spec.op}")
        _require_legal(layer, rank)
        self.layer = layer
        self.spec = spec = rank_spec(layer.spec, layer.split, rank.tp_size, rank.ep_size)
        self._kernel = kernel
        self._rank = rank
        self._pieces = _pieces_of(layer, rank)
        lengths = [sum(len(rows) for rows in pieces) for pieces in self._pieces]
        self._starts = tuple(accumulate(lengths[:-1], initial=0))
        self._assembly = Assembly(spec.name, spec.scheme, spec.out_features, spec.in_features, starts=self._starts)

    def put(self, index: int, arrays: Mapping[str, Array]) -> None:
        """Take the roles, as stored, of the layer's part number `index`."""
        part = self.layer.parts[index]
        weight = canonical_module(part.module, arrays, part.row_order)
        if self.layer.split.style == "row":
            weight = _column_slice(weight, self._rank)
        row = self._starts[index]
        for rows in self._pieces[index]:
            self._assembly.put(take_rows(weight, rows), row, module=part.module.name)
            row += len(rows)

    def finish(
        self, device: torch.device | None = None, workspaces: Workspaces | None = None, stream: int = 0
    ) -> QuantLinear:
        """Prepare the layer, on `device`. Raises InvalidCheckpointError when rows are missing, LayerMemoryError."""
        weight = self._assembly.finish()
        del self._assembly
        with layer_memory(self.spec.name, weight.nbytes, device):
            tensors = to_torch(weight, device=device)
            del weight
            bias = tensors.tensors.get("bias")
            layer = QuantLinear(self.spec, self._kernel, self._kernel.prepare(tensors, self.spec), bias)
            layer.share_workspace(workspaces or Workspaces(), stream)
        return layer


@dataclass(frozen=True, slots=True)
class Slot:
    """A checkpoint module's place in a layer of experts: part `index` of `expert`'s gate-and-up or down weight."""

    expert: int
    index: int = 0
    down: bool = False


class MoeLoader:
    """A layer of experts that is being loaded: takes the roles of its checkpoint modules, in any order of modules.

    Experts are counted as the checkpoint does; `experts` are those that this rank holds.
    """

    def __init__(self, layer: PackedLayer, kernel: MoeKernel[Any], rank: Rank = WHOLE) -> None:
        """Raises UsageError for a layer of another kind, and when ranks cannot share the layer like this;
        InvalidCheckpointError when experts are missing."""
        moe = layer.spec.moe
        if layer.spec.op != "moe" or moe is None:
            raise UsageError(f"{kernel.name} is a kernel for experts; {layer.spec.name} is {layer.spec.op}")
        _require_legal(layer, rank)
        expected = 1 if layer.stacked else moe.experts
        for groups in (layer.w13, layer.w2):
            if len(groups) != expected:
                raise InvalidCheckpointError(f"{len(groups)} experts found, {expected} expected", key=layer.spec.name)
            if not all(groups):
                raise InvalidCheckpointError(f"expert {groups.index(())} is missing", key=layer.spec.name)
        for module in layer.modules if layer.stacked else ():
            if module.experts != moe.experts:
                raise InvalidCheckpointError(
                    f"holds {module.experts} experts, {layer.spec.name} has {moe.experts}", key=module.name
                )
        self.layer = layer
        self.spec = spec = rank_spec(layer.spec, layer.split, rank.tp_size, rank.ep_size)
        assert spec.moe is not None
        self.experts = expert_range(moe.experts, rank)
        self._kernel = kernel
        self._rank = rank
        self._held = column_range(moe.intermediate, rank)
        self._whole = moe.intermediate
        count, inner = len(self.experts), spec.moe.intermediate
        self._w13 = Assembly(
            f"{spec.name}.w13", spec.scheme, 2 * inner, spec.in_features, experts=count, starts=_w13_starts(layer, rank)
        )
        w2_scheme = spec.moe.w2_scheme or spec.scheme
        self._w2 = Assembly(f"{spec.name}.w2", w2_scheme, spec.out_features, inner, experts=count)

    def slots(self) -> Iterator[Slot]:
        """What has to be put."""
        for expert in self.experts:
            group = 0 if self.layer.stacked else expert
            yield from (Slot(expert, index) for index in range(len(self.layer.w13[group])))
        yield from (Slot(expert, down=True) for expert in self.experts)

    def part_of(self, slot: Slot) -> Part:
        groups = self.layer.w2 if slot.down else self.layer.w13
        return groups[0 if self.layer.stacked else slot.expert][slot.index]

    def put(self, slot: Slot, arrays: Mapping[str, Array]) -> None:
        """Take the roles, as stored, of one module; of one expert of a stacked one, without the leading dimension."""
        part = self.part_of(slot)
        name, local = part.module.name, slot.expert - self.experts.start
        module = part.module
        if self.layer.transposed:
            arrays = {**arrays, "codes": arrays["codes"].T}
            module = replace(module, out_features=module.in_features, in_features=module.out_features)
        weight = canonical_module(module, arrays, part.row_order)
        if slot.down:
            self._w2.put(_column_slice(weight, self._rank), 0, module=name, expert=local)
        elif self._rank.tp_size == 1:
            self._w13.put(weight, slot.index * self._whole, module=name, expert=local)
        else:
            fused = weight.out_features == 2 * self._whole
            for half in (0, 1) if fused else (slot.index,):
                first = half * self._whole if fused else 0
                rows = range(first + self._held.start, first + self._held.stop)
                self._w13.put(take_rows(weight, rows), half * len(self._held), module=name, expert=local)

    def finish(
        self, device: torch.device | None = None, workspaces: Workspaces | None = None, stream: int = 0
    ) -> QuantExperts:
        """Prepare the layer, on `device`. Raises InvalidCheckpointError when rows are missing, LayerMemoryError."""
        count = len(self.experts)
        w13, w2 = self._w13.finish(), self._w2.finish()
        del self._w13, self._w2
        with layer_memory(self.spec.name, w13.nbytes + w2.nbytes, device):
            first, second = (to_torch(weight, experts=count, device=device) for weight in (w13, w2))
            del w13, w2
            layer = QuantExperts(self.spec, self._kernel, self._kernel.prepare(first, second, self.spec))
            layer.share_workspace(workspaces or Workspaces(), stream)
        return layer


def _require_legal(layer: PackedLayer, rank: Rank) -> None:
    cut = cut_layer(layer, rank.tp_size)
    if not cut.legal:
        raise UsageError(f"{layer.spec.name} cannot be shared by {rank.tp_size} tensor-parallel ranks: {cut.problem}")
    moe = layer.spec.moe
    if moe is not None and moe.experts % rank.ep_size:
        raise UsageError(f"{layer.spec.name}: {moe.experts} experts cannot be shared by {rank.ep_size} ranks")


def _column_slice(weight: CanonicalWeight, rank: Rank) -> CanonicalWeight:
    """What a rank of a row-parallel layer holds; outputs are added up, so only the first rank has the bias."""
    held = take_columns(weight, column_range(weight.in_features, rank))
    return held if rank.tp_rank == 0 else without_bias(held)


def _w13_starts(layer: PackedLayer, rank: Rank) -> tuple[int, ...]:
    """Rows of w13 at which a part starts."""
    if rank.tp_size == 1:
        return tuple({part.module.out_features for group in layer.w13 for part in group[:-1]})
    assert layer.spec.moe is not None
    return (layer.spec.moe.intermediate // rank.tp_size,)


def _pieces_of(layer: PackedLayer, rank: Rank) -> tuple[tuple[range, ...], ...]:
    """For each checkpoint module of a linear layer the runs of its canonical rows that a rank holds, in order."""
    rows = tuple(part.module.out_features for part in layer.parts)
    if layer.split.style != "column" or rank.tp_size == 1:
        return tuple((range(n),) for n in rows)
    parts = layer.spec.parts or rows
    ranges = row_ranges(parts, layer.split, rank)
    if len(rows) == len(parts):
        return tuple((held,) for held in ranges)
    if len(rows) != 1:
        raise UsageError(f"{layer.spec.name}: {len(rows)} modules for {len(parts)} parts")
    starts = accumulate(parts[:-1], initial=0)
    return (tuple(range(start + held.start, start + held.stop) for start, held in zip(starts, ranges, strict=True)),)
