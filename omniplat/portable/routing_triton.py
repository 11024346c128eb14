"""The Triton form of `sort_by_expert`, and tiles of what it sorted: one kernel, or two for many pairs. Imports triton.

A program places a chunk of the pairs: where an expert's begin follows from how many pairs each expert has and how many
of those lie in chunks before. Every program counts that itself, as long as there are few chunks; else a kernel before
it does, once for each chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from omniplat.portable.launch import Launch, is_collecting
from omniplat.portable.routing import Sorted
from omniplat.portable.weight_only_triton import ExpertTiles

#: Pairs of a program, each of which is compared with each: more of many pairs, so that there are fewer counts. As
#: measured on an H200, like the next; see docs/performance.md.
_CHUNK, _LARGE_CHUNK, _MANY = 64, 256, 4096
#: Programs count for themselves up to so many chunks.
_MOST_CHUNKS = 8
#: Counts that a program adds up in one step.
_COUNTS = 4096
#: Tiles that a program describes.
TILES = 32


@triton.jit
def experts_of(  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    ids, expert_map, at, pairs, known, EXPERTS: tl.constexpr, MAPPED: tl.constexpr
):
    """Expert of pairs `at`: EXPERTS for those that no expert here runs, EXPERTS + 1 where there is no pair.

    The expert_map has `known` experts.
    """
    there = at < pairs
    expert = tl.load(ids + at, mask=there, other=-1)
    if MAPPED:
        expert = tl.load(expert_map + expert, mask=(expert >= 0) & (expert < known), other=-1)
    expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS).to(tl.int32)
    return tl.where(there, expert, EXPERTS + 1)


@triton.jit
def counted(  # type: ignore[no-untyped-def]
    ids, expert_map, counts, own, pairs, known, chunks,
    EXPERTS: tl.constexpr, MAPPED: tl.constexpr, COUNTED: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Pairs of each expert [BINS], then of nobody; and how many of each lie in chunks before `own`."""
    total = tl.zeros([BINS], dtype=tl.int32)
    before = tl.zeros([BINS], dtype=tl.int32)
    if COUNTED:
        for first in range(0, chunks, STEP):
            chunk = first + tl.arange(0, STEP)[:, None]
            found = tl.load(counts + chunk * BINS + tl.arange(0, BINS)[None, :], mask=chunk < chunks, other=0)
            total += tl.sum(found, 0)
            before += tl.sum(tl.where(chunk < own, found, 0), 0)
    else:
        for chunk in range(chunks):
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            found = tl.histogram(experts_of(ids, expert_map, at, pairs, known, EXPERTS, MAPPED), BINS)
            total += found
            before += tl.where(chunk < own, found, 0)
    return total, before


