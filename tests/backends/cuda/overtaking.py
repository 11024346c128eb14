"""What a product makes of operands that the kernel right ahead of it on the stream is still writing. Imports triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from omniplat.portable.rows_triton import release_next


@triton.jit
def _slow_copies(x, x_copy, x_count, scale, scale_copy, scale_count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for all, which lets the next kernel start before it copies anything."""
    release_next(True)
    at = tl.arange(0, BLOCK)
    for start in range(0, x_count, BLOCK):
        inside = start + at < x_count
        tl.store(x_copy + start + at, tl.load(x + start + at, mask=inside), mask=inside)
    for start in range(0, scale_count, BLOCK):
        inside = start + at < scale_count
        tl.store(scale_copy + start + at, tl.load(scale + start + at, mask=inside), mask=inside)


def overtaking(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, x_scale: torch.Tensor
) -> list[torch.Tensor]:
    """`product` of slow copies of both, which were zeros before: of two eager calls and of a graph."""
    late, late_scale = torch.empty_like(x), torch.empty_like(x_scale)

    def run() -> torch.Tensor:
        late.zero_()
        late_scale.zero_()
        _slow_copies[(1,)](x, late, x.numel(), x_scale, late_scale, x_scale.numel(), BLOCK=512)
        return product(late, late_scale)

    # compiling is slower than the copies: only the second call comes in time to be too early
    eager = [run(), run()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    graph.replay()
    torch.cuda.synchronize()
    return [*eager, replayed]
