"""Layers that two ranks share over a process group, against one device and the oracle, by plans' own kernels.

What is exact: every output of a column-parallel layer, which is the same sum of the same codes on whichever rank, and
the sum of a row-parallel layer as far as its parts are numbers of bf16. Data that makes all sums representable has to
come out bit by bit. What is only close: a row-parallel rank rounds its part to bf16, and the sum is rounded again; and
where scales belong to tokens, each rank's part of a token has a scale of its own. The oracle quantizes each rank's
columns by themselves, and that is what ranks are held against; where scales belong to groups, nothing differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from omniplat.canonical import Array, CanonicalWeight
from omniplat.conformance import expected
from omniplat.conformance.expected import Expected, Routing, rounded
from omniplat.conformance.files import assert_module_right, canonical_of, stacked_of
from omniplat.conformance.model import Written
from omniplat.conformance.subject import find_subject
from omniplat.conformance.tolerances import Float64, excess, inside_window, noise_ratio, rounding
from omniplat.planner import PlannedLayer
from omniplat.runtime.slicer import Rank, column_range, take_columns, take_rows
from tests.distributed import shares
from tests.distributed.processes import run_ranks
from tests.distributed.shares import DOWN, EXACT, MIXTURES, RANDOM, RANKS, UP, Case

needs_one = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="no CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
PLACES = ("cpu", pytest.param("cuda", marks=needs_two), pytest.param("cuda-shared", marks=needs_one))
#: Distance from the oracle, beyond that of roundings to bf16, in units of its own quantization error: of values next to
#: the middle of two codes, in an input and in what lies between two products.
TIES, MIDDLE_TIES = 0.15, 0.6


@dataclass(frozen=True)
class Found:
    """Outputs of both ranks, and the checkpoints, plans and device that they come of."""

    device: str
    root: Path
    ranks: list[Mapping[str, Float64]]

    def of(self, case: Case, layer: str, kind: str) -> Shared:
        def get(what: str) -> list[Float64]:
            return [outputs[f"{case.name}|{layer}|{kind}|{what}"] for outputs in self.ranks]

        parts, (total, other) = get("part"), get("total")
        np.testing.assert_array_equal(total, other, err_msg="the ranks disagree")
        whole = self.whole(case, layer, "gaussian" if layer == "experts" else kind)
        for part in parts:
            assert 0.05 < np.linalg.norm(part) / np.linalg.norm(whole) < 0.999, "a rank has no share of its own"
        return Shared(parts, total, whole)

    def whole(self, case: Case, layer: str, kind: str) -> Float64:
        first, second = (outputs[f"{case.name}|{layer}|{kind}|whole"] for outputs in self.ranks)
        np.testing.assert_array_equal(first, second, err_msg="two devices compute two things")
        return first

    def case(self, case: Case) -> tuple[Written, dict[str, PlannedLayer]]:
        written = shares.write(case, self.root / "checkpoints")
        return written, shares.named(shares.plan(written, find_subject(self.device)))


@dataclass(frozen=True)
class Shared:
    """A layer's outputs: of each rank, of both together, and of one device that has everything."""

    parts: list[Float64]
    total: Float64
    whole: Float64

    @property
    def rounded_sum(self) -> Float64:
        """How far rounding parts and their sum to bf16 may lead."""
        return sum((rounding(part, "bf16") for part in self.parts), rounding(self.total, "bf16"))


