"""Choosing experts in torch: what the oracle chooses, in one graph for any number of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat.errors import UsageError
from omniplat.layer import Routing
from omniplat.oracle import moe
from omniplat.runtime.checks import checked_ids
from omniplat.runtime.routing import route

E = 16
ROUTINGS = st.builds(
    Routing,
    st.sampled_from(["softmax", "sigmoid"]),
    st.sampled_from([1, 4]),
    st.just(1),
    st.sampled_from(["max", "top2"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 2.5]),
)


@settings(max_examples=100, deadline=None)
@given(ROUTINGS, st.integers(1, 4), st.integers(0, 6), st.integers(0, 1000))
def test_routing_is_the_oracles(routing: Routing, top_k: int, rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.standard_normal((rows, E)).astype(np.float32)
    bias = random.standard_normal(E).astype(np.float32) if routing.correction_bias else None
    ids, weights = route(torch.from_numpy(logits), top_k, routing, torch.from_numpy(bias) if bias is not None else None)
    expected_ids, expected = moe.route(logits, top_k, routing, bias)
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    np.testing.assert_array_equal(ids.numpy(), expected_ids)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5)


def test_low_precision_logits_are_scored_in_float32() -> None:
    logits = torch.randn(3, E, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    _, weights = route(logits, 2, Routing("softmax"))
    assert torch.equal(weights, route(logits.to(torch.float32), 2, Routing("softmax"))[1])


def test_routing_traces_as_one_graph_for_any_number_of_rows() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    routing = Routing("sigmoid", 4, 2, "top2", True, True, 2.5)

    def choose(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = route(logits, 3, routing, bias)
        return checked_ids(ids, E), weights

    compiled = torch.compile(choose, fullgraph=True, dynamic=True, backend=counter)
    for rows in (2, 5, 33):
        logits, bias = torch.randn(rows, E), torch.randn(E)
        for found, expected in zip(compiled(logits, bias), choose(logits, bias), strict=True):
            torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("top_k", "routing", "match"),
    [
        (E + 1, Routing("softmax"), f"cannot choose {E + 1}"),
        (5, Routing("sigmoid", groups=4), "in 1 of 4 groups"),
        (1, Routing("sigmoid", groups=3), "of 3 groups"),
        (1, Routing(), "bring topk_ids"),
    ],
)
def test_what_cannot_be_chosen(top_k: int, routing: Routing, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        route(torch.zeros(1, E), top_k, routing)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_checked_ids_are_a_copy(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, -1], [3, 2]], dtype=dtype)
    found = checked_ids(ids, 4)
    assert torch.equal(found, ids)
    assert found.dtype == dtype
    assert found.data_ptr() != ids.data_ptr()
    assert checked_ids(ids[:0], 4).shape == (0, 2)
    torch.library.opcheck(torch.ops.omniplat.checked_ids.default, (ids, 4))


@pytest.mark.parametrize("bad", [4, -2])
def test_ids_out_of_range_are_refused_in_a_graph_too(bad: int) -> None:
    ids = torch.tensor([[0, bad]])
    compiled = torch.compile(lambda ids: checked_ids(ids, 4) + 1, fullgraph=True, backend="aot_eager")
    for run in (lambda: checked_ids(ids, 4), lambda: compiled(ids)):
        with pytest.raises(UsageError, match=r"topk_ids holds ids outside -1\.\.3"):
            run()


def test_the_check_that_other_devices_run() -> None:
    from omniplat.runtime.checks import _on_device

    assert torch.equal(_on_device(torch.tensor([[1, -1]]), 2), torch.tensor([[1, -1]]))
    with pytest.raises(RuntimeError, match=r"topk_ids holds ids outside -1\.\.1"):
        _on_device(torch.tensor([[2]]), 2)
