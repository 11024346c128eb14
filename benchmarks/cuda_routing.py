"""Device time of sorting the pairs of tokens and experts, with and without tiles, from CUDA graphs.

    python benchmarks/cuda_routing.py [--pairs 8 64 256 1024 4096 32768] [--experts 64] [--slots 8] [--rounds 5]

`plain` is torch's form of the sort, `sorted` the kernel's, `tiles` the kernel's with the tiles that `portable_moe`
takes. Routing is random; times are medians of the rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from cuda_linear import graph_of, replayed

from omniplat.portable.experts_triton import tokens_of
from omniplat.portable.routing import sort_by_expert_torch
from omniplat.portable.routing_triton import sort_by_expert, sort_in_tiles

#: Calls in one graph, so that starting it weighs nothing.
CALLS = 10


def time_of(run: Callable[[], object], rounds: int) -> float:
    """Microseconds per call, the median of the rounds."""
    graph = graph_of(lambda _: run(), CALLS)
    replayed(graph, CALLS, 3)
    return median(replayed(graph, CALLS, 5) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[8, 64, 256, 1024, 4096, 32768])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"device={torch.cuda.get_device_name()} torch={torch.__version__}")
    print("| pairs | plain us | sorted us | tiles us |")
    print("|---|---|---|---|", flush=True)
    experts, slots = arguments.experts, arguments.slots
    for pairs in arguments.pairs:
        ids = torch.rand(-(-pairs // slots), experts, device="cuda").topk(slots, 1).indices.to(torch.int32)
        tokens = tokens_of(ids.numel(), experts, ids.device)
        runs = (
            lambda ids=ids: sort_by_expert_torch(ids, None, experts),
            lambda ids=ids: sort_by_expert(ids, None, experts),
            lambda ids=ids, tokens=tokens: sort_in_tiles(ids, None, experts, tokens),
        )
        with torch.inference_mode():
            times = [time_of(run, arguments.rounds) for run in runs]
        print(f"| {ids.numel()} | " + " | ".join(f"{us:.1f}" for us in times) + " |", flush=True)


if __name__ == "__main__":
    main()
