"""Properties of a mixture of experts, and of the ways in which experts are chosen, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat.canonical import Array, CanonicalWeight
from omniplat.errors import UsageError
from omniplat.layer import ACTIVATIONS, MoeSpec, Routing
from omniplat.oracle.moe import activate, experts, route
from omniplat.runtime.slicer import Rank, column_range, take_columns, take_rows, without_bias
from omniplat.scheme import Scheme
from tests.slicing.weights import concatenate, make, stack

E, K, INNER = 6, 64, 128
SCHEMES = (
    *("bf16/a16", "mxfp4/a16", "mxfp4/mxfp4", "mxfp8/mxfp8", "nvfp4/a16", "fp8-tensor/a16", "fp8-channel/fp8-token"),
    *("fp8-block32x32/a16", "int8-channel/int8-token", "int4-g32/a16", "uint4-g32/a16"),
)


class Layer:
    """Experts of a scheme as gate, up and down, and rows that have chosen some of them."""

    def __init__(self, scheme_id: str, rows: int, top: int, seed: int, activation: str = "silu") -> None:
        scheme, self.random = Scheme.parse(scheme_id), np.random.default_rng(seed)
        self.gates, self.ups = ([self.weight(scheme, INNER, K, 3 * e + i + seed) for e in range(E)] for i in (0, 1))
        self.downs = [self.weight(scheme, K, INNER, 3 * e + 2 + seed) for e in range(E)]
        limit, alpha = (7.0, 1.702) if activation == "swiglu-oai" else (0.0, 1.0)
        self.moe = MoeSpec(E, INNER, activation, limit=limit, alpha=alpha)
        self.x = self.random.standard_normal((rows, K))
        self.ids = (
            np.stack([self.random.permutation(E)[:top] for _ in range(rows)]) if rows else np.empty((0, top), int)
        )
        self.weights = self.random.random((rows, top))

    @staticmethod
    def weight(scheme: Scheme, rows: int, columns: int, seed: int) -> CanonicalWeight:
        weight = make(scheme, rows, columns, seed, extras=False)
        return replace(weight, tensors={**weight.tensors, "bias": np.random.default_rng(seed).normal(size=rows)})

    def run(self, order: list[int] | None = None, expert_map: Array | None = None, **given: Array) -> Array:
        order = list(range(E)) if order is None else order
        w13 = stack([concatenate(self.gates[e], self.ups[e]) for e in order])
        w2 = stack([self.downs[e] for e in order])
        ids, weights = given.get("ids", self.ids), given.get("weights", self.weights)
        return experts(self.x, ids, weights, w13, w2, self.moe, expert_map=expert_map)

    def part(self, tp: int, rank: int) -> Array:
        """What one of `tp` ranks computes: rows of gate and up, columns of down, the bias of down on the first."""
        held = column_range(INNER, Rank(rank, tp))
        w13 = stack([concatenate(*(take_rows(part[e], held) for part in (self.gates, self.ups))) for e in range(E)])
        downs = [take_columns(down, held) for down in self.downs]
        w2 = stack([down if rank == 0 else without_bias(down) for down in downs])
        return experts(self.x, self.ids, self.weights, w13, w2, self.moe)


def near(found: Array, expected: Array, bound: float = 1e-12) -> bool:
    return bool(np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected))


LAYERS = st.builds(
    Layer,
    st.sampled_from(SCHEMES),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 99),
    st.sampled_from(ACTIVATIONS),
)


@settings(max_examples=25, deadline=None)
@given(LAYERS, st.permutations(range(E)))
def test_permuting_experts_with_their_ids_changes_nothing(layer: Layer, order: list[int]) -> None:
    place = np.argsort(order)
    assert near(layer.run(list(order), ids=place[layer.ids]), layer.run())
    assert near(layer.run(list(order), expert_map=place), layer.run())


@settings(max_examples=25, deadline=None)
@given(LAYERS, st.integers(0, E - 1))
def test_an_expert_that_nobody_chose_contributes_nothing(layer: Layer, expert: int) -> None:
    ids = np.where(layer.ids == expert, -1, layer.ids)
    before = layer.run(ids=ids)
    down = layer.downs[expert]
    layer.downs[expert] = replace(down, tensors={**down.tensors, "bias": np.full(K, np.nan)})
    assert np.array_equal(layer.run(ids=ids), before)
    assert not np.isfinite(layer.run(ids=np.full_like(ids, expert))).any()


@settings(max_examples=25, deadline=None)
@given(LAYERS, st.randoms(use_true_random=False))
def test_the_order_of_the_chosen_does_not_matter(layer: Layer, random: object) -> None:
    slots = np.random.default_rng(0).permutation(layer.ids.shape[1])
    assert near(layer.run(ids=layer.ids[:, slots], weights=layer.weights[:, slots]), layer.run())


@settings(max_examples=25, deadline=None)
@given(LAYERS.filter(lambda layer: layer.gates[0].scheme.activation is None), st.sampled_from([2, 4]))
def test_tensor_parallel_parts_add_up(layer: Layer, tp: int) -> None:
    assert near(sum(layer.part(tp, rank) for rank in range(tp)), layer.run())


@settings(max_examples=25, deadline=None)
@given(LAYERS, st.sampled_from([2, 3]))
def test_expert_parallel_parts_add_up(layer: Layer, ep: int) -> None:
    whole, held = layer.run(), E // ep
    total = np.zeros_like(whole)
    for rank in range(ep):
        mine = list(range(rank * held, (rank + 1) * held))
        mapping = np.array([mine.index(e) if e in mine else -1 for e in range(E)])
        total += layer.run(mine, expert_map=mapping)
    assert near(total, whole)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("scheme_id", SCHEMES)
def test_no_row_and_one_row(scheme_id: str, rows: int) -> None:
    layer = Layer(scheme_id, rows, 2, 0)
    assert layer.run().shape == (rows, K)
    if rows:
        one = sum(layer.run(ids=layer.ids[:, [s]], weights=layer.weights[:, [s]]) for s in range(2))
        assert near(layer.run(), one)


def test_ids_out_of_range_are_refused() -> None:
    layer = Layer("bf16/a16", 1, 1, 0)
    for bad in (E, -2):
        with pytest.raises(UsageError, match="topk_ids"):
            layer.run(ids=np.array([[bad]]))


# --- activations -------------------------------------------------------------------------------------------------


def test_activations_at_known_points() -> None:
    gate, up = np.array([0.0, 1.0, -1.0, 9.0]), np.array([2.0, 3.0, 9.0, -9.0])
    logistic = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(activate(gate, up, MoeSpec(1, 1))[:2], [0, 3 * logistic])
    np.testing.assert_allclose(activate(gate, up, MoeSpec(1, 1, "gelu"))[1], 3 * 0.8413447460685429)
    np.testing.assert_allclose(activate(gate, up, MoeSpec(1, 1, "gelu_tanh"))[1], 3 * 0.841191990608276)
    np.testing.assert_allclose(activate(gate, up, MoeSpec(1, 1, "relu2")), [0, 3, 0, -729])
    ours = activate(gate, up, MoeSpec(1, 1, "swiglu-oai", limit=7.0, alpha=1.702))
    squashed = [g / (1 + np.exp(-1.702 * g)) for g in (0.0, 1.0, -1.0, 7.0)]
    np.testing.assert_allclose(ours, np.array(squashed) * np.array([3, 4, 8, -6]))
    clamped = activate(gate, up, MoeSpec(1, 1, "silu", limit=7.0))
    np.testing.assert_allclose(clamped[3], 7 / (1 + np.exp(-7.0)) * -7)
    with pytest.raises(UsageError, match="tanhish"):
        activate(gate, up, MoeSpec(1, 1, "tanhish"))


# --- routing -----------------------------------------------------------------------------------------------------

LOGITS = np.array([[0.0, 3.0, 1.0, 2.0, -1.0, 2.5, -2.0, 0.5]])


def test_softmax_with_and_without_renormalization() -> None:
    powers = np.exp(LOGITS[0])
    ids, weights = route(LOGITS, 2, Routing("softmax"))
    assert ids.tolist() == [[1, 5]]
    np.testing.assert_allclose(weights[0], powers[[1, 5]] / powers.sum())
    _, weights = route(LOGITS, 2, Routing("softmax", renormalize=True))
    np.testing.assert_allclose(weights[0], powers[[1, 5]] / powers[[1, 5]].sum())


def test_sigmoid_with_a_correction_that_only_chooses() -> None:
    scores = 1 / (1 + np.exp(-LOGITS[0]))
    bias = np.zeros(8)
    bias[6] = 5.0
    ids, weights = route(LOGITS, 2, Routing("sigmoid", correction_bias=True, scale=2.5), bias)
    assert ids.tolist() == [[6, 1]]
    np.testing.assert_allclose(weights[0], 2.5 * scores[[6, 1]])


def test_groups() -> None:
    # groups of two: [0, 3], [1, 2], [-1, 2.5], [-2, 0.5]; by their best the first and third win, by both the first two
    ids, _ = route(LOGITS, 2, Routing("sigmoid", groups=4, topk_groups=2, group_score="max"))
    assert sorted(ids[0].tolist()) == [1, 5]
    ids, _ = route(LOGITS, 2, Routing("sigmoid", groups=4, topk_groups=1, group_score="top2"))
    assert sorted(ids[0].tolist()) == [2, 3]
    ids, _ = route(LOGITS, 2, Routing("sigmoid", groups=4, topk_groups=1, group_score="max"))
    assert sorted(ids[0].tolist()) == [0, 1]


def test_equal_scores_choose_the_lower_id() -> None:
    assert route(np.zeros((1, 8)), 3, Routing("softmax"))[0].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("top_k", "routing", "match"),
    [
        (9, Routing("softmax"), "cannot choose 9"),
        (0, Routing("softmax"), "cannot choose 0"),
        (3, Routing("sigmoid", groups=4, topk_groups=1), "in 1 of 4 groups"),
        (1, Routing("sigmoid", groups=3), "do not form 3 groups"),
        (1, Routing(), "scoring ''"),
    ],
)
def test_what_cannot_be_chosen(top_k: int, routing: Routing, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        route(LOGITS, top_k, routing)
