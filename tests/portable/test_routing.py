"""Triton's form of routing gives what the plain one does: the same order, to the last row, and the same tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat.portable.routing import sort_by_expert, sort_by_expert_torch
from omniplat.runtime.routing import local_ids
from tests.support.routing import tiles_of
from tests.support.triton import TRITON_DEVICE, needs_cuda, needs_triton

pytestmark = needs_triton
#: Rows, slots, experts: pairs of one program and of several, that count for themselves and that do not, and many.
SIZES = [(1, 1, 1), (1, 8, 64), (8, 8, 6), (13, 5, 7), (129, 2, 130), (300, 8, 300), (2053, 2, 3), (1, 4099, 65)]
IDS = {
    "any": lambda pairs, experts: torch.randint(-1, experts, (pairs,)),
    "of one": lambda pairs, experts: torch.full((pairs,), experts - 1),
    "of nobody": lambda pairs, experts: torch.full((pairs,), -1),
    "of every other": lambda pairs, experts: torch.randint(0, -(-experts // 2), (pairs,)) * 2,
}


def check(ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int, tokens: int) -> None:
    from omniplat.portable import routing_triton

    wanted = sort_by_expert_torch(ids, expert_map, experts)
    given_ids = ids.to(TRITON_DEVICE)
    given_map = None if expert_map is None else expert_map.to(TRITON_DEVICE)
    alone = routing_triton.sort_by_expert(given_ids, given_map, experts)
    order, tiles = routing_triton.sort_in_tiles(given_ids, given_map, experts, tokens)
    for found in (alone, order):
        for name in ("rows", "place", "ends"):
            torch.testing.assert_close(getattr(found, name).cpu(), getattr(wanted, name), rtol=0, atol=0)
    known = tiles_of(wanted, tokens)
    for name in ("rows", "expert", "first", "end"):
        torch.testing.assert_close(getattr(tiles, name).cpu(), getattr(known, name), rtol=0, atol=0)
    assert tiles.tokens == tokens
    # what is compared with is itself what tiles are to be: every row of an expert in one of them
    local = local_ids(ids, expert_map)
    covered = []
    for expert, first, end in zip(*(part.tolist() for part in (known.expert, known.first, known.end)), strict=True):
        assert end - first <= tokens
        assert all((local[row] == expert).any() for row in known.rows[first:end].tolist())
        covered += range(first, end)
    assert covered == list(range(int(wanted.ends[-1])))


@pytest.mark.parametrize(("rows", "slots", "experts"), SIZES)
@pytest.mark.parametrize("kind", IDS)
def test_any_sizes(kind: str, rows: int, slots: int, experts: int) -> None:
    torch.manual_seed(rows)
    ids = IDS[kind](rows * slots, experts).clamp(max=experts - 1).view(rows, slots)
    check(ids.to(torch.int32) if slots % 2 else ids, None, experts, 16)


@given(
    rows=st.integers(1, 40),
    slots=st.integers(1, 9),
    experts=st.integers(1, 70),
    tokens=st.sampled_from([1, 8, 16, 40, 128]),
    held=st.floats(0.1, 1.0),
    seed=st.integers(0, 9),
)
@settings(max_examples=25, deadline=None)
def test_experts_of_other_ranks(rows: int, slots: int, experts: int, tokens: int, held: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    here = torch.rand(experts, generator=generator) < held
    here[seed % experts] = True
    expert_map = torch.where(here, here.cumsum(0) - 1, -1).to(torch.int32)
    ids = torch.randint(-1, experts, (rows, slots), generator=generator)
    check(ids, expert_map, int(here.sum()), tokens)


def test_many_pairs_through_a_map() -> None:
    expert_map = torch.full((11,), -1, dtype=torch.int32)
    expert_map[::3] = torch.arange(4, dtype=torch.int32)
    check(torch.randint(-1, 11, (821, 3), generator=torch.Generator().manual_seed(0)), expert_map, 4, 32)


def test_ids_that_lie_apart_and_that_no_expert_has() -> None:
    """Numbers beyond the last expert are of nobody: nothing is read or written for them."""
    from omniplat.portable import routing_triton

    ids = torch.tensor([[2, 9, 0], [1, 9, 2**33], [0, 9, 1]], device=TRITON_DEVICE)[:, ::2]
    order = routing_triton.sort_by_expert(ids, None, 3)
    assert order.rows.tolist() == [0, 2, 1, 2, 0, 1]
    assert order.place.tolist() == [[4, 0], [2, 5], [1, 3]]
    assert order.ends.tolist() == [2, 4, 5]
    beyond = torch.tensor([0, -1, 1, -1], dtype=torch.int32, device=TRITON_DEVICE)[::2]
    assert routing_triton.sort_by_expert(ids, beyond, 2).ends.tolist() == [2, 4]


def test_where_nothing_is_launched_indices_are_still_indices() -> None:
    from omniplat.portable import routing_triton
    from omniplat.portable.launch import collected

    class Names(list[str]):
        def collect(self, launch: object, arguments: object) -> None:
            self.append(launch.name)  # type: ignore[attr-defined]

    for rows, kernels in ((4, ["_sort"]), (4096, ["_count", "_sort"])):
        names = Names()
        with collected(names):
            ids = torch.zeros(rows, 2, dtype=torch.int64, device=TRITON_DEVICE)
            order, tiles = routing_triton.sort_in_tiles(ids, None, 5, 16)
        assert names == kernels
        for part in (order.rows, order.place, order.ends, tiles.expert, tiles.first, tiles.end):
            assert not part.any()


@needs_cuda
@pytest.mark.parametrize("rows", [1, 4096])
def test_it_records(rows: int) -> None:
    ids = torch.randint(-1, 64, (rows, 8), device="cuda")
    sort_by_expert(ids, None, 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        order = sort_by_expert(ids, None, 64)
    ids.copy_(torch.randint(-1, 64, (rows, 8), device="cuda"))
    graph.replay()
    wanted = sort_by_expert_torch(ids, None, 64)
    assert all(torch.equal(getattr(order, name), getattr(wanted, name)) for name in ("rows", "place", "ends"))
