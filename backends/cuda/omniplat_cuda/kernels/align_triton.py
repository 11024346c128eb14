"""Pairs of a row and an expert in tiles of one expert each, by one kernel, without asking the device for a number.
Imports triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch
from omniplat.portable.routing_triton import (
    TILES,
    count,
    counted,
    expert_of_tile,
    experts_of,
    rank_of,
    tiles_of_experts,
)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pair p is slot p % T of row p / T.

    `routing`   what humming's indexed products take: int32 ids of pairs, tile by tile, filled up with the number of
                pairs; int32 expert of each tile; int32 [1] the number of ids. Behind that all hold anything.
    `place`     int32 [M, T]: the pair, or the number of pairs where no expert here runs it.
    `pairs`     int32 [1]: the number of pairs.
    """

    routing: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    place: torch.Tensor
    pairs: torch.Tensor


@triton.jit(do_not_specialize=["pairs", "known", "chunks", "tiles"])
def _align(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    ids, expert_map, counts, ordered, tile_expert, numbers, place,
    pairs, known, chunks, tiles,
    EXPERTS: tl.constexpr, MAPPED: tl.constexpr, COUNTED: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, FILL: tl.constexpr,
) -> None:  # fmt: skip
    own = tl.program_id(0)
    total, before = counted(
        ids, expert_map, counts, own, pairs, known, chunks, EXPERTS, MAPPED, COUNTED, BINS, CHUNK, STEP
    )
    held, behind = tiles_of_experts(total, ROWS, EXPERTS, BINS)
    first_tile = behind - held
    if own == 0:
        tl.store(numbers, tl.sum(held, 0) * ROWS)
        tl.store(numbers + 1, pairs)
    if own < chunks:
        at = own * CHUNK + tl.arange(0, CHUNK)
        expert = experts_of(ids, expert_map, at, pairs, known, EXPERTS, MAPPED)
        to = tl.gather(first_tile * ROWS + before, expert, 0) + rank_of(expert, CHUNK)
        tl.store(ordered + to, at, mask=expert < EXPERTS)
        tl.store(place + at, tl.where(expert < EXPERTS, at, pairs), mask=at < pairs)
    tile = own * TILES + tl.arange(0, TILES)
    expert = expert_of_tile(tile, behind, EXPERTS, BINS)
    found = (expert < EXPERTS) & (tile < tiles)
    tl.store(tile_expert + tile, expert, mask=found)
    # what the last tile of an expert has no pairs for
    left = tl.gather(total, expert, 0) - (tile - tl.gather(first_tile, expert, 0)) * ROWS
    row = tl.arange(0, FILL)[None, :]
    free = found[:, None] & (row >= left[:, None]) & (row < ROWS)
    tl.store(ordered + tile[:, None] * ROWS + row, tl.zeros([TILES, FILL], dtype=tl.int32) + pairs, mask=free)


@lru_cache(maxsize=1024)
def _align_of(constants: tuple[tuple[str, int], ...], warps: int, rows: int) -> Launch:
    own = {"TILES": TILES, "ROWS": rows, "FILL": triton.next_power_of_2(rows)}
    return Launch(_align, {**dict(constants), **own}, num_warps=warps)


def align(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int, rows: int) -> Tiles:
    """`topk_ids` int32 or int64 [M, T], -1 for no expert, through `expert_map`, in tiles of `rows` pairs."""
    found = count(topk_ids, expert_map, experts)
    device, pairs = found.ids.device, found.ids.numel()
    tiles = min(pairs, experts) + pairs // rows
    ordered = torch.empty(tiles * rows, dtype=torch.int32, device=device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=device)
    numbers = torch.empty(2, dtype=torch.int32, device=device)
    place = torch.empty(topk_ids.shape, dtype=torch.int32, device=device)
    kernel = _align_of(found.constants, found.warps, rows)
    kernel(
        (max(found.chunks, -(-tiles // TILES)), 1, 1),
        (found.ids, found.expert_map, found.counts, ordered, tile_expert, numbers, place),
        (*found.numbers, tiles),
    )
    return Tiles((ordered, tile_expert, numbers[:1]), place, numbers[1:])
