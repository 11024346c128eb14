"""Points of the catalog as layers of plans: what is declared of a slice, and plans of everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from omniplat.backend import BackendSpec
from omniplat.capability import Capability
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.conformance.catalog import (
    Point,
    activation_ids,
    declared_activations,
    declared_weights,
    layer_spec,
    roomy_sizes,
    weight_ids,
)
from omniplat.device import Device
from omniplat.document import PlanCheckpoint
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.storage import Storage
from omniplat.packed import PackedLayer, Part
from omniplat.planner import Planned, Target, plan_layers

_SOURCE = PlanCheckpoint("<catalog>", ("catalog",), ("",))
_PLAIN = Storage("plain", "")
_DECIDED = DecidedBy("", "the conformance suite")


@dataclass(frozen=True, slots=True)
class Slice:
    """The points of one op and dtype on one architecture."""

    device: Device
    op: str
    dtype: str


def declared_points(spec: BackendSpec, part: Slice) -> dict[Point, list[Capability]]:
    """The points of a slice that capabilities declare, each with those."""
    weights, activations = weight_ids(spec), activation_ids(spec)
    found: dict[Point, list[Capability]] = {}
    for item in spec.capabilities:
        if item.op == part.op and part.dtype in item.dtypes and part.device.arch in (item.archs or (part.device.arch,)):
            for pair in product(declared_weights(item, weights), declared_activations(item, activations)):
                found.setdefault(Point(part.op, *pair, part.dtype), []).append(item)
    return found


def undeclared_points(spec: BackendSpec, part: Slice) -> list[Point]:
    """All other points of a slice but the one without quantization, which is no kernel's."""
    declared = declared_points(spec, part)
    pairs = product(weight_ids(spec), activation_ids(spec))
    every = (Point(part.op, *pair, part.dtype) for pair in pairs)
    return [point for point in every if point not in declared and not point.scheme.is_unquantized]


def plan_points(spec: BackendSpec, device: Device, points: Iterable[Point]) -> Planned:
    """A plan with one layer for each point, named after its scheme, on a described device."""
    sizes = roomy_sizes(spec.capabilities[0]) if spec.capabilities else {}
    return plan_layers(_SOURCE, [_layer(point, sizes) for point in points], Target(spec, device))


def _layer(point: Point, sizes: dict[str, int]) -> PackedLayer:
    scheme = point.scheme
    spec = layer_spec(
        point.op,
        scheme,
        point.dtype,
        out_features=sizes.get("out", 256),
        in_features=sizes.get("in", 512),
        intermediate=sizes.get("intermediate", 512),
        experts=sizes.get("experts", 4),
        name=scheme.id,
    )
    experts = spec.moe.experts if spec.moe is not None else 0
    n, k = spec.out_features, spec.in_features
    codes = {"codes": TensorInfo(f"{scheme.id}.codes", "U8", (n, k), "model.safetensors", 0, n * k)}
    part = Part(ResolvedModule(scheme.id, "", scheme, scheme, _PLAIN, n, k, codes, _DECIDED, experts=experts))
    if spec.moe is None:
        return PackedLayer(spec, (part,))
    return PackedLayer(spec, w13=((part, part),), w2=((part,),), stacked=True)


def one_by_one(planned: Planned) -> Iterator[Planned]:
    """Each layer of a plan as a plan of its own: loading stops at the first layer that cannot run."""
    for item in planned.layers:
        plan = replace(planned.plan, layers=(item.layer,), findings=())
        yield replace(planned, plan=plan, layers=(item,))
