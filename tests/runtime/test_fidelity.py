"""Measuring loaded layers against the original."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from omniplat import oracle
from omniplat.canonical import Array
from omniplat.checkpoint.reader import ShardReader
from omniplat.errors import InvalidCheckpointError
from omniplat.layer import LayerSpec
from omniplat.packed import PackedLayer, Part
from omniplat.reference.kernels import DequantLinear, ExpertLoop
from omniplat.roworder import RowOrder
from omniplat.runtime.load import load_layer
from omniplat.scheme import Scheme
from omniplat.tools.fidelity import Distance, LayerFidelity, aggregate, measure
from tests.reference.build import Weights
from tests.runtime.checkpoints import Built, build
from tests.runtime.test_load import Memory, expert_layer


class Given:
    """Originals from a dictionary."""

    def __init__(self, weights: dict[str, Array]) -> None:
        self.weights = weights

    def weight(self, module: str) -> Array | None:
        return self.weights.get(module)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "source")


def packed_of(built: Built, *names: str, order: RowOrder | None = None) -> PackedLayer:
    modules = {module.name: module for module in built.parts[0].modules}
    parts = tuple(Part(modules[name], order or RowOrder()) for name in names)
    rows = tuple(part.module.out_features for part in parts)
    first = parts[0].module
    return PackedLayer(LayerSpec("l", "linear", sum(rows), first.in_features, first.scheme, parts=rows), parts)


def run(built: Built, packed: PackedLayer, weights: dict[str, Array]) -> LayerFidelity:
    reader = ShardReader(built.checkpoint.path)
    layer = load_layer(packed, DequantLinear(), reader)
    return measure(layer, packed, reader, Given(weights), rows=64)


def original(built: Built, name: str) -> Array:
    """What the checkpoint's weight stands for, smoothing folded in: an original without quantization error."""
    weight = built.weights[name]
    return (oracle.dequantize(weight) * weight.tensors.get("pre_scale", np.float32(1))).astype(np.float32)


@pytest.mark.parametrize("name", ["a.block", "b.smooth"])
def test_an_exact_original_has_no_distance(built: Built, name: str) -> None:
    found = run(built, packed_of(built, name), {name: original(built, name)})
    assert found.weight is not None
    assert found.output is not None
    assert found.weight.relative < 1e-7
    assert found.output.relative < 1e-6
    assert found.finite
    assert found.seconds > 0


def test_known_noise_is_found(built: Built) -> None:
    noisy = original(built, "a.block")
    noise = np.random.default_rng(0).standard_normal(noisy.shape).astype(np.float32)
    noisy = noisy + noise * (0.05 * np.linalg.norm(noisy) / np.linalg.norm(noise))
    found = run(built, packed_of(built, "a.block"), {"a.block": noisy})
    assert found.weight is not None
    assert found.output is not None
    assert found.weight.relative == pytest.approx(0.05, rel=0.02)
    assert found.output.relative == pytest.approx(0.05, rel=0.1)


def test_activation_quantization_shows_in_the_output_only(built: Built) -> None:
    found = run(built, packed_of(built, "b.mx"), {"b.mx": original(built, "b.mx")})
    assert found.weight is not None
    assert found.output is not None
    assert found.weight.relative < 1e-7
    assert 0.08 < found.output.relative < 0.2


def test_rows_of_the_original_are_ordered_too(built: Built) -> None:
    order = RowOrder("halves_swapped")
    found = run(built, packed_of(built, "b.smooth", order=order), {"b.smooth": original(built, "b.smooth")})
    assert found.output is not None
    assert found.output.relative < 1e-6


def test_without_an_original_only_time_is_measured(built: Built) -> None:
    found = run(built, packed_of(built, "b.mx"), {})
    assert found.weight is None
    assert found.output is None
    assert found.seconds > 0


def test_an_original_of_another_shape_is_refused(built: Built) -> None:
    with pytest.raises(InvalidCheckpointError, match=r"needed \[40, 64\]"):
        run(built, packed_of(built, "b.mx"), {"b.mx": np.zeros((40, 65), np.float32)})


def test_values_that_are_not_finite_are_said(built: Built) -> None:
    reader = ShardReader(built.checkpoint.path)
    packed = packed_of(built, "b.mx")
    layer = load_layer(packed, DequantLinear(), reader)
    assert measure(layer, packed, reader).finite
    layer.bias = torch.full((40,), torch.nan)
    assert not measure(layer, packed, reader).finite


@pytest.mark.parametrize("stacked", [False, True])
def test_experts(stacked: bool) -> None:
    memory = Memory()
    packed, weights = expert_layer(memory, Scheme.parse("mxfp4/a16"), stacked=stacked)
    layer = load_layer(packed, ExpertLoop(), memory)
    values = [[oracle.dequantize(w).astype(np.float32) for w in ws] for ws in weights]
    if stacked:
        names = {name: np.stack([v[i] for v in values]) for i, name in enumerate(("gate", "up", "down"))}
    else:
        names = {f"{e}.{n}": v[i] for e, v in enumerate(values) for i, n in enumerate(("gate", "up", "down"))}
    found = measure(layer, packed, memory, Given(names))
    assert found.weight is not None
    assert found.output is not None
    assert found.weight.relative < 1e-7
    assert found.output.relative < 1e-5
    wrong = {name: np.zeros_like(value) if "up" in name else value for name, value in names.items()}
    found = measure(layer, packed, memory, Given(wrong))
    assert found.output is not None
    assert found.output.relative > 0.9


def test_schemes_are_summed_by_squares() -> None:
    one = LayerFidelity("a", "s", "k", 1, 1.0, 10, True, Distance(1.0, 100.0), Distance(4.0, 100.0))
    two = replace(one, name="b", seconds=2.0, weight=Distance(3.0, 300.0), output=None)
    other = replace(one, name="c", scheme="t", weight=None, output=None)
    first, second = aggregate([one, two, other])
    assert (first.scheme, first.layers, first.compared, first.seconds, first.nbytes) == ("s", 2, 2, 3.0, 20)
    assert first.weight == Distance(4.0, 400.0)
    assert first.weight.relative == pytest.approx(0.1)
    assert first.output == Distance(4.0, 100.0)
    assert (second.scheme, second.compared, second.weight) == ("t", 0, None)


def test_the_same_seed_gives_the_same_figures(built: Built) -> None:
    made = {"b.mx": Weights(5).values(40, 64)}
    first, second = (run(built, packed_of(built, "b.mx"), made) for _ in range(2))
    assert (first.weight, first.output) == (second.weight, second.output)
