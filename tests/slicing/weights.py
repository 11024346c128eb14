"""Weights of every scheme, and layers of them stored in memory as checkpoints store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from omniplat import oracle
from omniplat.canonical import Array, CanonicalWeight
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.storage import Storage
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.packed import PackedLayer, Part, Split
from omniplat.roworder import AS_IS, RowOrder
from omniplat.scheme import Scheme, low_rank_base
from tests.reference.build import Weights

#: Schemes that a checkpoint can hold and the cpu backend runs.
RUN = (
    *("bf16/a16", "fp8-tensor/a16", "fp8-tensor/fp8-tensor-static", "fp8-channel/fp8-token", "fp8-g128/a16"),
    *("fp8-block128x128/fp8-g128", "fp8-block16x32/a16", "fp8e5m2-channel/a16"),
    *("int8-tensor/int8-tensor-static", "int8-channel/int8-token", "int8-g128/a16", "uint8-channel/a16"),
    *("int4-g128/a16", "int4-g32/int8-token", "int4-channel/a16", "uint4-g128/a16", "uint4-channel/a16"),
    *("int3-g32/a16", "uint3-g32/a16", "int2-g32/a16", "int5-channel/a16", "uint6-g32/a16", "int7-g64/a16"),
    *("mxfp8/mxfp8", "mxfp8e5m2/a16", "mxfp4/mxfp4", "mxfp6e2m3/a16", "mxfp6e3m2/mxfp6e3m2", "mxint8/a16"),
    *("nvfp4/nvfp4", "mxfp4-dual/a16", "nf4-b64/a16", "fp4bnb-b64/a16"),
)
#: Schemes that have a canonical form besides.
HELD = ("svdq-int4-g64/a16", "svdq-nvfp4/a16", "int8-bnb/a16", "mxint4/a16")


def columns_unit(scheme: Scheme) -> int:
    """K is a multiple of this in every weight of the scheme, or nobody could have quantized it."""
    quant = low_rank_base(scheme.weight) or scheme.weight
    if quant.second_scale == "dual":
        return 512
    groups = [q.group_size for q in (quant, scheme.activation) if q is not None and q.granularity == "group"]
    return int(np.lcm.reduce([*groups, 2]))


def make(scheme: Scheme, rows: int, columns: int, seed: int, *, extras: bool = True) -> CanonicalWeight:
    """A random weight. With `extras` it also has a bias and, for odd seeds of integer groups, a group order."""
    made = Weights(seed)
    base = low_rank_base(scheme.weight)
    quantized = replace(scheme, weight=base) if base is not None else scheme
    if scheme.weight.element == "int8_bnb":
        quantized = Scheme.parse("int8-channel/a16")
    if scheme.weight.element in ("nf4", "fp4_bnb"):
        tensors = {
            "codes": made.random.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
            "scale": np.exp(made.values(rows, columns // 64)).astype(np.float32),
        }
    else:
        tensors = dict(made.canonical(quantized, rows, columns).tensors)
    if scheme.activation is not None and scheme.activation.second_scale == "global":
        tensors["input_global_scale"] = np.array([0.05], np.float32)
    pre_scale = scheme.pre_scale
    if base is not None:
        tensors["low_rank_down"], tensors["low_rank_up"] = made.values(columns, 3), made.values(rows, 3)
        pre_scale = True
    if pre_scale:
        tensors["pre_scale"] = np.exp(made.values(columns)).astype(np.float32)
    if extras:
        tensors["bias"] = made.values(rows)
        groups = columns // max(scheme.weight.group_size, 1)
        if scheme.weight.granularity == "group" and scheme.weight.is_integer and seed % 2 and groups > 1:
            tensors["group_index"] = made.random.permutation(np.arange(columns) % groups).astype(np.int32)
    return CanonicalWeight(replace(scheme, pre_scale=pre_scale), rows, columns, tensors)


def dequantized(weight: CanonicalWeight) -> Array:
    """What the weight's row and column stand for, smoothing included: float64 [N, K]."""
    values = oracle.dequantize(weight)
    if "pre_scale" in weight.tensors:
        values = values * weight.tensors["pre_scale"].astype(np.float64)
    return values


class Unread:
    """A checkpoint that must not be read."""

    def read(self, info: TensorInfo) -> Array:
        raise AssertionError(f"{info.name} was read")


