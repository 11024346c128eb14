"""Layers that are quantized while their weights arrive in 16 or 32 bit, whatever brings them: a model, a checkpoint,
an engine.

A weight comes in pieces, runs of its rows or columns, in any order. As soon as it is whole it is rounded, some rows at
a time, into the arrays of its layer, and let go of. So loading holds the layers that are done, the one that is being
made, and weights whose pieces are not all there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.layer import LayerSpec
from omniplat.runtime.assemble import Assembly
from omniplat.runtime.kernel import LinearKernel, MoeKernel, Workspaces
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.memory import layer_memory, release_freed
from omniplat.runtime.tensors import WeightTensors, to_array, to_torch
from omniplat.scheme import Scheme

#: How a whole weight, [N, K], becomes canonical: runs of its rows, each with the row at which it begins.
Rounding = Callable[[torch.Tensor, Scheme], Iterator[tuple[int, CanonicalWeight]]]

#: Elements that are rounded at once: bounds what rounding needs beside the weight, several float64 for each, 1 MiB.
_ELEMENTS = 1 << 14
#: Runs after which memory is given back: what rounding frees lies scattered over the holes that weights have left.
_RUNS_BEFORE_RELEASE = 8


def round_to_nearest(weight: torch.Tensor, scheme: Scheme) -> Iterator[tuple[int, CanonicalWeight]]:
    """`weight`, [N, K] of any floating-point dtype, by the oracle's rules: the codes are those of the whole.

    A run has one row at least, or one row of blocks, whose columns are rounded some blocks at a time.
    """
    rows, columns = weight.shape
    step, width = max(_ELEMENTS // columns, 1), columns
    if scheme.weight.granularity == "block":
        high, wide = scheme.weight.block
        step = max(step - step % high, high)
        width = max(_ELEMENTS // step // wide, 1) * wide
    extremes = (float(weight.min()), float(weight.max()))
    for start in range(0, rows, step):
        made = [
            oracle.quantize_weight(to_array(some.cpu().float()), scheme.weight, extremes=extremes)
            for some in torch.split(weight[start : start + step], width, dim=1)
        ]
        yield start, replace(_side_by_side(made), scheme=scheme)


def _side_by_side(made: Sequence[CanonicalWeight]) -> CanonicalWeight:
    """Weights of the same rows, whose every array has columns, as one."""
    if len(made) == 1:
        return made[0]
    tensors = {role: np.concatenate([part.tensors[role] for part in made], axis=1) for role in made[0].tensors}
    return replace(made[0], in_features=sum(part.in_features for part in made), tensors=tensors)


class Pieces:
    """A matrix, [rows, columns], or a vector, [rows] (`columns` is None), while pieces of it arrive."""

    def __init__(self, name: str, rows: int, columns: int | None = None) -> None:
        self.name = name
        self._shape = (rows,) if columns is None else (rows, columns)
        self._whole: torch.Tensor | None = None
        self._covered: list[tuple[slice, ...]] = []

    def put(self, tensor: torch.Tensor, rows: range | None = None, columns: range | None = None) -> bool:
        """Take the piece that covers `rows` and `columns`, all of them when None; True when it was the last one.

        Raises InvalidCheckpointError where it does not fit, comes twice, or is not of 16 or more bits.
        """
        asked = (rows, columns)[: len(self._shape)]
        where = tuple(
            slice(0, size) if held is None else slice(held.start, held.stop)
            for size, held in zip(self._shape, asked, strict=True)
        )
        wanted = tuple(part.stop - part.start for part in where)
        if tuple(tensor.shape) != wanted or any(
            part.stop > size for part, size in zip(where, self._shape, strict=True)
        ):
            raise InvalidCheckpointError(
                f"is {list(tensor.shape)} where {list(wanted)} of {list(self._shape)} belongs", key=self.name
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise InvalidCheckpointError(f"is {tensor.dtype}: 16 or 32 bit can be quantized", key=self.name)
        if any(_overlap(where, other) for other in self._covered):
            raise InvalidCheckpointError("was delivered twice", key=self.name)
        self._covered.append(where)
        if wanted == self._shape:
            self._whole = tensor.detach()
            return True
        if self._whole is None:
            self._whole = torch.empty(self._shape, dtype=tensor.dtype, device=tensor.device)
        self._whole[where] = tensor.detach()
        return self.complete

    @property
    def complete(self) -> bool:
        covered: int = sum(math.prod(part.stop - part.start for part in where) for where in self._covered)
        return covered == math.prod(self._shape)

    def take(self) -> torch.Tensor:
        """The whole, which is let go of. Raises InvalidCheckpointError for values that are not finite."""
        assert self.complete
        assert self._whole is not None
        whole, self._whole = self._whole, None
        if not all(math.isfinite(float(bound)) for bound in whole.aminmax()):
            raise InvalidCheckpointError("is not finite", key=self.name)
        return whole


def _overlap(one: tuple[slice, ...], other: tuple[slice, ...]) -> bool:
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other, strict=True))


class _Matrices:
    """Weights of one `Assembly` while they arrive, and the biases beside them: `row` is where one begins."""

    def __init__(self, assembly: Assembly, rounding: Rounding, scheme: Scheme, columns: int) -> None:
        self._assembly = assembly
        self._rounding = rounding
        self._scheme = scheme
        self._columns = columns
        self._weights: dict[tuple[int, int], Pieces] = {}
        self._biases: dict[tuple[int, int], Pieces] = {}
        #: Weights and biases that are not whole.
        self.left = 0

    def expect(self, name: str, rows: int, row: int, *, bias: bool, expert: int = 0) -> None:
        self._weights[expert, row] = Pieces(name, rows, self._columns)
        if bias:
            self._biases[expert, row] = Pieces(f"{name}.bias", rows)
        self.left += 1 + bias

    def put(self, tensor: torch.Tensor, row: int, rows: range | None, columns: range | None, expert: int = 0) -> None:
        pieces = self._weights[expert, row]
        if not pieces.put(tensor, rows, columns):
            return
        whole = pieces.take()
        with layer_memory(pieces.name, whole.nbytes):
            runs = self._rounding(whole, self._scheme)
            del whole  # what rounds it lets go of it
            for count, (start, weight) in enumerate(runs, 1):
                self._assembly.put(weight, row + start, module=pieces.name, expert=expert)
                if count % _RUNS_BEFORE_RELEASE == 0:
                    release_freed()
        self.left -= 1

    def put_bias(self, tensor: torch.Tensor, row: int, rows: range | None, expert: int = 0) -> None:
        if (expert, row) not in self._biases:
            raise InvalidCheckpointError("has a bias, the layer has none", key=self._weights[expert, row].name)
        # a copy: unlike a weight it is kept until the layer is made, and the caller may reuse what it gave
        self.left -= self._biases[expert, row].put(tensor.clone(), rows)

    @property
    def missing(self) -> tuple[str, ...]:
        known = (*self._weights.values(), *self._biases.values())
        return tuple(pieces.name for pieces in known if not pieces.complete)

    def biases(self) -> list[torch.Tensor]:
        """In the order in which they were expected."""
        return [pieces.take() for pieces in self._biases.values()]

    @property
    def nbytes(self) -> int:
        return self._assembly.nbytes

    def finish(self) -> CanonicalWeight:
        return self._assembly.finish()


def _require_all(name: str, missing: tuple[str, ...]) -> None:
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidCheckpointError(f"is incomplete: nothing brought all of {missing[0]}{more}", key=name)


class OnlineLinear:
    """A linear layer that is quantized while its weights arrive: one for each of `spec.parts`, which are rounded by
    themselves (a scale of the whole tensor is one of the part) and fused along N."""

    def __init__(
        self,
        spec: LayerSpec,
        kernel: LinearKernel[Any],
        rounding: Rounding = round_to_nearest,
        *,
        input_scale: float | None = None,
    ) -> None:
        """`spec` has the sizes that this rank holds. `input_scale` is that of a static activation."""
        self.spec = spec
        self._kernel = kernel
        self._input_scale = input_scale
        sizes = spec.parts or (spec.out_features,)
        self._starts = tuple(accumulate(sizes[:-1], initial=0))
        assembly = Assembly(spec.name, spec.scheme, spec.out_features, spec.in_features, starts=self._starts)
        self._matrices = _Matrices(assembly, rounding, spec.scheme, spec.in_features)
        for index, (start, size) in enumerate(zip(self._starts, sizes, strict=True)):
            name = f"{spec.name}[{index}]" if len(sizes) > 1 else spec.name
            self._matrices.expect(name, size, start, bias=spec.bias)

    def put(
        self, tensor: torch.Tensor, part: int = 0, *, rows: range | None = None, columns: range | None = None
    ) -> None:
        """Take the piece of weight number `part`, [N of the part, K], that covers `rows` and `columns` (None: all).

        Raises InvalidCheckpointError where it does not fit, comes twice, or the whole is not finite.
        """
        self._matrices.put(tensor, self._starts[part], rows, columns)

    def put_bias(self, tensor: torch.Tensor, part: int = 0, *, rows: range | None = None) -> None:
        """Take the piece of a part's bias that covers `rows`."""
        self._matrices.put_bias(tensor, self._starts[part], rows)

    @property
    def complete(self) -> bool:
        return not self._matrices.left

    @property
    def missing(self) -> tuple[str, ...]:
        """What has not come, or not all of it."""
        return self._matrices.missing

    def finish(
        self, device: torch.device | None = None, workspaces: Workspaces | None = None, stream: int = 0
    ) -> QuantLinear:
        """Prepare the layer, on `device`. Raises InvalidCheckpointError when something is missing, LayerMemoryError."""
        _require_all(self.spec.name, self.missing)
        weight = self._matrices.finish()
        if self._input_scale is not None:
            scale = np.array([self._input_scale], np.float32)
            weight = replace(weight, tensors={**weight.tensors, "input_scale": scale})
        with layer_memory(self.spec.name, weight.nbytes, device):
            tensors = to_torch(weight, device=device)
            biases = self._matrices.biases()
            bias = torch.cat(biases).to(device or torch.device("cpu")) if biases else None
            del self._matrices, weight
            layer = QuantLinear(self.spec, self._kernel, self._kernel.prepare(tensors, self.spec), bias)
            layer.share_workspace(workspaces or Workspaces(), stream)
        return layer


