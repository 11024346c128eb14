"""Checkpoints of every scheme: the canonical form in a safetensors file, resolved without a dialect.

The suite is about backends, and no one dialect holds every scheme. From the resolved modules on everything is the real
way of a checkpoint: packing, planning, headers, the reader, canonical form, slices, fusing, `prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from omniplat.canonical import Array, CanonicalWeight
from omniplat.capability import Capability
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.conformance.catalog import fitting
from omniplat.conformance.model import DTYPE_NAMES, Sizes, Written, model_config, modules_of, write_files
from omniplat.conformance.subject import Subject
from omniplat.conformance.weights import columns_unit, random_weight
from omniplat.formats.matching import ModuleIndex
from omniplat.formats.resolve import Resolution
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.storage import Storage
from omniplat.oracle import unpack_nibbles
from omniplat.planner import Planned, Target, plan_resolved
from omniplat.registry import MODELS, default_registry
from omniplat.scheme import Scheme, low_rank_base

_CONFIG_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_FLOAT = ("BF16", "F16", "F32")


def sizes_of(capability: Capability, scheme: Scheme, experts: int = 0, ranks: int = 1) -> Sizes:
    """Sizes near 256 that scheme and shape rules allow, for whole layers and for what each of `ranks` has of them."""
    rules = [rule for rule in capability.shapes if rule.dim in ("in", "out")]
    quant = scheme.weight
    unit = columns_unit(scheme) if quant.granularity != "block" else int(np.lcm(*quant.block))
    hidden = fitting(256, rules, int(np.lcm(ranks * unit, 8)))
    inner = fitting(512, [*rules, *(r for r in capability.shapes if r.dim == "intermediate")], ranks * unit)
    return Sizes(hidden, inner, heads=4, kv_heads=2, head_dim=hidden // 4, experts=experts)


def write_canonical(
    folder: Path,
    scheme: Scheme,
    sizes: Sizes,
    *,
    exceptions: Mapping[str, Scheme] | None = None,
    dtype: str = "bf16",
) -> Written:
    """Write the model with random weights: every module in `scheme` but those in `exceptions` (whole names)."""
    rng = np.random.default_rng(0)
    weights = {
        name: random_weight((exceptions or {}).get(name, scheme), rows, columns, rng, stored=dtype)
        for name, (rows, columns) in modules_of(sizes).items()
    }
    return write_weights(folder, weights, sizes, dtype=dtype)


def write_weights(
    folder: Path, weights: Mapping[str, CanonicalWeight], sizes: Sizes, *, dtype: str = "bf16"
) -> Written:
    """Write the model with a weight for each of `modules_of(sizes)`."""
    kept = {name: _storable(weight) for name, weight in weights.items()}
    tensors: dict[str, Array] = {"model.norm.weight": np.ones(sizes.hidden, ml_dtypes.bfloat16)}
    for name, weight in kept.items():
        tensors |= {f"{name}.{role}": array for role, array in _stored(weight).items()}
    write_files(folder, model_config(sizes, _CONFIG_DTYPES[dtype]), tensors)
    return Written(folder, kept, sizes)


def plan_canonical(written: Written, subject: Subject, capability: Capability | None, *, tp: int = 1) -> Planned:
    """Plan the file for the backend under test, as if it had this capability alone: none hides behind a better one.
    With None all of them compete, as in every other plan."""
    checkpoint = open_checkpoint(written.folder)
    (component,) = checkpoint.components
    modules = tuple(_module(name, weight, component.tensors) for name, weight in written.weights.items())
    resolution = Resolution(component, "canonical", modules, (), ModuleIndex(written.weights))
    registry = default_registry()
    families = [family for name in registry.names(MODELS) for family in registry.load(MODELS, name)]
    spec = replace(subject.spec, capabilities=(capability,)) if capability is not None else subject.spec
    target = Target(spec, subject.device, tp)
    return plan_resolved(checkpoint, (resolution,), target, families)


def _module(name: str, weight: CanonicalWeight, tensors: Mapping[str, TensorInfo]) -> ResolvedModule:
    prefix = f"{name}."
    roles = {text.removeprefix(prefix): info for text, info in tensors.items() if text.startswith(prefix)}
    stored = roles["codes"].dtype
    return ResolvedModule(
        name,
        "",
        weight.scheme,
        weight.scheme,
        Storage(_packing(weight.scheme), stored),
        weight.out_features,
        weight.in_features,
        roles,
        DecidedBy("", "the conformance suite"),
        "unquantized" if weight.scheme.is_unquantized else "ok",
        stored_dtype=stored if stored in _FLOAT else "",
    )


def _packing(scheme: Scheme) -> str:
    """The packing of `omniplat.formats.storage` that keeps the canonical form as it is, or nearly so."""
    quant = scheme.weight
    if quant.element.startswith("gguf_"):
        return "gguf"
    if low_rank_base(quant) is not None:
        return "svdquant_rows"
    return "nibbles_k" if quant.element == "fp4_e2m1" else "plain"


def _storable(weight: CanonicalWeight) -> CanonicalWeight:
    """The weight with what its storage rounds. bitsandbytes' int8 keeps 127 times the scale."""
    if weight.scheme.weight.element != "int8_bnb":
        return weight
    scale = (weight.tensors["scale"] * np.float32(127)) / np.float32(127)
    return replace(weight, tensors={**weight.tensors, "scale": scale.astype(np.float32)})


def _stored(weight: CanonicalWeight) -> dict[str, Array]:
    """The tensors of one module, by role, as its packing has them."""
    quant, found = weight.scheme.weight, dict(weight.tensors)
    packing = _packing(weight.scheme)
    if packing == "svdquant_rows":
        found["scale"] = found["scale"].T
        found["smooth_factor"] = np.float32(1) / found.pop("pre_scale")
        if "global_scale" in found:
            found["channel_scale"] = found.pop("global_scale")[:, 0]
            found["tensor_scale"] = np.ones(1, np.float32)
    elif packing == "plain" and quant.element not in ("bf16", "int8_bnb") and quant.bits < 8:
        codes = unpack_nibbles(found["codes"]) if quant.bits == 4 else found["codes"]
        if quant.element.startswith("int"):
            sign = np.uint8(1 << (quant.bits - 1))
            codes = (((codes & np.uint8(2 * sign - 1)) ^ sign) - sign).view(np.int8)
        found["codes"] = codes
    elif quant.element == "int8_bnb":
        found["scale"] = (found["scale"] * np.float32(127)).reshape(-1)
    assert all(array.dtype in DTYPE_NAMES for array in found.values())
    return found
