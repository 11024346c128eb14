"""What `omniplat run` measures: how far each loaded layer is from the original, and how long it takes.

Errors are relative L2 norms, |found - original| / |original|. The weight's is that of the dequantized values; the
output's is that of the whole layer on seeded Gaussian rows, its activation quantization included. A scheme's figure
sums the squares of its layers before dividing, so large layers count for more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Protocol

import numpy as np
import torch

from omniplat.canonical import Array, CanonicalWeight
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import InvalidCheckpointError
from omniplat.formats.resolved import ResolvedModule
from omniplat.packed import PackedLayer, Part
from omniplat.planner import PlannedLayer
from omniplat.reading import TensorReader
from omniplat.roworder_apply import to_canonical_rows
from omniplat.runtime.activate import activate
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.tensors import DTYPES, to_tensor
from omniplat.scheme import UNQUANTIZED
from omniplat.tools.convert import dequantized_rows

#: Experts that a row of the measurement chooses where no router chooses.
TOP_K = 2

#: Rows to the experts that they choose, and their weights.
Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Originals(Protocol):
    """Unquantized weights by checkpoint module."""

    def weight(self, module: str) -> Array | None:
        """[N, K] (stacked experts [E, N, K]) in bf16, f16 or f32; None where the original has no such module."""


class OriginalWeights:
    """The weights of an unquantized checkpoint with the same module names; `reader` reads its `tensors`."""

    def __init__(self, tensors: Mapping[str, TensorInfo], reader: TensorReader) -> None:
        self._tensors = tensors
        self._reader = reader

    def weight(self, module: str) -> Array | None:
        info = self._tensors.get(f"{module}.weight") or self._tensors.get(module)
        return self._reader.read(info) if info is not None else None


@dataclass(frozen=True, slots=True)
class Distance:
    """Squared L2 norms of a difference and of the original."""

    difference: float
    original: float

    @property
    def relative(self) -> float:
        return sqrt(self.difference / self.original) if self.original else sqrt(self.difference)

    def __add__(self, other: Distance) -> Distance:
        return Distance(self.difference + other.difference, self.original + other.original)


@dataclass(frozen=True, slots=True)
class LayerFidelity:
    """One layer. `weight` and `output` are None without an original; `seconds` is the median of a call with `rows`
    rows in the layer's own dtype; `finite` says whether every output was."""

    name: str
    scheme: str
    kernel: str
    rows: int
    seconds: float
    nbytes: int
    finite: bool
    weight: Distance | None = None
    output: Distance | None = None


@dataclass(frozen=True, slots=True)
class SchemeFidelity:
    """All layers of one scheme. Distances cover the `compared` layers, those that have an original."""

    scheme: str
    layers: int
    compared: int
    seconds: float
    nbytes: int
    weight: Distance | None
    output: Distance | None


def input_dtype(item: PlannedLayer) -> torch.dtype:
    """float32 where the chosen kernel takes it, so that its output is not rounded; else the layer's own dtype."""
    takes = item.capability.dtypes if item.capability is not None else ()
    return torch.float32 if "f32" in takes else DTYPES.get(item.packed.spec.dtype, torch.bfloat16)


def measure(
    layer: QuantLinear | QuantExperts,
    packed: PackedLayer,
    reader: TensorReader,
    originals: Originals | None = None,
    *,
    rows: int = 32,
    seed: int = 0,
    repeats: int = 3,
    router: Router | None = None,
    dtype: torch.dtype = torch.float32,
) -> LayerFidelity:
    """Run `layer`, loaded from `packed` through `reader`, on rows of `dtype`, and compare it with its original.

    `router` chooses experts for rows; without it they are chosen at random. Raises InvalidCheckpointError where the
    original's weight has another shape.
    """
    x = inputs(packed, rows, seed)
    routing: tuple[torch.Tensor, ...] = ()
    with torch.inference_mode():
        if isinstance(layer, QuantExperts):
            routing = router(x) if router is not None else _routing(layer, rows, seed)
        found = layer(x.to(dtype), *routing).to(torch.float64)
        timed = x.to(DTYPES.get(packed.spec.dtype, torch.bfloat16))
        seconds = median_seconds(layer, timed, routing, repeats)
    weight = output = None
    if originals is not None and all(originals.weight(module.name) is not None for module in packed.modules):
        weight = _sum(weight_distance(module, reader, _original(originals, module)) for module in packed.modules)
        expected = _expected(layer, packed, originals, x, routing)
        output = Distance(float((found - expected).square().sum()), float(expected.square().sum()))
    return LayerFidelity(
        packed.spec.name,
        packed.spec.scheme.id,
        layer.kernel.name,
        rows,
        seconds,
        layer.nbytes,
        bool(torch.isfinite(found).all()),
        weight,
        output,
    )


