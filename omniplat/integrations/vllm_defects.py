"""What versions of vLLM are known to do wrong with layers that they accept: data, each line seen in that version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from omniplat.planner import PlannedLayer


@dataclass(frozen=True, slots=True)
class Defect:
    """Layers of this weight and one of these activations, by id, on devices of these kinds. `what` is what happens."""

    versions: str
    kinds: tuple[str, ...]
    weight: str
    activations: tuple[str, ...]
    what: str


DEFECTS = (
    Defect(
        "==0.30.*",
        ("cpu",),
        "fp8-tensor",
        ("fp8-tensor-static", "fp8-tensor"),
        "its CPU build lacks static_scaled_fp8_quant, the first forward pass raises RuntimeError",
    ),
)


def defect_of(layers: Iterable[PlannedLayer], kind: str, version: str) -> str:
    """The first layer that this vLLM accepts and does wrong, with what it does; "" where none is known."""
    known = [item for item in DEFECTS if kind in item.kinds and SpecifierSet(item.versions).contains(version, True)]
    for layer in layers:
        scheme = layer.packed.spec.scheme
        for item in known:
            if scheme.weight_id == item.weight and scheme.activation_id in item.activations:
                return f"{layer.layer.name}: {item.what}"
    return ""
