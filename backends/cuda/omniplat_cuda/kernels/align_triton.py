"""Pairs of a row and an expert in tiles of one expert each, by one kernel, without asking the device for a number.
Imports triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch

#: Pairs that a program looks at in one step.
_CHUNK = 1024


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


@triton.jit
def _align(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    ids, ordered, tile_expert, numbers, place, pairs,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, FILL: tl.constexpr, CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:  # fmt: skip
    # a program for each expert, and one for the pairs of nobody
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for step in range(STEPS):
        at = step * CHUNK + tl.arange(0, CHUNK)
        expert = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32)
        counts += tl.histogram(tl.where(expert < 0, EXPERTS, expert), BINS)
    tiles = (counts + ROWS - 1) // ROWS
    before = tl.sum(tl.where(bins < own, tiles, 0))
    count = tl.sum(tl.where(bins == own, counts, 0))
    owned = tl.sum(tl.where(bins == own, tiles, 0))
    if own == EXPERTS:
        tl.store(numbers, before * ROWS)
        tl.store(numbers + 1, pairs)
    written = 0
    for step in range(STEPS):
        at = step * CHUNK + tl.arange(0, CHUNK)
        expert = tl.load(ids + at, mask=at < pairs, other=EXPERTS + 1).to(tl.int32)
        expert = tl.where(expert < 0, EXPERTS, expert)
        mine = expert == own
        found = expert < EXPERTS
        rank = written + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(ordered + before * ROWS + rank, at, mask=mine & found)
        tl.store(tile_expert + before + rank // ROWS, expert, mask=mine & found & (rank % ROWS == 0))
        tl.store(place + at, tl.where(found, at, pairs), mask=mine)
        written += tl.sum(mine.to(tl.int32))
    if own < EXPERTS:
        rest = count + tl.arange(0, FILL)
        tl.store(ordered + before * ROWS + rest, tl.zeros([FILL], dtype=tl.int32) + pairs, mask=rest < owned * ROWS)


@lru_cache(maxsize=1024)
def _align_of(experts: int, rows: int, chunk: int, steps: int) -> Launch:
    constants = {
        "EXPERTS": experts,
        "BINS": triton.next_power_of_2(experts + 1),
        "ROWS": rows,
        "FILL": triton.next_power_of_2(rows),
        "CHUNK": chunk,
        "STEPS": steps,
    }
    return Launch(_align, constants, num_warps=4)


def align(ids: torch.Tensor, experts: int, rows: int) -> Tiles:
    """`ids` int32 or int64 [M, T], numbers of experts or negative for none, in tiles of `rows` pairs."""
    ids = ids.contiguous()
    pairs = ids.numel()
    tiles = min(pairs, experts) + pairs // rows
    ordered = torch.empty(tiles * rows, dtype=torch.int32, device=ids.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    numbers = torch.empty(2, dtype=torch.int32, device=ids.device)
    place = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    chunk = min(_CHUNK, max(64, triton.next_power_of_2(pairs)))
    steps = triton.next_power_of_2(triton.cdiv(pairs, chunk))
    kernel = _align_of(experts, rows, chunk, steps)
    kernel((experts + 1, 1, 1), (ids, ordered, tile_expert, numbers, place), (pairs,))
    return Tiles((ordered, tile_expert, numbers[:1]), place, numbers[1:])
