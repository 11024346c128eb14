"""Group undeclared: the catalog without what is declared is refused, at every place that could run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from omniplat.api import load, load_layers, make_planned
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
    roomy_spec,
    rule_variants,
    scheme_of,
    weight_ids,
)
from omniplat.conformance.checks import Named, check
from omniplat.conformance.dialect import WRITABLE, declared_scheme, write_checkpoint
from omniplat.conformance.judge import expert_weights, make_weight
from omniplat.conformance.model import Sizes, modules_of
from omniplat.conformance.points import Slice, declared_points, one_by_one, plan_points, undeclared_points
from omniplat.conformance.subject import Subject, equipped
from omniplat.conformance.untouched import nothing_is_read
from omniplat.errors import UnsupportedCombinationError
from omniplat.match import Policy, decide, match
from omniplat.planner import Planned
from omniplat.scheme import UNQUANTIZED, TensorQuant, parse_activation_id

Record = Callable[[str, object], None]


def _slices(subject: Subject, profile: str) -> Iterable[Named]:
    """Every architecture, op and dtype; quick: of the device's own architecture."""
    every = archs_of(subject.spec)
    own = [(kind, arch) for kind, arch in every if arch == subject.device.arch] if profile == "quick" else every
    for (kind, arch), op, dtype in product(own, OPS, DTYPES):
        yield Named(f"{kind}:{arch}-{op}-{dtype}", None, Slice(equipped(kind, arch), op, dtype))


@check("undeclared", _slices, runs=False)
def test_what_is_declared_is_planned(subject: Subject, case: Named, record_property: Record) -> None:
    """Every declared point of the catalog is accepted by each capability that declares it. Nothing is sampled."""
    found = case.value
    declared = declared_points(subject.spec, found)
    for point, owners in declared.items():
        for owner in owners:
            outcome = match(roomy_spec(owner, point), subject.spec.capabilities, found.device, Policy())
            assert outcome.chosen is not None, f"{point.scheme.id} is declared by {owner.name} and refused"
            own = next(item for item in outcome.candidates if item.capability is owner).decision
            assert isinstance(own, Accepted), f"{owner.name} declares {point.scheme.id} and {own}"
    record_property("declared_points", len(declared))


@check("undeclared", _slices, runs=False)
def test_everything_else_is_refused(subject: Subject, case: Named, record_property: Record) -> None:
    """Every other point is planned as `unsupported`, with a reason from every capability; and goes, by itself, through
    the function that loads plans: that raises UnsupportedCombinationError before anything is read or any tensor
    exists. Nothing is sampled."""
    planned = plan_points(subject.spec, case.value.device, undeclared_points(subject.spec, case.value))
    reasons = max(1, len(subject.spec.capabilities))
    for item in planned.layers:
        layer = item.layer
        assert layer.status == "unsupported", f"{layer.name} is not declared, and {layer.kernel} accepts it"
        rejected = [trace.rejected for trace in layer.trace if trace.rejected]
        assert len(rejected) >= reasons, f"{layer.name}: {len(rejected)} reasons of {reasons}"
        assert all(all(reason.values()) for reason in rejected), f"{layer.name}: a reason says nothing"
    with nothing_is_read():
        for alone in one_by_one(planned):
            _assert_loading_raises(alone)
    record_property("refused_points", len(planned.layers))


def _assert_loading_raises(planned: Planned) -> None:
    name = planned.layers[0].layer.name
    try:
        list(load_layers(planned))
    except UnsupportedCombinationError as error:
        reasons = error.reasons
    else:
        raise AssertionError(f"{name} is not declared, and it loads")
    assert reasons, f"{name}: the error names no reason"


def _variants(subject: Subject, profile: str) -> Iterable[Named]:
    for capability in subject.spec.capabilities:
        if capability.scale_rules or capability.roundings or capability.scale_format:
            yield Named(capability.name, capability)


@check("undeclared", _variants, runs=False)
def test_rules_for_activations(subject: Subject, case: Named) -> None:
    """A checkpoint whose rule for scales, or rounding, a capability does not list is refused for that reason; one
    whose rule it lists is accepted. A kernel that puts its own rule in the place of others is named in the answer."""
    item = case.capability
    assert item is not None
    device = equipped(subject.device.kind, next(iter(item.archs), subject.device.arch))
    weight = next(iter(declared_weights(item, weight_ids(subject.spec))))
    for activation in declared_activations(item, activation_ids(subject.spec)):
        for quant in rule_variants(parse_activation_id(activation)):
            if item.executes not in ("", activation):
                continue
            spec = roomy_spec(item, Point(item.op, weight, activation, item.dtypes[0]))
            answer = decide(item, replace(spec, scheme=spec.scheme.with_activation(quant)), device, Policy())
            differs = _differing(item, quant)
            name = f"{activation} with scales by {quant.scale_rule}, rounded {quant.rounding}"
            if differs and not item.substitutes:
                assert isinstance(answer, Rejected), f"{name} is accepted"
                assert answer.rule in differs, f"{name}: {answer}"
            else:
                assert isinstance(answer, Accepted), f"{name}: {answer}"
                assert bool(answer.instead) == bool(differs), f"{name}: the plan does not say what replaces it"


def _differing(item: Capability, quant: TensorQuant) -> list[str]:
    """Which of a checkpoint's rules the capability does not list."""
    own = {
        "scale rule": (item.scale_rules, quant.scale_rule),
        "rounding": (item.roundings, quant.rounding),
        "scale format": (tuple(filter(None, [item.scale_format])), quant.scale_format),
    }
    return [name for name, (listed, found) in own.items() if listed and found not in listed]


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
    """Schemes that a published dialect holds and no capability declares, for linear layers and for experts."""
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
            yield Named(f"{op}-{weight}/{activation}", None, (op, declared_scheme(weight, activation)))


@check("undeclared", _unwritten, runs=False)
def test_a_published_dialect(subject: Subject, case: Named, tmp_path: Path) -> None:
    """From a folder on: the plan says `unsupported` with a reason per capability, `load` raises before any tensor."""
    op, scheme = case.value
    folder = tmp_path / "checkpoint"
    sizes = Sizes(256, 256, head_dim=64, experts=2 if op == "moe" else 0)
    others = [name for name in modules_of(sizes) if (".experts." in name) != (op == "moe")]
    write_checkpoint(folder, scheme, sizes, exceptions=dict.fromkeys(others, UNQUANTIZED))
    planned = make_planned(folder, subject.device, backend=subject.spec.name)
    layers = [item.layer for item in planned.layers if item.layer.op == op]
    asked = [layer for layer in layers if layer.status != "unquantized"]
    assert asked
    for layer in asked:
        assert layer.status == "unsupported", f"{layer.name} ({layer.stored}) is {layer.status}"
        reasons = [trace for trace in layer.trace if trace.rejected]
        assert len(reasons) >= max(1, len(subject.spec.capabilities)), f"{layer.name}: {len(reasons)} reasons"
    with nothing_is_read(), pytest.raises(UnsupportedCombinationError) as caught:
        load(folder, subject.device, backend=subject.spec.name)
    assert caught.value.reasons, "the error names no reason"