def weight_distance(module: ResolvedModule, reader: TensorReader, original: Array) -> Distance:
    """Distance of a module's dequantized weight (with `pre_scale` folded in) from `original`, of the same shape."""
    flat = original.reshape(-1, original.shape[-1])
    row = 0
    total = Distance(0.0, 0.0)
    for values in dequantized_rows(module, reader):
        truth = flat[row : row + len(values)].astype(np.float64)
        total += Distance(float(np.square(values - truth).sum()), float(np.square(truth).sum()))
        row += len(values)
    return total


def aggregate(layers: Iterable[LayerFidelity]) -> tuple[SchemeFidelity, ...]:
    """Per scheme, in the order in which schemes first appear."""
    groups: dict[str, list[LayerFidelity]] = {}
    for layer in layers:
        groups.setdefault(layer.scheme, []).append(layer)
    return tuple(
        SchemeFidelity(
            scheme,
            len(group),
            sum(item.weight is not None for item in group),
            sum(item.seconds for item in group),
            sum(item.nbytes for item in group),
            _sum(item.weight for item in group if item.weight is not None),
            _sum(item.output for item in group if item.output is not None),
        )
        for scheme, group in groups.items()
    )


def _sum(distances: Iterable[Distance]) -> Distance | None:
    total: Distance | None = None
    for distance in distances:
        total = distance if total is None else total + distance
    return total


def inputs(packed: PackedLayer, rows: int, seed: int) -> torch.Tensor:
    """Gaussian rows for a layer: float32, and bf16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, packed.spec.in_features, generator=generator).to(torch.bfloat16).to(torch.float32)


def median_seconds(layer: torch.nn.Module, x: torch.Tensor, routing: tuple[torch.Tensor, ...], repeats: int) -> float:
    """Median time of a call over `repeats` of them."""
    return median(_seconds(layer, x, routing) for _ in range(max(repeats, 1)))


def _seconds(layer: torch.nn.Module, x: torch.Tensor, routing: tuple[torch.Tensor, ...]) -> float:
    start = time.perf_counter()
    layer(x, *routing)
    return time.perf_counter() - start


def _routing(layer: QuantExperts, rows: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Every row chooses `TOP_K` different experts, with equal weights."""
    experts = layer.spec.moe.experts if layer.spec.moe else 1
    chosen = min(TOP_K, experts)
    ids = torch.rand(rows, experts, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :chosen]
    return ids, torch.full((rows, chosen), 1.0 / chosen)


def _original(originals: Originals, module: ResolvedModule) -> Array:
    weight = originals.weight(module.name)
    lead = (module.experts,) if module.experts else ()
    shape = (*lead, module.out_features, module.in_features)
    if weight is None or weight.shape != shape:
        found = "missing" if weight is None else list(weight.shape)
        raise InvalidCheckpointError(f"the original is {found}, needed {list(shape)}", key=module.name)
    return weight


def rows_of(parts: Iterable[Part], originals: Originals, expert: int | None = None) -> torch.Tensor:
    """The original weight of fused parts in canonical row order: float64 [N, K]."""
    found = []
    for part in parts:
        whole = _original(originals, part.module)
        weight = CanonicalWeight(
            UNQUANTIZED,
            part.module.out_features,
            part.module.in_features,
            {"codes": whole if expert is None else whole[expert]},
        )
        found.append(to_tensor(to_canonical_rows(weight, part.row_order).tensors["codes"]).to(torch.float64))
    return torch.cat(found)


def _expected(
    layer: QuantLinear | QuantExperts,
    packed: PackedLayer,
    originals: Originals,
    x: torch.Tensor,
    routing: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """What the original computes, float64. Biases are those of the loaded layer: they are not quantized."""
    rows = x.to(torch.float64)
    if isinstance(layer, QuantLinear):
        y = rows @ rows_of(packed.parts, originals).t()
        return y if layer.bias is None else y + layer.bias.to(torch.float64)
    return expected_experts(layer, packed, originals, x, *routing)


def expected_experts(
    layer: QuantExperts,
    packed: PackedLayer,
    originals: Originals,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """What the original's routed experts compute, float64, with the biases of the loaded layer."""
    rows = x.to(torch.float64)
    y = torch.zeros_like(rows)
    biases, moe = dict(layer.named_buffers()), packed.spec.moe
    assert moe is not None
    for expert in torch.unique(ids).tolist():
        group, index = (0, expert) if packed.stacked else (expert, None)
        chosen, slot = torch.nonzero(ids == expert, as_tuple=True)
        hidden = rows[chosen] @ rows_of(packed.w13[group], originals, index).t()
        if "w13_bias" in biases:
            hidden = hidden + biases["w13_bias"][expert]
        gate, up = hidden.chunk(2, dim=1)
        active = activate(gate, up, moe.activation, moe.limit, moe.alpha)
        out = active @ rows_of(packed.w2[group], originals, index).t()
        if "w2_bias" in biases:
            out = out + biases["w2_bias"][expert]
        y.index_add_(0, chosen, out * weights[chosen, slot].to(torch.float64).unsqueeze(1))
    return y