class OnlineExperts:
    """The experts of a layer, quantized while their weights arrive: `w13`, [2I, K] with the gate's rows first, and
    `w2`, [K, I], of every expert by themselves."""

    def __init__(self, spec: LayerSpec, kernel: MoeKernel[Any], rounding: Rounding = round_to_nearest) -> None:
        """`spec` has the sizes and the number of experts that this rank holds. Raises UsageError for a layer without
        experts, and for a static activation: nothing can see what reaches the second product."""
        moe = spec.moe
        if moe is None:
            raise UsageError(f"{spec.name} has no experts")
        if spec.scheme.activation is not None and not spec.scheme.activation.dynamic:
            raise UsageError(f"{spec.name}: experts have no static activations when they are quantized online")
        self.spec = spec
        self._kernel = kernel
        self._intermediate = inner = moe.intermediate
        first = Assembly(f"{spec.name}.w13", spec.scheme, 2 * inner, spec.in_features, experts=moe.experts)
        second = Assembly(f"{spec.name}.w2", spec.scheme, spec.out_features, inner, experts=moe.experts)
        self._w13 = _Matrices(first, rounding, spec.scheme, spec.in_features)
        self._w2 = _Matrices(second, rounding, spec.scheme, inner)
        for expert in range(moe.experts):
            self._w13.expect(f"{spec.name}.{expert}.w13", 2 * inner, 0, bias=spec.bias, expert=expert)
            self._w2.expect(f"{spec.name}.{expert}.w2", spec.out_features, 0, bias=spec.bias, expert=expert)

    def put_w13(
        self, tensor: torch.Tensor, expert: int, *, rows: range | None = None, columns: range | None = None
    ) -> None:
        """Take the piece of an expert's [2I, K] that covers `rows` and `columns` (None: all): the gate has the rows
        up to I, up has those from I. Raises as `OnlineLinear.put`."""
        self._w13.put(tensor, 0, rows, columns, expert)

    def put_w2(
        self, tensor: torch.Tensor, expert: int, *, rows: range | None = None, columns: range | None = None
    ) -> None:
        """The same of its [K, I]."""
        self._w2.put(tensor, 0, rows, columns, expert)

    def put_bias(self, tensor: torch.Tensor, expert: int, *, down: bool, rows: range | None = None) -> None:
        """Take the piece of an expert's bias, [2I] or with `down` [K], that covers `rows`."""
        (self._w2 if down else self._w13).put_bias(tensor, 0, rows, expert)

    @property
    def complete(self) -> bool:
        return not self._w13.left + self._w2.left

    @property
    def missing(self) -> tuple[str, ...]:
        """What has not come, or not all of it."""
        return self._w13.missing + self._w2.missing

    def finish(
        self, device: torch.device | None = None, workspaces: Workspaces | None = None, stream: int = 0
    ) -> QuantExperts:
        """Prepare the layer, on `device`. Raises InvalidCheckpointError when something is missing, LayerMemoryError."""
        _require_all(self.spec.name, self.missing)
        assert self.spec.moe is not None
        with layer_memory(self.spec.name, self._w13.nbytes + self._w2.nbytes, device):
            first, second = (_stacked(matrices, self.spec.moe.experts, device) for matrices in (self._w13, self._w2))
            del self._w13, self._w2
            layer = QuantExperts(self.spec, self._kernel, self._kernel.prepare(first, second, self.spec))
            layer.share_workspace(workspaces or Workspaces(), stream)
        return layer


def _stacked(matrices: _Matrices, experts: int, device: torch.device | None) -> WeightTensors:
    weight = to_torch(matrices.finish(), experts=experts, device=device)
    biases = matrices.biases()
    if not biases:
        return weight
    return replace(weight, tensors={**weight.tensors, "bias": torch.stack(biases).to(device or torch.device("cpu"))})
