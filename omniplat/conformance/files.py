"""Layers that came from a file: which schemes to write for a backend, and loaded layers against what was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from torch import nn

from omniplat.canonical import Array, CanonicalWeight
from omniplat.capability import Capability
from omniplat.conformance import expected
from omniplat.conformance.build import make_routing, run_experts, run_linear
from omniplat.conformance.cases import Case, spread
from omniplat.conformance.catalog import declared_activations, declared_weights, scheme_of
from omniplat.conformance.checkpoint import WRITABLE, Written
from omniplat.conformance.checks import Named
from omniplat.conformance.expected import executed_activation
from omniplat.conformance.inputs import as_dtype, random_input, representable_input
from omniplat.conformance.judge import assert_experts_right
from omniplat.conformance.subject import Subject
from omniplat.conformance.tolerances import excess
from omniplat.conformance.weights import stack
from omniplat.planner import PlannedLayer
from omniplat.runtime.layers import QuantExperts, QuantLinear

#: Rows of the inputs of loaded layers.
ROWS = 6


def writable(subject: Subject, op: str, profile: str) -> Iterable[Named]:
    """A case for each capability of the op and each scheme that it declares and a file can hold.

    Of capabilities that declare the same scheme the one that planning prefers is named.
    """
    found = []
    for weight, activation in WRITABLE:
        owners = [
            capability
            for capability in subject.spec.capabilities
            if capability.op == op
            and declared_weights(capability, (weight,))
            and declared_activations(capability, (activation,))
            and "bf16" in capability.dtypes
            and all(_divides(rule.multiple_of) for rule in capability.shapes)
        ]
        runnable = [capability for capability in owners if subject.obstacle(capability) is None]
        if owners:
            owner = max(runnable or owners, key=lambda item: item.priority)
            found.append(Named(f"{op}-{weight}/{activation}", owner, scheme_of(weight, activation)))
    return spread(found, 3) if profile == "quick" else found


def _divides(multiple: int) -> bool:
    """The written model's sizes are multiples of 256."""
    return 256 % multiple == 0


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
    choices = expected.linear_by_rules(x, weight, item.capability, item.packed.spec.dtype)
    beyond = [excess(found, wanted.y, wanted.allowed + extra) for wanted in choices]
    assert None in beyond, f"{module} in {item.layer.name}: {beyond[0]}"


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