@pytest.fixture(scope="module", params=PLACES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """One process group for all cases."""
    root = tmp_path_factory.mktemp("shares")
    run_ranks("tests.distributed.shares_worker", [str(root), request.param], root, RANKS, seconds=240)
    return Found(request.param.partition("-")[0], root, [np.load(root / f"{rank}.npz") for rank in range(RANKS)])


def each(cases: tuple[Case, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.scheme for case in cases])


def in_rows(total: Float64, item: PlannedLayer) -> Float64:
    """The output of a column-parallel layer in the order of its parts: `total` has one rank after the other."""
    if item.packed.split.style == "row":
        return total
    rows = [part.module.out_features // RANKS for part in item.packed.parts]
    cuts = np.split(total, np.cumsum(rows * RANKS)[:-1], axis=1)
    return np.concatenate([cuts[i + rank * len(rows)] for i in range(len(rows)) for rank in range(RANKS)], axis=1)


def modules(item: PlannedLayer, y: Float64) -> dict[str, Float64]:
    """Outputs of a layer's checkpoint modules."""
    ends = np.cumsum([part.module.out_features for part in item.packed.parts])
    return dict(zip([part.module.name for part in item.packed.parts], np.split(y, ends[:-1], axis=1), strict=True))


def share_of(weights: Mapping[str, CanonicalWeight], item: PlannedLayer, rank: int) -> dict[str, CanonicalWeight]:
    """A rank's columns of the modules that are split along K, and its rows of the others."""
    found = {}
    seconds = {part.module.name for group in item.packed.w2 for part in group}
    is_row = item.packed.split.style == "row"
    for module in item.packed.modules:
        weight = weights[module.name]
        along_columns = is_row or module.name in seconds
        held = column_range(weight.in_features if along_columns else weight.out_features, Rank(rank, RANKS))
        found[module.name] = take_columns(weight, held) if along_columns else take_rows(weight, held)
    return found


def together(parts: list[Expected], whole: Expected) -> Expected:
    """What the sum of ranks is, each of which quantizes for itself."""
    found = Expected(*(np.sum([getattr(part, name) for part in parts], axis=0) for name in Expected.__slots__))
    # without quantized activations the parts are the whole: the shares are cut right
    np.testing.assert_allclose(found.unquantized, whole.unquantized, rtol=0, atol=1e-10 * np.abs(whole.y).max())
    return found


def distance(one: Float64, other: Float64) -> float:
    return float(np.linalg.norm(one - other))


def assert_right(found: Float64, wanted: Expected, roundings: Float64, ties: float | None) -> None:
    """Within the bound; where activations are quantized (`ties`), by the oracle's error, and near it."""
    if ties is None:
        beyond = excess(found, wanted.y, wanted.allowed + roundings)
        assert beyond is None, str(beyond)
        return
    assert inside_window(noise_ratio(found, rounded(wanted.y, "bf16"), wanted.unquantized))
    own = distance(wanted.y, wanted.unquantized)
    assert distance(found, wanted.y) < ties * own + np.linalg.norm(roundings)


def assert_shared(outputs: Shared, shared: Expected, whole: Expected, roundings: Float64, ties: float | None) -> None:
    """Outputs of ranks against what the oracle says of ranks, and of one device against what it says of the whole."""
    assert_right(outputs.whole, whole, rounding(outputs.whole, "bf16"), ties)
    assert_right(outputs.total, shared, roundings, ties)
    if np.allclose(shared.y, whole.y, rtol=0, atol=1e-10 * np.abs(whole.y).max()):
        # everybody quantizes the same: nothing but roundings lies between ranks and one device
        limit = np.linalg.norm(roundings + rounding(outputs.whole, "bf16"))
        assert distance(outputs.total, outputs.whole) < limit
    else:
        assert distance(outputs.total, shared.y) < 0.75 * distance(outputs.total, whole.y)


@each(EXACT)
def test_exact_sums_are_the_whole_bit_by_bit(case: Case, found: Found) -> None:
    written, items = found.case(case)
    assert {item.packed.split.style for item in items.values()} == {"row", "column"}
    for name, item in items.items():
        outputs, x = found.of(case, name, "exact"), shares.exact_input(item)
        for module, y in modules(item, in_rows(outputs.total, item)).items():
            assert item.capability is not None
            wanted = expected.linear(x, canonical_of(written.weights, module, item), item.capability, "bf16").y
            np.testing.assert_array_equal(y, wanted)
        np.testing.assert_array_equal(in_rows(outputs.total, item), outputs.whole)


@each(RANDOM)
def test_inputs_that_every_rank_represents(case: Case, found: Found) -> None:
    """All codes of the weights, on inputs whose codes are the same for ranks and the whole: within the bound."""
    written, items = found.case(case)
    for name, item in items.items():
        outputs, x = found.of(case, name, "representable"), shares.inputs(case, item)["representable"]
        extra = outputs.rounded_sum if item.packed.split.style == "row" else 0.0
        for y, allowed in ((outputs.whole, 0.0), (in_rows(outputs.total, item), extra)):
            for module, rows in modules(item, y).items():
                assert_module_right(item, module, x, rows, written, allowed)


@each(RANDOM)
def test_ranks_quantize_what_they_hold(case: Case, found: Found) -> None:
    written, items = found.case(case)
    for name, item in items.items():
        outputs, x = found.of(case, name, "gaussian"), shares.gaussian(item)
        assert item.capability is not None
        total = in_rows(outputs.total, item)
        for module, y in modules(item, total).items():
            weight = canonical_of(written.weights, module, item)
            whole = shared = expected.linear(x, weight, item.capability, "bf16")
            roundings = rounding(y, "bf16")
            if item.packed.split.style == "row":
                held = [column_range(x.shape[1], Rank(rank, RANKS)) for rank in range(RANKS)]
                parts = [
                    expected.linear(x[:, own.start : own.stop], take_columns(weight, own), item.capability, "bf16")
                    for own in held
                ]
                shared, roundings = together(parts, whole), outputs.rounded_sum
            own = replace(outputs, total=y, whole=modules(item, outputs.whole)[module])
            assert_shared(own, shared, whole, roundings, TIES if shares.is_quantizing(item) else None)


def gated_mlp(items: Mapping[str, PlannedLayer]) -> PlannedLayer:
    """The dense MLP as a layer with one expert."""
    up, down = items[UP].packed, items[DOWN].packed
    return replace(items[UP], packed=replace(up, w13=(up.parts,), w2=(down.parts,), parts=()))


def judge_experts(
    outputs: Shared, x: Array, choice: Routing, item: PlannedLayer, written: Written, *, tensor_parallel: bool
) -> None:
    """Outputs of experts with what lies between their products rounded, or not, to bf16: either is right."""
    assert item.capability is not None
    held = [written.weights]
    if tensor_parallel:
        held = [share_of(written.weights, item, rank) for rank in range(RANKS)]
    ties, problems = MIDDLE_TIES if shares.is_quantizing(item) else None, []
    for rounds_middle in (False, True):

        def expect(weights: Mapping[str, CanonicalWeight], rounds: bool = rounds_middle) -> Expected:
            assert item.capability is not None
            stacks = stacked_of(weights, item)
            return expected.experts(x, *stacks, choice, item.capability, "bf16", rounds_middle=rounds)

        whole = expect(written.weights)
        shared = together([expect(weights) for weights in held], whole)
        try:
            assert_shared(outputs, shared, whole, outputs.rounded_sum, ties)
        except AssertionError as error:
            problems.append(str(error))
    assert len(problems) < 2, problems


@each(RANDOM)
def test_a_column_parallel_layer_feeds_a_row_parallel_one(case: Case, found: Found) -> None:
    written, items = found.case(case)
    outputs, item = found.of(case, "mlp", "gaussian"), gated_mlp(items)
    alone = Routing(np.zeros((shares.ROWS, 1), np.int32), np.ones((shares.ROWS, 1), np.float32))
    judge_experts(outputs, shares.gaussian(item), alone, item, written, tensor_parallel=True)


@pytest.mark.parametrize("style", ["tp", "ep"])
@each(MIXTURES)
def test_experts(case: Case, style: str, found: Found) -> None:
    """Half of every expert, or half of the experts."""
    written, items = found.case(case)
    (item,) = items.values()
    outputs = found.of(case, "experts", style)
    judge_experts(outputs, shares.gaussian(item), shares.routing(), item, written, tensor_parallel=style == "tp")
