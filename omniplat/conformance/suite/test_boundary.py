"""Group boundary: each shape rule, just inside and just outside; and sizes that no rule forbids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest

from omniplat.api import load_layers
from omniplat.capability import Rejected, ShapeRule
from omniplat.conformance.canonical_file import plan_canonical, write_canonical
from omniplat.conformance.cases import Case, case_of, representative, schemes_of
from omniplat.conformance.catalog import fitting
from omniplat.conformance.checks import Named, check
from omniplat.conformance.judge import expert_trial, linear_trial
from omniplat.conformance.model import Sizes, modules_of
from omniplat.conformance.subject import Subject
from omniplat.conformance.untouched import nothing_is_read
from omniplat.conformance.weights import columns_unit
from omniplat.errors import UnsupportedCombinationError
from omniplat.match import Policy, decide
from omniplat.scheme import UNQUANTIZED

#: Sizes around the tiles that kernels like: below one, one, one more, and far from any multiple.
_OUT = (1, 2, 15, 17, 33, 64, 65, 127, 129)
_IN = (1, 33, 65, 97, 129, 161, 260, 513)
_LARGEST = 1 << 22
#: Columns of a written layer at most.
_WIDEST = 4096


def _inside(subject: Subject, profile: str) -> Iterable[Case]:
    """The smallest legal size of every dimension that has a rule, the next one, and the largest."""
    for case in representative(subject):
        for dim in dict.fromkeys(rule.dim for rule in case.capability.shapes):
            # what experts put out is as wide as what they take in
            dims = ("in", "out") if case.experts and dim in ("in", "out") else (dim,)
            rules = [rule for rule in case.capability.shapes if rule.dim in dims]
            unit = columns_unit(case.scheme) if {"in", "intermediate"} & set(dims) else 1
            smallest = fitting(1, rules, unit)
            largest = max((rule.maximum for rule in rules), default=0)
            sizes = [smallest, fitting(smallest + 1, rules, unit)]
            sizes += [fitting(largest, rules, unit)] if largest else []
            for size in dict.fromkeys(sizes):
                sized = _with(case, dim, size, "inside")
                if sized.n * sized.k <= _LARGEST and sized.inner * sized.k * max(sized.experts, 1) <= _LARGEST:
                    yield sized


def _outside(subject: Subject, profile: str) -> Iterable[Named]:
    """For every rule the nearest sizes that it forbids."""
    for case in representative(subject):
        for index, rule in enumerate(case.capability.shapes):
            for size in outside(rule):
                name = f"{case.capability.name}-{rule.dim}-{index}-{size}"
                yield Named(name, case.capability, (_with(case, rule.dim, size, "outside"), rule))


def outside(rule: ShapeRule) -> tuple[int, ...]:
    """Sizes just outside a rule."""
    start = max(rule.minimum, rule.multiple_of, 1)
    sizes = []
    if rule.multiple_of > 1:
        inside = -(-start // rule.multiple_of) * rule.multiple_of
        sizes += [inside + 1, inside + rule.multiple_of - 1]
        sizes += [inside + rule.multiple_of // 2]
    if rule.minimum > 1:
        sizes.append(rule.minimum - 1)
    if rule.maximum:
        sizes.append(rule.maximum + 1)
    return tuple(dict.fromkeys(size for size in sizes if size > 0 and not rule.accepts(size)))


def _with(case: Case, dim: str, size: int, variant: str) -> Case:
    if dim == "in":
        return replace(case, k=size, n=size if case.experts else case.n, variant=variant)
    if dim == "out":
        return replace(case, n=size, k=size if case.experts else case.k, variant=variant)
    return (
        replace(case, inner=size, variant=variant)
        if dim == "intermediate"
        else replace(case, experts=size, variant=variant)
    )


def _free(subject: Subject, profile: str) -> Iterable[Case]:
    """Sizes around tiles, rounded to what the rules and the scheme allow: what no rule forbids has to work."""
    seconds = [
        case_of(capability, scheme, bias=capability.bias)
        for capability in subject.spec.capabilities
        for scheme in (schemes_of(subject, capability, profile)[1:] if profile == "full" else ())
        if scheme.weight.granularity in ("group", "block")
    ]
    for case in representative(subject):
        for n in _OUT if not case.experts else ():
            yield case_of(case.capability, case.scheme, n=n, bias=case.bias, variant="n")
        for k in _IN if not case.experts else _IN[1::3]:
            yield case_of(case.capability, case.scheme, k=k, bias=case.bias, variant="k")
        for inner in _IN[1::3] if case.experts else ():
            yield case_of(case.capability, case.scheme, inner=inner, bias=case.bias, variant="i")
    for case in seconds[:: max(1, len(seconds) // 24)]:
        for k in (_IN[2], _IN[5]) if not case.experts else ():
            yield case_of(case.capability, case.scheme, n=_OUT[3], k=k, bias=case.bias, variant="k")


@check("boundary", _inside)
def test_just_inside(subject: Subject, case: Case) -> None:
    assert not subject.decide(case.capability, case.spec), f"{case.id} is legal and refused"
    _assert_right(subject, case)


@check("boundary", _outside, runs=False)
def test_just_outside(subject: Subject, case: Named) -> None:
    """The capability refuses the size and says which dimension, what it needs and what it found."""
    layer, rule = case.value
    device = subject.device
    if case.capability is not None and case.capability.archs and device.arch not in case.capability.archs:
        device = replace(device, arch=case.capability.archs[0])
    answer = decide(layer.capability, layer.spec, replace(device, described=True), Policy())
    assert isinstance(answer, Rejected), f"{case.id}: {rule.needed} is needed and {layer.id} accepted"
    assert answer.needed
    assert answer.found.isdigit(), f"the reason is about {answer.rule}, not about a size"


@check("boundary", _free)
def test_sizes_around_tiles(subject: Subject, case: Case) -> None:
    assert not subject.decide(case.capability, case.spec), f"{case.id} is legal and refused"
    _assert_right(subject, case)


def _assert_right(subject: Subject, case: Case) -> None:
    if case.experts:
        trial = expert_trial(subject, case)
        trial.assert_right(trial.input(), trial.routing())
    else:
        linear = linear_trial(subject, case)
        linear.assert_within_bound(linear.input())


def _files(subject: Subject, profile: str) -> Iterable[Named]:
    """For each capability with a rule on a linear layer's K, a size just outside that its scheme can have."""
    for capability in subject.spec.capabilities:
        if capability.op != "linear":
            continue
        for scheme in schemes_of(subject, capability, "quick"):
            unit = lcm(columns_unit(scheme), 8)
            sizes = [s for rule in capability.shapes if rule.dim == "in" for s in outside(rule) if s % unit == 0]
            if sizes and sizes[0] <= _WIDEST:
                yield Named(f"{capability.name}-{scheme.id}-in-{sizes[0]}", capability, (scheme, sizes[0]))
                break


@check("boundary", _files, runs=False)
def test_a_file_outside_is_refused(subject: Subject, case: Named, tmp_path: Path) -> None:
    """From a checkpoint on: no layer of the size is planned on the capability, and loading raises before any tensor."""
    assert case.capability is not None
    scheme, size = case.value
    sizes = Sizes(size, 256, head_dim=64)
    keep = [name for name, (_, columns) in modules_of(sizes).items() if columns != size]
    written = write_canonical(tmp_path / "checkpoint", scheme, sizes, exceptions=dict.fromkeys(keep, UNQUANTIZED))
    planned = plan_canonical(written, subject, case.capability)
    statuses = {item.layer.status for item in planned.layers} - {"unquantized"}
    assert statuses == {"unsupported"}, f"layers outside are {statuses}"
    with nothing_is_read(), pytest.raises(UnsupportedCombinationError):
        list(load_layers(planned))
