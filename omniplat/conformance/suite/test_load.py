"""Group load: from a checkpoint on disk to running layers, through the one load path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from omniplat.api import load, load_layers, make_planned
from omniplat.conformance.checks import Named, check
from omniplat.conformance.dialect import write_checkpoint
from omniplat.conformance.files import (
    assert_experts_loaded,
    assert_linear_right,
    held,
    plan_model,
    published,
    write_model,
)
from omniplat.conformance.model import Sizes
from omniplat.conformance.subject import Subject


def _linear(subject: Subject, profile: str) -> Iterable[Named]:
    return held(subject, "linear", profile)


def _moe(subject: Subject, profile: str) -> Iterable[Named]:
    return held(subject, "moe", profile)


@check("load", _linear)
def test_linear_layers(subject: Subject, case: Named, tmp_path: Path) -> None:
    """A dense model of every scheme: each layer is planned on the kernel, loads, and computes what was written."""
    written = write_model(tmp_path / "checkpoint", case)
    planned = plan_model(written, subject, case)
    assert planned.plan.ok, [item.message for item in planned.plan.findings]
    tested = 0
    for _, item, layer in load_layers(planned):
        assert item.layer.backend == subject.spec.name
        assert_linear_right(subject, item, layer, written)
        tested += 1
    assert tested == len(planned.layers), f"{tested} of {len(planned.layers)} layers were loaded"


@check("load", _moe)
def test_experts(subject: Subject, case: Named, tmp_path: Path) -> None:
    """A model with experts, attention in 16 bits."""
    written = write_model(tmp_path / "checkpoint", case, experts=3)
    planned = plan_model(written, subject, case)
    found = {item.layer.name: layer for _, item, layer in load_layers(planned)}
    for item in planned.layers:
        if item.layer.op == "moe":
            assert item.layer.status == "ok", f"{item.layer.name} is {item.layer.status}"
            assert_experts_loaded(subject, item, found[item.layer.name], written)


@check("load", published)
def test_a_published_dialect(subject: Subject, case: Named, tmp_path: Path) -> None:
    """Checkpoints as llm-compressor writes them, with its rules for activations, from the folder to the output."""
    written = write_checkpoint(tmp_path / "checkpoint", case.value, Sizes(256, 512, head_dim=64))
    planned = make_planned(written.folder, subject.device, backend=subject.spec.name)
    assert planned.plan.ok, [item.message for item in planned.plan.findings]
    layers = load(written.folder, subject.device, backend=subject.spec.name)
    assert set(layers) == {item.layer.name for item in planned.layers}
    for item in planned.layers:
        assert item.layer.backend == subject.spec.name
        assert_linear_right(subject, item, layers[item.layer.name], written)
