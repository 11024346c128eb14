"""Mixture-of-experts layers whole: against the oracle, over ranks, in a graph, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo.testing

from omniplat.canonical import Array
from omniplat.checkpoint.reader import ShardReader
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.oracle import linear, moe
from omniplat.planner import Planned
from omniplat.reading import read_canonical
from omniplat.runtime.moe import QuantMoE, load_moe
from omniplat.runtime.slicer import WHOLE, Rank
from tests.oracle.test_moe import concatenate, stack
from tests.support.moe import FAMILIES, HIDDEN, NAME, TOP, E, planned, write

EVERY = pytest.mark.parametrize("family", list(FAMILIES))


def load(folder: Path, rank: Rank = WHOLE) -> QuantMoE:
    plan, item, reader = planned(folder)
    return load_moe(plan, item, reader, rank=rank)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


class Expected:
    """The layer in float64, from canonical weights."""

    def __init__(self, plan: Planned, reader: ShardReader) -> None:
        (item,) = [item for item in plan.layers if item.layer.op == "moe"]
        assert item.packed.spec.moe is not None
        self.moe = item.packed.spec.moe
        self.packed = item.packed
        self.reader = reader
        self.modules = {module.name: module for source in plan.resolutions for module in source.modules}

    def __call__(self, x: Array) -> Array:
        block, packed = self.packed.block, self.packed
        assert block is not None
        logits = linear(x, read_canonical(self.modules[block.router], self.reader))
        bias = self.reader.read(block.correction_bias) if block.correction_bias is not None else None
        ids, weights = moe.route(logits, self.moe.top_k, self.moe.routing, bias)
        stacks = []
        for groups in (packed.w13, packed.w2):
            found = []
            for expert in range(E):
                group = groups[0 if packed.stacked else expert]
                each = [
                    read_canonical(part.module, self.reader, part.row_order, expert if packed.stacked else None)
                    for part in group
                ]
                found.append(concatenate(*each) if len(each) == 2 else each[0])
            stacks.append(stack(found))
        y = moe.experts(x, ids, weights, *stacks, self.moe)
        if block.shared_down:
            gate, up, down = (
                read_canonical(self.modules[name], self.reader) for name in (*block.shared_up, block.shared_down)
            )
            beside = moe.gated(x, concatenate(gate, up), down, self.moe)
            if block.shared_gate:
                logits = linear(x, read_canonical(self.modules[block.shared_gate], self.reader))
                beside = beside / (1 + np.exp(-logits))
            y = y + beside
        return y


@EVERY
def test_a_layer_computes_what_the_oracle_says(family: str, tmp_path: Path) -> None:
    plan, item, reader = planned(write(tmp_path, family))
    layer = load_moe(plan, item, reader)
    assert layer.routes
    assert layer(rows(0)).shape == (0, HIDDEN)
    for count in (1, 9):
        x = rows(count)
        expected = Expected(plan, reader)(x.numpy())
        error = np.linalg.norm(layer(x).numpy() - expected)
        # Hidden values between two fp8 codes may be rounded either way.
        assert error <= (2e-6 if family != "deepseek" else 5e-3) * np.linalg.norm(expected)


@EVERY
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 1), (1, 2), (2, 2), (1, 8)])
def test_parts_of_ranks_add_up(family: str, tp: int, ep: int, tmp_path: Path) -> None:
    folder = write(tmp_path, family, seed=3)
    x = rows(7)
    whole = load(folder)(x)
    parts = [load(folder, Rank(t, tp, e, ep))(x) for t in range(tp) for e in range(ep)]
    assert float((torch.stack(parts).sum(0) - whole).norm() / whole.norm()) <= 1e-5
    assert all(float((part - whole).norm()) > 0.1 * float(whole.norm()) for part in parts)


@EVERY
def test_a_rank_holds_its_share(family: str, tmp_path: Path) -> None:
    folder = write(tmp_path, family)
    whole = load(folder)
    for rank in (Rank(1, 2), Rank(ep_rank=1, ep_size=2)):
        part = load(folder, rank)
        assert part.experts.nbytes <= whole.experts.nbytes / 2 + 4 * E * HIDDEN
        assert part.router is not None
        assert part.router.spec.out_features == E
    assert load(folder, Rank(ep_rank=1, ep_size=2)).shared is None
    assert (load(folder, Rank(ep_rank=0, ep_size=2)).shared is None) == (whole.shared is None)


@EVERY
def test_an_engine_may_bring_its_own_routing(family: str, tmp_path: Path) -> None:
    layer = load(write(tmp_path, family))
    x = rows(5)
    ids, weights = layer.route(x)
    assert ids.shape == (5, TOP)
    assert torch.equal(layer(x, ids, weights), layer(x))
    assert not torch.equal(layer(x, (ids + 1) % E, weights), layer(x))
    assert torch.equal(layer(x.view(1, 5, HIDDEN)), layer(x).view(1, 5, HIDDEN))


@EVERY
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_layer_compiles_as_one_graph_for_any_number_of_rows(family: str, backend: str, tmp_path: Path) -> None:
    layer = load(write(tmp_path, family))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(rows(2)), layer(rows(2)))
        graphs = counter.frame_count
        for count in (3, 17, 64):
            torch.testing.assert_close(compiled(rows(count, count)), layer(rows(count, count)), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == graphs


def test_casts_of_the_model_change_no_tensor_and_states_come_back(tmp_path: Path) -> None:
    layer = load(write(tmp_path, "deepseek"))
    x = rows(4)
    before = layer(x)
    assert torch.equal(layer.half()(x), before)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    other = load(write(tmp_path / "other", "deepseek", seed=9))
    assert not torch.equal(other(x), before)
    other.load_state_dict(state)
    assert torch.equal(other(x), before)


def test_bf16_rows_give_bf16(tmp_path: Path) -> None:
    layer = load(write(tmp_path, "qwen2"))
    x = rows(12).to(torch.bfloat16)
    y, exact = layer(x), layer(x.to(torch.float32))
    assert y.dtype == torch.bfloat16
    assert float((y.to(torch.float32) - exact).norm() / exact.norm()) < 6e-3


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [E, -2])
def test_ids_out_of_range_are_refused_before_the_kernel_runs(bad: int, tmp_path: Path) -> None:
    layer = load(write(tmp_path, "qwen2"))
    ids, weights = torch.tensor([[0, bad]]), torch.ones(1, 2)
    layer.experts.kernel.apply = None  # type: ignore[assignment,method-assign]
    with pytest.raises(UsageError, match="topk_ids holds ids outside"):
        layer(rows(1), ids, weights)


def test_ids_that_are_no_ids_are_refused(tmp_path: Path) -> None:
    layer = load(write(tmp_path, "qwen2"))
    with pytest.raises(UsageError, match=r"float32 \[1, 2\]"):
        layer(rows(1), torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(UsageError, match=r"topk_weights \[1, 3\]"):
        layer(rows(1), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 3))


def test_a_layer_without_a_router_needs_ids(tmp_path: Path) -> None:
    layer = load(write(tmp_path, "qwen2", drop=f"{NAME}.gate."))
    assert not layer.routes
    with pytest.raises(UsageError, match="bring topk_ids"):
        layer(rows(1))
    assert layer(rows(1), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)).shape == (1, HIDDEN)


def test_a_missing_expert_is_named_in_the_plan(tmp_path: Path) -> None:
    plan, item, _ = planned(write(tmp_path, "qwen2", drop=f"{NAME}.experts.5."))
    assert item.layer.status == "invalid"
    (found,) = [f for f in plan.plan.findings if f.code == "missing-tensor"]
    assert found.severity == "error"
    assert f"{NAME}.experts.5.gate_proj" in found.modules


def test_the_loader_names_a_missing_expert_too(tmp_path: Path) -> None:
    plan, item, reader = planned(write(tmp_path, "qwen2"))
    w2 = item.packed.w2
    broken = replace(item, packed=replace(item.packed, w2=(*w2[:5], (), *w2[6:])))
    with pytest.raises(InvalidCheckpointError, match="expert 5 is missing"):
        load_moe(plan, broken, reader)


def test_counts_that_differ_are_refused(tmp_path: Path) -> None:
    layer = load(write(tmp_path, "deepseek"))
    fewer = replace(layer.moe, experts=E - 1)
    with pytest.raises(InvalidCheckpointError, match=f"chooses among {E} experts, the layer has {E - 1}"):
        QuantMoE("m", fewer, layer.experts, layer.router)
    with pytest.raises(InvalidCheckpointError, match=f"correction of its scores is for {E} experts"):
        QuantMoE("m", fewer, layer.experts, correction_bias=layer.correction_bias)


def test_scales_that_are_not_finite_are_refused_while_loading(tmp_path: Path) -> None:
    plan, item, reader = planned(write(tmp_path, "deepseek"))

    class Poisoned:
        def read(self, info: object) -> Array:
            array = reader.read(info)  # type: ignore[arg-type]
            if "experts.6.up_proj.weight_scale_inv" in info.name:  # type: ignore[attr-defined]
                array = np.array(array)
                array[0, 0] = np.nan
            return array

    with pytest.raises(InvalidCheckpointError, match="scale not finite") as caught:
        load_moe(plan, item, Poisoned())
    assert caught.value.key == f"{NAME}.experts.6.up_proj"
