"""Experts of the cpu backend against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omniplat.canonical import Array, CanonicalWeight
from omniplat.errors import UsageError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.oracle.moe import experts
from omniplat.reference.kernels import ExpertLoop
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme
from tests.reference.build import Weights

E, K, INNER, TOP = 5, 128, 64, 2
SCHEMES = (
    "bf16/a16",
    "mxfp4/a16",
    "mxfp8/mxfp8",
    "nvfp4/nvfp4",
    "int4-g32/a16",
    "fp8-block128x128/fp8-g128",
    "int8-channel/int8-token",
)


def stack(parts: list[CanonicalWeight]) -> CanonicalWeight:
    first = parts[0]
    tensors = {role: np.stack([part.tensors[role] for part in parts]) for role in first.tensors}
    return CanonicalWeight(first.scheme, first.out_features, first.in_features, tensors)


class Case:
    """A layer of experts, its per-expert weights, and routed rows."""

    def __init__(self, scheme_id: str, rows: int, seed: int = 0) -> None:
        made = Weights(seed)
        scheme = Scheme.parse(scheme_id)
        self.w13 = [made.canonical(scheme, 2 * INNER, K) for _ in range(E)]
        self.w2 = [made.canonical(scheme, K, INNER) for _ in range(E)]
        self.x = made.values(rows, K)
        self.ids = made.random.permuted(np.tile(np.arange(E), (rows, 1)), axis=1)[:, :TOP].copy()
        self.weights = made.random.random((rows, TOP)).astype(np.float32)
        spec = LayerSpec("experts", "moe", K, K, scheme, moe=MoeSpec(E, INNER))
        kernel = ExpertLoop()
        prepared = kernel.prepare(to_torch(stack(self.w13), experts=E), to_torch(stack(self.w2), experts=E), spec)
        self.layer = QuantExperts(spec, kernel, prepared)

    def run(self, ids: Array | None = None, expert_map: torch.Tensor | None = None) -> np.ndarray:
        used = torch.from_numpy(self.ids if ids is None else ids)
        return self.layer(torch.from_numpy(self.x), used, torch.from_numpy(self.weights), expert_map).double().numpy()

    def expected(self) -> np.ndarray:
        return experts(self.x, self.ids, self.weights, stack(self.w13), stack(self.w2), MoeSpec(E, INNER))


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("scheme_id", SCHEMES)
def test_experts_compute_what_the_oracle_says(scheme_id: str, rows: int) -> None:
    case = Case(scheme_id, rows)
    y, expected = case.run(), case.expected()
    # A float32 hidden value may round to the neighbouring code where activations are quantized.
    limit = 1e-6 if scheme_id.endswith("a16") else 2e-3
    assert np.linalg.norm(y - expected) <= limit * np.linalg.norm(expected)


def test_no_rows() -> None:
    assert Case("mxfp4/a16", 0).run().shape == (0, K)


def test_an_expert_map_selects_and_silences() -> None:
    case = Case("mxfp4/a16", 6)
    whole = case.run()
    mapping = torch.full((8,), -1, dtype=torch.int32)
    mapping[[7, 2, 5, 0, 1]] = torch.arange(5, dtype=torch.int32)
    renamed = np.array([7, 2, 5, 0, 1])[case.ids]
    np.testing.assert_array_equal(case.run(renamed, mapping), whole)
    half = [mapping.clone(), mapping.clone()]
    half[0][mapping >= 2] = -1
    half[1][mapping < 2] = -1
    np.testing.assert_allclose(case.run(renamed, half[0]) + case.run(renamed, half[1]), whole, rtol=1e-6, atol=1e-4)


def test_the_order_of_slots_does_not_matter() -> None:
    case = Case("mxfp8/a16", 4)
    whole = case.run()
    case.weights = np.ascontiguousarray(case.weights[:, ::-1])
    np.testing.assert_allclose(case.run(np.ascontiguousarray(case.ids[:, ::-1])), whole, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("bad", [E, -2])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    case = Case("mxfp4/a16", 2)
    case.ids[1, 0] = bad
    with pytest.raises(UsageError, match="topk_ids"):
        case.run()


def test_an_unknown_activation_is_refused() -> None:
    case = Case("mxfp4/a16", 1)
    case.layer.activation = "tanhish"
    with pytest.raises(UsageError, match="tanhish"):
        case.run()


@pytest.mark.parametrize(("scheme_id", "integers"), [("int8-channel/int8-token", True), ("int8-channel/a16", False)])
def test_integer_codes_on_both_sides_are_multiplied_as_such(scheme_id: str, integers: bool) -> None:
    assert [splits > 0 for splits in Case(scheme_id, 1).layer.config.splits] == [integers, integers]


@pytest.mark.parametrize("scheme_id", ["bf16/a16", "mxfp4/a16", "mxfp8/mxfp8", "int8-channel/int8-token"])
def test_bf16_rows_differ_by_their_rounding(scheme_id: str) -> None:
    case = Case(scheme_id, 16)
    exact = case.run()
    y = case.layer(
        torch.from_numpy(case.x).to(torch.bfloat16), torch.from_numpy(case.ids), torch.from_numpy(case.weights)
    )
    assert y.dtype == torch.bfloat16
    error = np.linalg.norm(y.double().numpy() - exact) / np.linalg.norm(exact)
    assert error <= (6e-3 if scheme_id != "mxfp8/mxfp8" else 3e-2)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2", "swiglu-oai"])
def test_activations_are_the_oracles(activation: str) -> None:
    made, moe = Weights(4), MoeSpec(E, INNER, activation, limit=2.0, alpha=1.3)
    scheme = Scheme.parse("bf16/a16")
    w13 = stack([made.canonical(scheme, 2 * INNER, K) for _ in range(E)])
    w2 = stack([made.canonical(scheme, K, INNER) for _ in range(E)])
    spec, kernel = LayerSpec("experts", "moe", K, K, scheme, moe=moe), ExpertLoop()
    layer = QuantExperts(spec, kernel, kernel.prepare(to_torch(w13, experts=E), to_torch(w2, experts=E), spec))
    x, ids, weights = made.values(4, K), made.random.integers(0, E, (4, TOP)), made.random.random((4, TOP))
    y = layer(torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(weights).float()).double().numpy()
    expected = experts(x, ids, weights, w13, w2, moe)
    assert np.linalg.norm(y - expected) <= 1e-6 * np.linalg.norm(expected)
