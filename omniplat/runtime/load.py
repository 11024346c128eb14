"""The one load path. Its unit is one checkpoint module with all its roles:

roles -> canonical form -> canonical row order -> this rank's slice -> fused -> `kernel.prepare` -> buffers.

Formats never see slices, the slicer never sees dialects, kernels see neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from omniplat.canonical import Array, CanonicalWeight
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.formats.resolved import ResolvedModule
from omniplat.formats.unpack import canonicalise
from omniplat.layer import MoeSpec
from omniplat.packed import PackedLayer, Part
from omniplat.roworder import RowOrder
from omniplat.roworder_apply import to_canonical_rows
from omniplat.runtime.assemble import Assembly
from omniplat.runtime.kernel import Kernel, LinearKernel, MoeKernel
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.slicer import WHOLE, Rank, slice_for_rank
from omniplat.runtime.tensors import to_torch


class TensorReader(Protocol):
    """What loading needs of a checkpoint."""

    def read(self, info: TensorInfo) -> Array:
        """The tensor's values, with ml_dtypes for bf16 and fp8. May be a read-only view of a mapped file."""


def read_roles(module: ResolvedModule, reader: TensorReader, expert: int | None = None) -> dict[str, Array]:
    """All roles of one checkpoint module as stored; of one expert of a stacked module when `expert` is given."""
    arrays = {role: reader.read(info) for role, info in module.tensors.items()}
    if expert is None:
        return arrays
    return {role: array[expert] for role, array in arrays.items()}


def read_canonical(
    module: ResolvedModule, reader: TensorReader, order: RowOrder, rank: Rank = WHOLE, expert: int | None = None
) -> CanonicalWeight:
    """One checkpoint module in canonical form and row order, cut for `rank`.

    Raises InvalidCheckpointError naming file and module when its arrays fit no weight of its scheme, or a
    scale is not finite.
    """
    file = module.tensors["codes"].shard if "codes" in module.tensors else ""
    weight = canonicalise(
        read_roles(module, reader, expert),
        module.storage,
        module.scheme,
        module.out_features,
        module.in_features,
        file=file,
        module=module.name,
    )
    return slice_for_rank(to_canonical_rows(weight, order), rank)


def load_layer(
    layer: PackedLayer,
    kernel: Kernel,
    reader: TensorReader,
    *,
    rank: Rank = WHOLE,
    device: torch.device | None = None,
) -> QuantLinear | QuantExperts:
    """Load one planned layer for `kernel`.

    Holds at most the layer and one of its checkpoint modules beside the memory-mapped files. `device` is the
    CPU when None. Raises InvalidCheckpointError; UsageError when kernel and layer are of different kinds.
    """
    if isinstance(kernel, MoeKernel):
        return _load_moe(layer, kernel, reader, rank, device)
    return _load_linear(layer, kernel, reader, rank, device)


def _load_linear(
    layer: PackedLayer, kernel: LinearKernel[Any], reader: TensorReader, rank: Rank, device: torch.device | None
) -> QuantLinear:
    spec = layer.spec
    if spec.op != "linear":
        raise UsageError(f"{kernel.name} is a kernel for linear layers; {spec.name} is {spec.op}")
    starts = tuple(accumulate((part.module.out_features for part in layer.parts[:-1]), initial=0))
    assembly = Assembly(spec.name, spec.scheme, spec.out_features, spec.in_features, starts=starts)
    row = 0
    for part in layer.parts:
        weight = read_canonical(part.module, reader, part.row_order, rank)
        assembly.put(weight, row, module=part.module.name)
        row += weight.out_features
    tensors = to_torch(assembly.finish(), device=device)
    del assembly
    return QuantLinear(spec, kernel, kernel.prepare(tensors, spec), tensors.tensors.get("bias"))


def _load_moe(
    layer: PackedLayer, kernel: MoeKernel[Any], reader: TensorReader, rank: Rank, device: torch.device | None
) -> QuantExperts:
    spec = layer.spec
    if spec.op != "moe" or spec.moe is None:
        raise UsageError(f"{kernel.name} is a kernel for experts; {spec.name} is {spec.op}")
    moe = spec.moe
    w13_name, rows = f"{spec.name}.w13", 2 * moe.intermediate
    starts = tuple({n for group in layer.w13 for n in (part.module.out_features for part in group[:-1])})
    w13 = Assembly(w13_name, spec.scheme, rows, spec.in_features, experts=moe.experts, starts=starts)
    w2_scheme = moe.w2_scheme or spec.scheme
    w2 = Assembly(f"{spec.name}.w2", w2_scheme, spec.out_features, moe.intermediate, experts=moe.experts)
    _fill_experts(w13, layer.w13, layer.stacked, moe, spec.name, reader, rank)
    _fill_experts(w2, layer.w2, layer.stacked, moe, spec.name, reader, rank)
    first = to_torch(w13.finish(), experts=moe.experts, device=device)
    second = to_torch(w2.finish(), experts=moe.experts, device=device)
    del w13, w2
    return QuantExperts(spec, kernel, kernel.prepare(first, second, spec))


def _fill_experts(
    assembly: Assembly,
    groups: Sequence[Sequence[Part]],
    stacked: bool,
    moe: MoeSpec,
    name: str,
    reader: TensorReader,
    rank: Rank,
) -> None:
    expected = 1 if stacked else moe.experts
    if len(groups) != expected:
        raise InvalidCheckpointError(f"{len(groups)} experts found, {expected} expected", key=name)
    for index, parts in enumerate(groups):
        for expert in range(moe.experts) if stacked else (index,):
            row = 0
            for part in parts:
                if stacked and part.module.experts != moe.experts:
                    raise InvalidCheckpointError(
                        f"holds {part.module.experts} experts, {name} has {moe.experts}", key=part.module.name
                    )
                weight = read_canonical(part.module, reader, part.row_order, rank, expert if stacked else None)
                assembly.put(weight, row, module=part.module.name, expert=expert)
                row += weight.out_features