@triton.jit
def rank_of(expert, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of a chunk's pairs [CHUNK] that have the same expert lie before each."""
    pair = tl.arange(0, CHUNK)
    earlier = (expert[None, :] == expert[:, None]) & (pair[None, :] < pair[:, None])
    return tl.sum(earlier.to(tl.int32), 1)


@triton.jit
def tiles_of_experts(total, tokens, EXPERTS: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each expert [BINS], the number of tiles of at most `tokens` of its pairs, and where they end."""
    held = tl.where(tl.arange(0, BINS) < EXPERTS, (total + tokens - 1) // tokens, 0)
    return held, tl.cumsum(held, 0)


@triton.jit
def expert_of_tile(tile, behind, EXPERTS: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Expert of each `tile`, EXPERTS behind the last; tiles of an expert end at `behind` [BINS]."""
    passed = (behind[None, :] <= tile[:, None]) & (tl.arange(0, BINS)[None, :] < EXPERTS)
    return tl.sum(passed.to(tl.int32), 1)


@triton.jit(do_not_specialize=["pairs", "known"])
def _count(  # type: ignore[no-untyped-def]
    ids, expert_map, counts, pairs, known,
    EXPERTS: tl.constexpr, MAPPED: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    chunk = tl.program_id(0)
    expert = experts_of(ids, expert_map, chunk * CHUNK + tl.arange(0, CHUNK), pairs, known, EXPERTS, MAPPED)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["pairs", "known", "chunks", "slots", "tokens", "tiles"])
def _sort(  # type: ignore[no-untyped-def]
    ids, expert_map, counts, rows, place, ends, tile_expert, tile_first, tile_end,
    pairs, known, chunks, slots, tokens, tiles,
    EXPERTS: tl.constexpr, MAPPED: tl.constexpr, COUNTED: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, TILES: tl.constexpr,
) -> None:  # fmt: skip
    own = tl.program_id(0)
    total, before = counted(
        ids, expert_map, counts, own, pairs, known, chunks, EXPERTS, MAPPED, COUNTED, BINS, CHUNK, STEP
    )
    end = tl.cumsum(total, 0)
    start = end - total
    if own == 0:
        bins = tl.arange(0, BINS)
        tl.store(ends + bins, end, mask=bins < EXPERTS)
    if own < chunks:
        at = own * CHUNK + tl.arange(0, CHUNK)
        expert = experts_of(ids, expert_map, at, pairs, known, EXPERTS, MAPPED)
        to = tl.gather(start + before, expert, 0) + rank_of(expert, CHUNK)
        tl.store(rows + to, at // slots, mask=at < pairs)
        tl.store(place + at, to, mask=at < pairs)
    if TILES > 0:
        tile = own * TILES + tl.arange(0, TILES)
        held, behind = tiles_of_experts(total, tokens, EXPERTS, BINS)
        found = expert_of_tile(tile, behind, EXPERTS, BINS)
        expert = tl.minimum(found, EXPERTS - 1)
        first = tl.gather(start, expert, 0) + (tile - tl.gather(behind - held, expert, 0)) * tokens
        last = tl.minimum(tl.gather(end, expert, 0), first + tokens)
        tl.store(tile_expert + tile, expert, mask=tile < tiles)
        tl.store(tile_first + tile, first, mask=tile < tiles)
        tl.store(tile_end + tile, tl.where(found < EXPERTS, last, first), mask=tile < tiles)


@dataclass(frozen=True, slots=True)
class Counted:
    """Pairs that a kernel is to place in `chunks` of its programs.

    `ids`, `expert_map` and `counts` are tensors it takes and `numbers` the pairs, the experts of the map and the
    chunks; `constants` are those of `counted`, and `warps` those of a program.
    """

    ids: torch.Tensor
    expert_map: torch.Tensor | None
    counts: torch.Tensor | None
    experts: int
    chunks: int
    numbers: tuple[int, int, int]
    constants: tuple[tuple[str, int], ...]
    warps: int


@lru_cache(maxsize=1024)
def _count_of(experts: int, mapped: bool, bins: int, chunk: int) -> Launch:
    constants = {"EXPERTS": experts, "MAPPED": mapped, "BINS": bins, "CHUNK": chunk}
    return Launch(_count, constants, num_warps=4)


@lru_cache(maxsize=1024)
def _sort_of(constants: tuple[tuple[str, int], ...], warps: int, tiles: int) -> Launch:
    return Launch(_sort, {**dict(constants), "TILES": tiles}, num_warps=warps)


def count(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> Counted:
    """What kernels that place the pairs of `topk_ids` need: counts of chunks, where there are many."""
    ids = topk_ids.contiguous()
    pairs = ids.numel()
    known = 0
    if expert_map is not None:
        expert_map, known = expert_map.contiguous(), len(expert_map)
    bins = triton.next_power_of_2(experts + 2)
    chunk = _CHUNK if pairs <= _MANY else _LARGE_CHUNK
    chunks = -(-pairs // chunk)
    counts = None
    if chunks > _MOST_CHUNKS:
        counts = torch.empty((chunks, bins), dtype=torch.int32, device=ids.device)
        kernel = _count_of(experts, expert_map is not None, bins, chunk)
        kernel((chunks, 1, 1), (ids, expert_map, counts), (pairs, known))
    constants = {
        "EXPERTS": experts,
        "MAPPED": expert_map is not None,
        "COUNTED": counts is not None,
        "BINS": bins,
        "CHUNK": chunk,
        "STEP": max(1, _COUNTS // bins),
    }
    numbers = (pairs, known, chunks)
    warps = 8 if counts is None else 4
    return Counted(ids, expert_map, counts, experts, chunks, numbers, tuple(constants.items()), warps)


def sort_by_expert(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> Sorted:
    """See `omniplat.portable.routing.sort_by_expert`."""
    return _sorted(count(topk_ids, expert_map, experts), topk_ids.shape, 0)[0]


def sort_in_tiles(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int, tokens: int
) -> tuple[Sorted, ExpertTiles]:
    """The same and tiles of at most `tokens` rows, none with rows of two experts: as many as could be needed, the rest
    empty."""
    order, parts = _sorted(count(topk_ids, expert_map, experts), topk_ids.shape, tokens)
    expert, first, end = parts
    return order, ExpertTiles(order.rows, expert, first, end, tokens)


def _sorted(found: Counted, shape: torch.Size, tokens: int) -> tuple[Sorted, list[torch.Tensor]]:
    """With `tokens`, also expert, first and end of tiles."""
    device, pairs = found.ids.device, found.ids.numel()
    # where nothing is launched, what takes these for indices finds one
    empty = torch.zeros if is_collecting() else torch.empty
    rows = empty(pairs, dtype=torch.int64, device=device)
    place = empty(shape, dtype=torch.int64, device=device)
    ends = empty(found.experts, dtype=torch.int32, device=device)
    tiles = min(pairs, found.experts) + pairs // tokens if tokens else 0
    parts = [empty(tiles, dtype=torch.int32, device=device) for _ in range(3)] if tokens else []
    kernel = _sort_of(found.constants, found.warps, TILES if tokens else 0)
    kernel(
        (max(found.chunks, -(-tiles // TILES)), 1, 1),
        (found.ids, found.expert_map, found.counts, rows, place, ends, *(parts or (None,) * 3)),
        (*found.numbers, shape[1], tokens, tiles),
    )
    return Sorted(rows, place, ends), parts
