"""Gates that do not hold are found: planning that takes too much, loading that takes what planning refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from omniplat import api
from omniplat.capability import Capability
from omniplat.conformance.dialect import WRITABLE, declared_scheme, write_checkpoint
from omniplat.conformance.model import Sizes
from omniplat.conformance.points import Slice, undeclared_points
from omniplat.conformance.subject import Subject, find_subject
from omniplat.conformance.suite import test_undeclared as suite
from omniplat.device import Device
from omniplat.document import Plan
from omniplat.errors import BackendUnavailableError, UnsupportedCombinationError
from omniplat.planner import Planned
from omniplat.registry import BACKENDS, default_registry

PART = Slice(Device("cpu", "avx2"), "linear", "bf16")


@pytest.fixture
def subject() -> Subject:
    """A backend with two kernels: plans are quick, and most of the catalog is not declared."""
    found = find_subject("cpu")
    named = {item.name: item for item in found.spec.capabilities}
    return replace(found, spec=replace(found.spec, capabilities=(named["int8_linear"], named["low_rank_linear"])))


def examine(subject: Subject) -> None:
    suite.test_everything_else_is_refused(subject, suite.Named("avx2", None, PART), lambda name, value: None)


def test_gates_that_hold_pass(subject: Subject) -> None:
    examine(subject)


def _lets_pass(plan: Plan) -> None:
    """Loads what planning refused: whatever has no kernel is left out, and nobody is told."""


def _without_reasons(plan: Plan) -> None:
    raise UnsupportedCombinationError("cpu", "linear", "mxfp4/a16", [], [])


def _another_error(plan: Plan) -> None:
    raise ValueError("no")


def _after_a_tensor(plan: Plan) -> None:
    import torch

    torch.zeros(1)
    raise UnsupportedCombinationError("cpu", "linear", "mxfp4/a16", [], ["none"])


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        (_lets_pass, "before the refusal"),
        (_without_reasons, "names no reason"),
        (_another_error, "no"),
        (_after_a_tensor, "before the refusal"),
    ],
)
def test_a_broken_gate_of_loading_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, gate: Callable[[Plan], None], says: str
) -> None:
    monkeypatch.setattr(api, "require_runnable", gate)
    with pytest.raises((AssertionError, ValueError, BackendUnavailableError), match=says):
        examine(subject)


def test_every_point_is_loaded_by_itself(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that lets the last point pass is found: none hides behind another."""
    last = undeclared_points(subject.spec, PART)[-1].scheme.id
    real = api.load_layers

    def loads(planned: Planned) -> Iterator[Any]:
        if planned.layers[0].layer.name != last:
            yield from real(planned)

    monkeypatch.setattr(suite, "load_layers", loads)
    with pytest.raises(AssertionError, match=rf"{last} is not declared, and it loads"):
        examine(subject)


def test_a_plan_that_takes_too_much_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capabilities are read a second time by the suite: matching that takes what no pattern names contradicts it."""
    from omniplat import match

    real = match.matches
    monkeypatch.setattr(match, "matches", lambda patterns, text: text == "gguf-q4_0" or real(patterns, text))
    with pytest.raises(AssertionError, match=r"gguf-q4_0/.* is not declared, and .* accepts it"):
        examine(subject)


@pytest.mark.parametrize("pair", WRITABLE, ids="/".join)
def test_the_dialect_declares_what_is_written(pair: tuple[str, str], tmp_path: Any) -> None:
    """The rules for activations that the suite expects of a file are those that its reader finds."""
    scheme = declared_scheme(*pair)
    write_checkpoint(tmp_path / "c", scheme, Sizes(256, 256, head_dim=64))
    planned = api.make_planned(tmp_path / "c", "cpu", backend="cpu")
    assert {item.packed.spec.scheme.activation for item in planned.layers} == {scheme.activation}
    assert {item.packed.spec.scheme.weight_id for item in planned.layers} == {pair[0]}


def test_rules_are_matched() -> None:
    """For every capability: a rule that is listed is accepted, and any other one named with what is needed."""
    spec = default_registry().load(BACKENDS, "cpu")
    kernel = next(item for item in spec.capabilities if item.name == "dequant_linear")

    def run(item: Capability) -> None:
        case = suite.Named(item.name, item)
        suite.test_rules_for_activations(Subject(spec, Device("cpu", "avx2")), case)

    run(kernel)
    run(replace(kernel, scale_rules=("absmax", "floor")))
    run(replace(kernel, roundings=("half-away", "floor")))
    run(replace(kernel, scale_rules=("even", "ceil"), roundings=("nearest-even",)))
    run(replace(kernel, scale_rules=("even", "ceil"), roundings=("nearest-even",), substitutes=True))


def test_an_unlisted_rule_that_is_accepted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from omniplat import match

    spec = default_registry().load(BACKENDS, "cpu")
    kernel = next(item for item in spec.capabilities if item.name == "dequant_linear")
    monkeypatch.setattr(match, "unfollowed", lambda capability, declared: None)
    case = suite.Named("k", replace(kernel, scale_rules=("absmax",)))
    with pytest.raises(AssertionError, match="is accepted"):
        suite.test_rules_for_activations(Subject(spec, Device("cpu", "avx2")), case)
