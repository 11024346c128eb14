"""Weights compared: the relative L2 distance of two checkpoints, module by module, quantized or not.

Weights are dequantized (smoothing folded in), biases and norms are taken as they are; what inputs are quantized with
has no part in it. Modules meet under the names that both checkpoints give them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, prod

import numpy as np

from omniplat.api import make_planned, require_loadable
from omniplat.canonical import Array
from omniplat.checkpoint.folder import Checkpoint
from omniplat.checkpoint.modules import split_name
from omniplat.checkpoint.reader import ShardReader
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import UsageError
from omniplat.formats.resolve import Resolution
from omniplat.formats.resolved import ResolvedModule
from omniplat.reading import TensorReader
from omniplat.tools.compare import Comparison, Unmatched, in_both
from omniplat.tools.convert import dequantized_rows, weight_name
from omniplat.tools.fidelity import Distance

#: Scheme of a tensor that no format knows more about.
AS_IS = "as it is"


@dataclass(frozen=True, slots=True)
class WeightDistance:
    """One weight, or a bias or norm. `scheme_a` and `scheme_b` are ids of weight schemes; the distance is relative to
    A. An error that is not finite means values that are not."""

    name: str
    scheme_a: str
    scheme_b: str
    distance: Distance

    @property
    def error(self) -> float:
        return self.distance.relative

    @property
    def finite(self) -> bool:
        return isfinite(self.error)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A weight as values: a module that is dequantized, or a tensor that holds them."""

    shape: tuple[int, ...]
    scheme: str
    reader: TensorReader
    source: ResolvedModule | TensorInfo

    @property
    def size(self) -> int:
        return prod(self.shape)

    def rows(self) -> Iterator[Array]:
        """The values, float64 [rows, last dimension], a few rows at a time."""
        if isinstance(self.source, ResolvedModule):
            yield from dequantized_rows(self.source, self.reader)
            return
        values = self.reader.read(self.source)
        flat = values.reshape(-1, values.shape[-1] if values.ndim else 1)
        step = max(1, _ELEMENTS // max(flat.shape[1], 1))
        for start in range(0, len(flat), step):
            yield flat[start : start + step].astype(np.float64)


#: Values that are held of a tensor at a time.
_ELEMENTS = 1 << 20


def compare_weights(a: Checkpoint, b: Checkpoint, component: str | None = None) -> Comparison[WeightDistance]:
    """Compare two checkpoints; of pipelines all components, or one. Holds a few megabytes of values at a time.

    A single value that one of them lacks is no weight (a cache's scale, a counter) and is left out. Raises
    InvalidCheckpointError or UnknownFormatError for a checkpoint that cannot be dequantized, UsageError for a component
    that does not exist.
    """
    first, second = _components(a, component), _components(b, component)
    if len(first) == len(second) == 1:
        # A transformer on its own is the one of a pipeline.
        second = dict(zip(first, second.values(), strict=True))
    ours, theirs = _tensors(first), _tensors(second)
    unmatched: list[Unmatched] = []
    found = []
    for name, one, other in in_both(ours, theirs, unmatched):
        if one.size != other.size or one.shape[-1:] != other.shape[-1:]:
            unmatched.append(Unmatched(name, f"{list(one.shape)} in A, {list(other.shape)} in B"))
        else:
            found.append(WeightDistance(name, one.scheme, other.scheme, _distance(one.rows(), other.rows())))
    return Comparison(
        tuple(found), tuple(item for item in unmatched if (ours.get(item.name) or theirs[item.name]).size > 1)
    )


def _components(checkpoint: Checkpoint, component: str | None) -> dict[str, Resolution]:
    # What is dequantized does not depend on a device; the cpu's plan has the resolved modules.
    planned = make_planned(checkpoint, "cpu", component=component)
    require_loadable(planned.plan)
    if not planned.resolutions:
        raise UsageError(f"{checkpoint.path} has no component with weights")
    return {item.component.name: item for item in planned.resolutions}


def _tensors(components: dict[str, Resolution]) -> dict[str, _Tensor]:
    """Weights, biases and norms by the name that the tensor has, or would have without quantization."""
    found: dict[str, _Tensor] = {}
    for component, resolution in components.items():
        reader = ShardReader(resolution.component.root)
        prefix = f"{component}/" if component else ""
        modules = {module.name: module for module in resolution.modules}
        quantized = {name: module for name, module in modules.items() if module.scheme.weight.element != "bf16"}
        for module in quantized.values():
            lead = (module.experts,) if module.experts else ()
            shape = (*lead, module.out_features, module.in_features)
            found[prefix + weight_name(module)] = _Tensor(shape, module.scheme.weight_id, reader, module)
        for name, info in resolution.component.tensors.items():
            owner, leaf = split_name(info)
            # What else lies beside a weight has told how it is quantized.
            if owner not in modules or leaf == "bias" or (leaf in ("weight", "") and owner not in quantized):
                found[prefix + name] = _Tensor(info.shape, AS_IS, reader, info)
    return found


def _distance(a: Iterator[Array], b: Iterator[Array]) -> Distance:
    total = Distance(0.0, 0.0)
    for one, other in _side_by_side(a, b):
        total += Distance(float(np.square(other - one).sum()), float(np.square(one).sum()))
    return total


def _side_by_side(a: Iterator[Array], b: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
    """The same rows of both, which come in pieces of different heights."""
    one = other = np.empty((0, 0))
    while True:
        one = one if len(one) else next(a, one)
        other = other if len(other) else next(b, other)
        rows = min(len(one), len(other))
        if not rows:
            return
        yield one[:rows], other[:rows]
        one, other = one[rows:], other[rows:]
