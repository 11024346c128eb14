"""Layers that came from a file: which schemes to write for a backend, and loaded layers against what was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from omniplat.canonical import Array, CanonicalWeight
from omniplat.capability import Capability, unfollowed
from omniplat.conformance import expected
from omniplat.conformance.build import make_routing, run_experts, run_linear
from omniplat.conformance.canonical_file import plan_canonical, sizes_of, write_canonical
from omniplat.conformance.cases import Case, schemes_once, spread
from omniplat.conformance.catalog import declared_activations, declared_weights
from omniplat.conformance.checks import Named
from omniplat.conformance.dialect import WRITABLE, declared_scheme
from omniplat.conformance.expected import executed_activation
from omniplat.conformance.inputs import as_dtype, random_input, representable_input
from omniplat.conformance.judge import assert_experts_right
from omniplat.conformance.model import Written, dense_modules
from omniplat.conformance.subject import Subject
from omniplat.conformance.tolerances import excess
from omniplat.conformance.weights import stack
from omniplat.planner import Planned, PlannedLayer
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.scheme import UNQUANTIZED

#: Rows of the inputs of loaded layers.
ROWS = 6


def held(subject: Subject, op: str, profile: str) -> Iterable[Named]:
    """A case for each capability of the op and each scheme of it; the value is a `Scheme`."""
    for capability in subject.spec.capabilities:
        for scheme in schemes_once(subject, capability, profile) if capability.op == op else ():
            # what no scheme quantizes is the model's own layer, and planned on no kernel
            if not scheme.is_unquantized:
                yield Named(f"{capability.name}-{scheme.id}", capability, scheme)


def published(subject: Subject, profile: str) -> Iterable[Named]:
    """As `held`, linear layers in the schemes that a published dialect writes, with the rules that it declares."""
    for capability in subject.spec.capabilities:
        found = [
            Named(f"{capability.name}-{scheme.id}", capability, scheme)
            for scheme in (declared_scheme(*pair) for pair in WRITABLE)
            if capability.op == "linear"
            and declared_weights(capability, (scheme.weight_id,))
            and declared_activations(capability, (scheme.activation_id,))
            and (capability.substitutes or unfollowed(capability, scheme.activation) is None)
            and "bf16" in capability.dtypes
            and all(256 % rule.multiple_of == 0 for rule in capability.shapes)
        ]
        yield from spread(found, 1) if profile == "quick" else found


def write_model(folder: Path, case: Named, *, experts: int = 0, mixed: Sequence[str] = (), ranks: int = 1) -> Written:
    """A checkpoint of a case of `held`, whose layers `ranks` can share: what it is about in its scheme, the rest and
    `mixed` in 16 bits."""
    capability, scheme = _capability(case), case.value
    sizes = sizes_of(capability, scheme, experts, ranks)
    plain = [*mixed, *(dense_modules(sizes) if experts else ())]
    dtype = capability.dtypes[0]
    return write_canonical(folder, scheme, sizes, exceptions=dict.fromkeys(plain, UNQUANTIZED), dtype=dtype)


def plan_model(written: Written, subject: Subject, case: Named) -> Planned:
    """The plan of it, for the case's capability alone."""
    return plan_canonical(written, subject, _capability(case))


def _capability(case: Named) -> Capability:
    assert case.capability is not None
    return case.capability


def assert_linear_right(subject: Subject, item: PlannedLayer, layer: nn.Module, written: Written) -> None:
    """A loaded linear layer against its checkpoint modules, each by itself."""
    assert isinstance(layer, QuantLinear)
    assert item.capability is not None
    dtype = item.packed.spec.dtype
    x = loaded_input(item, dtype)
    found = run_linear(layer, x, dtype, subject)
    start = 0
    for part in item.packed.parts:
        weight = canonical_of(written.weights, part.module.name, item)
        rows = found[:, start : start + weight.out_features]
        assert_module_right(item, part.module.name, x, rows, written)
        start += weight.out_features
    assert start == found.shape[1]


def assert_module_right(
    item: PlannedLayer, module: str, x: Array, found: Array, written: Written, extra: Array | float = 0.0
) -> None:
    """The output of one checkpoint module within its bound and `extra`."""
    assert item.capability is not None
    weight = canonical_of(written.weights, module, item)
    wanted = expected.linear(x, weight, item.capability, item.packed.spec.dtype)
    beyond = excess(found, wanted.y, wanted.allowed + extra)
    assert beyond is None, f"{module} in {item.layer.name}: {beyond}"


def assert_experts_loaded(subject: Subject, item: PlannedLayer, layer: nn.Module, written: Written) -> None:
    """A loaded layer of experts against its checkpoint modules."""
    assert isinstance(layer, QuantExperts)
    assert item.capability is not None
    spec, dtype = item.packed.spec, item.packed.spec.dtype
    assert spec.moe is not None
    w13, w2 = stacked_of(written.weights, item)
    rng = np.random.default_rng(11)
    x = random_input(ROWS, spec.in_features, rng, dtype)
    routing = make_routing(ROWS, spec.moe.experts, 2, rng)
    found = run_experts(layer, x, routing, dtype, subject)
    wanted = expected.experts(x, w13, w2, routing, item.capability, dtype)
    assert_experts_right(pseudo_case(item, item.capability), found, wanted)


def pseudo_case(item: PlannedLayer, capability: Capability) -> Case:
    """A case that stands for a planned layer in messages."""
    spec = item.packed.spec
    return Case(capability, spec.scheme, spec.dtype, ROWS, spec.out_features, spec.in_features, variant=spec.name)


def loaded_input(item: PlannedLayer, dtype: str, slices: int = 1) -> Array:
    """An input that the executed quantization represents exactly, and so it does each of `slices` runs of columns."""
    assert item.capability is not None
    spec = item.packed.spec
    executed = executed_activation(item.capability, spec.scheme)
    rng = np.random.default_rng(7)
    held = spec.in_features // slices
    parts = [representable_input(executed, ROWS, held, rng) for _ in range(slices)]
    return as_dtype(np.concatenate(parts, axis=1), dtype)


def canonical_of(weights: Mapping[str, CanonicalWeight], module: str, item: PlannedLayer) -> CanonicalWeight:
    """What was written under a module's name, with the rules for activations that planning read from the file."""
    return replace(weights[module], scheme=item.packed.spec.scheme)


def stacked_of(weights: Mapping[str, CanonicalWeight], item: PlannedLayer) -> tuple[CanonicalWeight, CanonicalWeight]:
    """w13 and w2 of a layer of experts, stacked from what was written."""
    firsts = []
    for parts in item.packed.w13:
        gate, up = (canonical_of(weights, part.module.name, item) for part in parts)
        tensors = {
            role: array if role.startswith("input_") else np.concatenate([array, up.tensors[role]])
            for role, array in gate.tensors.items()
        }
        firsts.append(replace(gate, out_features=2 * gate.out_features, tensors=tensors))
    seconds = [canonical_of(weights, parts[0].module.name, item) for parts in item.packed.w2]
    return stack(firsts), stack(seconds)
