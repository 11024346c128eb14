"""Group load: from a checkpoint on disk to running layers, through the one load path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from omniplat.conformance.checkpoint import Sizes, write_checkpoint
from omniplat.conformance.checks import Named, check
from omniplat.conformance.files import assert_experts_loaded, assert_linear_right, writable
from omniplat.conformance.subject import Subject
from omniplat.scheme import UNQUANTIZED


def _linear(subject: Subject, profile: str) -> Iterable[Named]:
    return writable(subject, "linear", profile)


def _moe(subject: Subject, profile: str) -> Iterable[Named]:
    return writable(subject, "moe", profile)


@check("load", _linear)
def test_linear_layers(subject: Subject, case: Named, tmp_path: Path) -> None:
    """A dense model: every layer is planned on this backend, loads, and computes what was written."""
    from omniplat.api import load, make_planned

    written = write_checkpoint(tmp_path / "checkpoint", case.value, Sizes(256, 512, head_dim=64))
    planned = make_planned(written.folder, subject.device, backend=subject.spec.name)
    assert planned.plan.ok, [item.message for item in planned.plan.findings]
    layers = load(written.folder, subject.device, backend=subject.spec.name)
    assert set(layers) == {item.layer.name for item in planned.layers}
    for item in planned.layers:
        assert item.layer.backend == subject.spec.name
        assert item.layer.status == "ok"
        assert_linear_right(subject, item, layers[item.layer.name], written)


@check("load", _moe)
def test_experts(subject: Subject, case: Named, tmp_path: Path) -> None:
    """A model with experts, attention in 16 bits."""
    from omniplat.api import load, make_planned
    from omniplat.conformance.checkpoint import modules_of

    sizes = Sizes(256, 256, head_dim=64, experts=3)
    dense = [name for name in modules_of(sizes) if ".experts." not in name]
    written = write_checkpoint(tmp_path / "checkpoint", case.value, sizes, exceptions=dict.fromkeys(dense, UNQUANTIZED))
    planned = make_planned(written.folder, subject.device, backend=subject.spec.name)
    layers = load(written.folder, subject.device, backend=subject.spec.name)
    found = [item for item in planned.layers if item.layer.op == "moe"]
    assert found
    for item in found:
        assert item.layer.status == "ok", f"{item.layer.name} is {item.layer.status}"
        assert_experts_loaded(subject, item, layers[item.layer.name], written)
