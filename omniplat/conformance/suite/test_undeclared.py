"""Group undeclared: the catalog without what is declared is refused, at every place that could run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import pytest

from omniplat.capability import Accepted, Capability, Rejected
from omniplat.conformance.build import expert_layer, linear_layer
from omniplat.conformance.cases import Case, case_of, is_buildable, spread
from omniplat.conformance.catalog import (
    DTYPES,
    OPS,
    Point,
    activation_ids,
    archs_of,
    declared_activations,
    declared_weights,
    layer_spec,
    roomy_sizes,
    roomy_spec,
    scheme_of,
    weight_ids,
)
from omniplat.conformance.checkpoint import WRITABLE, Sizes, write_checkpoint
from omniplat.conformance.checks import Named, check
from omniplat.conformance.judge import expert_weights, make_weight
from omniplat.conformance.subject import Subject
from omniplat.device import Device
from omniplat.errors import UnsupportedCombinationError
from omniplat.match import Policy, match
from omniplat.scheme import UNQUANTIZED

Record = Callable[[str, object], None]


def _slices(subject: Subject, profile: str) -> Iterable[Named]:
    for (kind, arch), op, dtype in product(archs_of(subject.spec), OPS, DTYPES):
        yield Named(f"{kind}:{arch}-{op}-{dtype}", None, (Device(kind, arch), op, dtype))


@check("undeclared", _slices, runs=False)
def test_planning(subject: Subject, case: Named, record_property: Record) -> None:
    """Every point of the catalog: declared ones are accepted by a capability that declares them, all others are
    refused with a reason by every capability. Nothing is sampled."""
    device, op, dtype = case.value
    spec = subject.spec
    weights, activations = weight_ids(spec), activation_ids(spec)
    declared: dict[tuple[str, str], list[Capability]] = {}
    for capability in spec.capabilities:
        if capability.op == op and dtype in capability.dtypes and device.arch in (capability.archs or (device.arch,)):
            for pair in product(declared_weights(capability, weights), declared_activations(capability, activations)):
                declared.setdefault(pair, []).append(capability)
    generic = roomy_sizes(spec.capabilities[0]) if spec.capabilities else {}
    for weight, activation in product(weights, activations):
        scheme = scheme_of(weight, activation)
        owners = declared.get((weight, activation), [])
        for owner in owners:
            layer = roomy_spec(owner, Point(op, weight, activation, dtype))
            outcome = match(layer, spec.capabilities, device, Policy())
            assert outcome.chosen is not None, f"{scheme.id} is declared by {owner.name} and refused"
            own = next(item for item in outcome.candidates if item.capability is owner).decision
            assert isinstance(own, Accepted), f"{owner.name} declares {scheme.id} and {own}"
        if owners:
            continue
        layer = layer_spec(
            op,
            scheme,
            dtype,
            out_features=generic.get("out", 256),
            in_features=generic.get("in", 512),
            intermediate=generic.get("intermediate", 512),
            experts=generic.get("experts", 4),
        )
        outcome = match(layer, spec.capabilities, device, Policy())
        assert outcome.chosen is None, f"{scheme.id} is not declared and {outcome.chosen} accepts it"
        assert len(outcome.candidates) == len(spec.capabilities)
        for item in outcome.candidates:
            answer = item.decision
            assert isinstance(answer, Rejected)
            assert all((answer.rule, answer.needed, answer.found)), f"{item.capability.name}: no reason"
    record_property("points", len(weights) * len(activations))


def _near_misses(subject: Subject, profile: str) -> Iterable[Case]:
    """Schemes that no capability of the backend declares for the op, one step from what the kernel does."""
    spec = subject.spec
    weights = [w for w in weight_ids(spec) if is_buildable(w)]
    activations = [a for a in activation_ids(spec) if a != "int8-bnb"]
    declared = {
        (c.op, *pair)
        for c in spec.capabilities
        for pair in product(declared_weights(c, weights), declared_activations(c, activations))
    }
    for capability in spec.capabilities:
        own = declared_weights(capability, weights)[:1]
        acts = declared_activations(capability, activations)[:1]
        pairs = [(w, a) for w in weights for a in acts] + [(w, a) for w in own for a in activations]
        missing = [pair for pair in dict.fromkeys(pairs) if (capability.op, *pair) not in declared]
        for pair in spread(missing, 12) if profile == "quick" else missing:
            yield case_of(capability, scheme_of(*pair), rows=3, k=256, n=48)


@check("undeclared", _near_misses)
def test_kernels(subject: Subject, case: Case) -> None:
    """A kernel that is handed a scheme that its backend does not declare raises UnsupportedCombinationError.

    One that computes it declares less than it does; one that raises something else is not understood by callers.
    """
    try:
        if case.experts:
            w13, w2 = expert_weights(case)
            expert_layer(subject, case.capability, w13, w2, case.dtype)
        else:
            linear_layer(subject, case.capability, make_weight(case), case.dtype)
    except UnsupportedCombinationError:
        return
    except Exception as error:
        raise AssertionError(
            f"{case.capability.impl} raises {type(error).__name__} for {case.scheme.id}, "
            f"not UnsupportedCombinationError: {error}"
        ) from error
    raise AssertionError(f"{case.capability.impl} takes {case.scheme.id}, which no capability declares")


def _unwritten(subject: Subject, profile: str) -> Iterable[Named]:
    """Schemes that a file can hold and no capability declares, for linear layers and for experts."""
    spec = subject.spec
    for (weight, activation), op in product(WRITABLE, OPS):
        owners = [
            c
            for c in spec.capabilities
            if c.op == op
            and weight in declared_weights(c, (weight,))
            and activation in declared_activations(c, (activation,))
        ]
        if not owners:
            yield Named(f"{op}-{weight}/{activation}", None, (op, weight, activation))


@check("undeclared", _unwritten, runs=False)
def test_loading(subject: Subject, case: Named, tmp_path: Path) -> None:
    """Planning a checkpoint says `unsupported` with a reason per capability; loading it raises before any tensor."""
    from omniplat.api import make_planned
    from omniplat.conformance.untouched import nothing_is_read

    op, weight, activation = case.value
    folder = tmp_path / "checkpoint"
    sizes = Sizes(256, 256, head_dim=64, experts=2 if op == "moe" else 0)
    scheme = scheme_of(weight, activation)
    written = write_checkpoint(folder, scheme, sizes)
    others = [name for name in written.weights if (".experts." in name) != (op == "moe")]
    written = write_checkpoint(folder, scheme, sizes, exceptions=dict.fromkeys(others, UNQUANTIZED))
    planned = make_planned(folder, subject.device, backend=subject.spec.name)
    layers = [item.layer for item in planned.layers if item.layer.op == op]
    asked = [layer for layer in layers if layer.status != "unquantized"]
    assert asked
    for layer in asked:
        assert layer.status == "unsupported", f"{layer.name} ({layer.stored}) is {layer.status}"
        reasons = [trace for trace in layer.trace if trace.rejected]
        assert len(reasons) >= max(1, len(subject.spec.capabilities)), f"{layer.name}: {len(reasons)} reasons"
    with nothing_is_read():
        _assert_load_refuses(folder, subject)


def _assert_load_refuses(folder: Path, subject: Subject) -> None:
    from omniplat.api import load

    with pytest.raises(UnsupportedCombinationError) as caught:
        load(folder, subject.device, backend=subject.spec.name)
    assert caught.value.reasons, "the error names no reason"