@dataclass
class Memory:
    """A checkpoint in memory."""

    arrays: dict[str, Array]

    def __init__(self) -> None:
        self.arrays = {}

    def read(self, info: TensorInfo) -> Array:
        array = self.arrays[info.name].view()
        array.setflags(write=False)
        return array

    def module(self, name: str, weight: CanonicalWeight, experts: int = 0) -> ResolvedModule:
        arrays, storage = stored(weight)
        infos = {}
        for role, array in arrays.items():
            self.arrays[f"{name}.{role}"] = array
            infos[role] = TensorInfo(f"{name}.{role}", "", array.shape, "model.safetensors", 0, array.nbytes)
        n, k = weight.out_features, weight.in_features
        return ResolvedModule(name, "", None, weight.scheme, storage, n, k, infos, DecidedBy("", ""), experts=experts)


def stored(weight: CanonicalWeight) -> tuple[dict[str, Array], Storage]:
    """The roles as some checkpoint stores them."""
    arrays, element = dict(weight.tensors), weight.scheme.weight.element
    if element in ("nf4", "fp4_bnb"):
        codes = arrays["codes"]
        arrays["codes"] = ((codes << 4) | (codes >> 4)).reshape(-1, 1)
        arrays["scale"] = arrays["scale"].reshape(-1)
        return arrays, Storage("nibbles_flat", "U8")
    if element in ("int4", "uint4", "fp4_e2m1"):
        return arrays, Storage("nibbles_k", "U8")
    if element.startswith("int"):
        arrays["codes"] = arrays["codes"].view(np.int8)
    return arrays, Storage("plain", "U8")


def linear_layer(
    memory: Memory, parts: Mapping[str, CanonicalWeight], split: Split, rows: tuple[int, ...] = ()
) -> PackedLayer:
    """A layer of the `parts`; `rows` are those of the spec's parts where one module holds several."""
    first = next(iter(parts.values()))
    counts = rows or tuple(weight.out_features for weight in parts.values())
    bias = any("bias" in weight.tensors for weight in parts.values())
    spec = LayerSpec("l", "linear", sum(counts), first.in_features, first.scheme, bias=bias, parts=counts)
    modules = tuple(Part(memory.module(name, weight)) for name, weight in parts.items())
    return PackedLayer(spec, modules, fused=len(parts) > 1, split=split)


def expert_layer(
    memory: Memory,
    weights: list[tuple[CanonicalWeight, CanonicalWeight, CanonicalWeight]],
    *,
    form: str,
    order: RowOrder = AS_IS,
) -> PackedLayer:
    """Experts of (gate, up, down): `form` is "separate", "fused" (gate and up are one module) or "stacked"."""
    gate, _, down = weights[0]
    spec = LayerSpec(
        "e", "moe", down.out_features, gate.in_features, gate.scheme, moe=MoeSpec(len(weights), down.in_features)
    )
    if form == "stacked":
        whole = [stack(list(column)) for column in zip(*weights, strict=True)]
        parts = [Part(memory.module(str(i), weight, len(weights))) for i, weight in enumerate(whole)]
        return PackedLayer(spec, w13=((parts[0], parts[1]),), w2=((parts[2],),), stacked=True)
    w13 = []
    for e, (first, second, _) in enumerate(weights):
        halves = {"gate": first, "up": second} if form == "separate" else {"gate_up": concatenate(first, second)}
        w13.append(tuple(Part(memory.module(f"{e}.{name}", half), order) for name, half in halves.items()))
    w2 = tuple((Part(memory.module(f"{e}.down", down)),) for e, (_, _, down) in enumerate(weights))
    return PackedLayer(spec, w13=tuple(w13), w2=w2)


def concatenate(first: CanonicalWeight, second: CanonicalWeight) -> CanonicalWeight:
    """Two weights with rows one after the other; everything that both share must be the same."""
    shared = ("input_scale", "input_zero_point", "input_global_scale", "group_index", "pre_scale")
    tensors = {
        role: array if role in shared else np.concatenate([array, second.tensors[role]])
        for role, array in first.tensors.items()
    }
    return replace(first, out_features=first.out_features + second.out_features, tensors=tensors)


def stack(weights: list[CanonicalWeight]) -> CanonicalWeight:
    tensors = {role: np.stack([weight.tensors[role] for weight in weights]) for role in weights[0].tensors}
    return replace(weights[0], tensors=tensors)
