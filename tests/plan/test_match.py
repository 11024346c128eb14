"""Holding layers against capabilities: every rule refuses by name, and the choice follows the stated order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omniplat.capability import Accepted, Capability, Rejected, ShapeRule, compare_activation
from omniplat.device import Device, parse_device
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.match import Policy, decide, match
from omniplat.scheme import Scheme

DEVICE = parse_device("cuda:sm90")
SPEC = LayerSpec("m", "linear", 256, 512, Scheme.parse("mxfp8/mxfp8"))
CAP = Capability("k", "linear", ("mxfp8",), ("mxfp8",), archs=("sm90", "sm100"))
POLICY = Policy()


def test_what_fits_is_accepted_as_declared() -> None:
    assert decide(CAP, SPEC, DEVICE, POLICY) == Accepted("mxfp8/mxfp8")


@pytest.mark.parametrize(
    ("change", "spec", "rule"),
    [
        ({"op": "moe"}, SPEC, "op"),
        ({"weights": ("int4-g*",)}, SPEC, "weight"),
        ({"activations": ("a16",)}, SPEC, "activation"),
        ({"archs": ("sm100",)}, SPEC, "arch"),
        ({"dtypes": ("f16",)}, SPEC, "dtype"),
        ({"bias": False}, replace(SPEC, bias=True), "bias"),
        ({"shapes": (ShapeRule("in", multiple_of=1024),)}, SPEC, "in"),
        ({"shapes": (ShapeRule("out", maximum=255),)}, SPEC, "out"),
        ({"shapes": (ShapeRule("in", minimum=513),)}, SPEC, "in"),
    ],
)
def test_every_rule_refuses_by_name(change: dict, spec: LayerSpec, rule: str) -> None:
    answer = decide(replace(CAP, **change), spec, DEVICE, POLICY)
    assert isinstance(answer, Rejected)
    assert answer.rule == rule
    assert answer.needed
    assert answer.found


@pytest.mark.parametrize(("multiple", "size", "fits"), [(128, 512, True), (128, 511, False), (128, 513, False)])
def test_a_shape_rule_at_its_edge(multiple: int, size: int, fits: bool) -> None:
    cap = replace(CAP, shapes=(ShapeRule("in", multiple_of=multiple),))
    assert isinstance(decide(cap, replace(SPEC, in_features=size), DEVICE, POLICY), Accepted) == fits


def test_w2_of_experts_is_asked_about_too() -> None:
    cap = replace(CAP, op="moe")
    moe = MoeSpec(4, 64, w2_scheme=Scheme.parse("mxfp4/mxfp4"))
    answer = decide(cap, replace(SPEC, op="moe", moe=moe), DEVICE, POLICY)
    assert isinstance(answer, Rejected)
    assert answer.found == "mxfp4"


def test_a_described_device_has_what_its_extra_asks_for_and_a_detected_one_what_is_installed() -> None:
    cap = replace(CAP, requires=("no-such-distribution>=1",))
    assert isinstance(decide(cap, SPEC, DEVICE, POLICY), Accepted)
    here = Device("cuda", "sm90", described=False)
    answer = decide(cap, SPEC, here, POLICY)
    assert isinstance(answer, Rejected)
    assert (answer.rule, answer.found) == ("distribution", "not installed")


@pytest.mark.parametrize(
    ("declared", "executed", "relation"),
    [
        ("mxfp8", "mxfp8", "same"),
        ("mxfp8", "fp8-token", "regrouped"),
        ("mxfp4", "mxfp8", "upgraded"),
        ("nvfp4", "fp8-token", "upgraded"),
        ("mxfp4", "nvfp4", "regrouped"),
        ("int4-token", "int8-token", "upgraded"),
        ("fp8-tensor-static", "a16", "weight-only"),
        ("mxfp8", "mxfp4", "changed"),
        ("mxfp8", "int8-token", "changed"),
        ("int8-token", "fp8-token", "changed"),
        ("a16", "mxfp8", "changed"),
    ],
)
def test_the_partial_order_of_activations(declared: str, executed: str, relation: str) -> None:
    assert compare_activation(declared, executed) == relation


@pytest.mark.parametrize(("executes", "accepted"), [("fp8-token", True), ("a16", True), ("mxfp4", False)])
def test_a_lower_activation_needs_leave(executes: str, accepted: bool) -> None:
    cap = replace(CAP, executes=executes)
    assert isinstance(decide(cap, SPEC, DEVICE, POLICY), Accepted) == accepted
    assert isinstance(decide(cap, SPEC, DEVICE, Policy(frozenset({"activation-change"}))), Accepted)


def test_priority_then_name_decide() -> None:
    caps = [replace(CAP, name="b", priority=5), replace(CAP, name="a", priority=5), replace(CAP, name="c")]
    chosen = match(SPEC, caps, DEVICE, POLICY).chosen
    assert chosen is not None
    assert chosen.capability.name == "a"


@pytest.mark.parametrize("prefer", ["memory", "speed"])
def test_what_can_be_loaded_comes_before_what_can_only_be_planned(prefer: str) -> None:
    caps = [replace(CAP, name="planned", priority=9), replace(CAP, name="loads", impl="m:K", resident=2.0)]
    chosen = match(SPEC, caps, DEVICE, Policy(prefer=prefer)).chosen
    assert chosen is not None
    assert chosen.capability.name == "loads"


def test_memory_comes_before_priority_unless_speed_is_preferred() -> None:
    caps = [CAP, replace(CAP, name="large", priority=9, resident=2.0)]
    by_memory = match(SPEC, caps, DEVICE, POLICY)
    assert by_memory.chosen is not None
    assert by_memory.faster is not None
    assert (by_memory.chosen.capability.name, by_memory.faster.capability.name) == ("k", "large")
    by_speed = match(SPEC, caps, DEVICE, Policy(prefer="speed"))
    assert by_speed.chosen is not None
    assert by_speed.chosen.capability.name == "large"
    assert by_speed.faster is None


def test_what_depends_on_values_names_what_does_not() -> None:
    caps = [replace(CAP, name="moved", priority=9, via="fp8-channel", executes="fp8-token"), CAP]
    found = match(SPEC, caps, DEVICE, POLICY)
    assert found.chosen is not None
    assert found.alternative is not None
    assert (found.chosen.capability.name, found.alternative.capability.name) == ("moved", "k")
    assert match(SPEC, caps[1:], DEVICE, POLICY).alternative is None


def test_nobody_accepts() -> None:
    found = match(SPEC, [replace(CAP, archs=("sm75",))], DEVICE, POLICY)
    assert found.chosen is None
    assert len(found.candidates) == 1
