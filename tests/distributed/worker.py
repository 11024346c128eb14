"""One of several processes: loads its share, runs it, adds up with the others, and compares with the whole.

    python -m tests.distributed.worker '[["moe-tp", FOLDER], ...]' RANK SIZE FILE

Prints, for every case and folder, the relative L2 distance of the sum from what one process computes, and how much of
it is this rank's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from omniplat.api import make_planned
from omniplat.checkpoint.reader import ShardReader
from omniplat.runtime.kernel import load_kernel
from omniplat.runtime.load import load_layer
from omniplat.runtime.slicer import WHOLE, Rank
from tests.runtime.test_moe import load


def linear_pair(folder: Path, rank: Rank) -> nn.Module:
    """Column-parallel gate and up, row-parallel down; nothing is exchanged between the two."""
    planned = make_planned(folder, "cpu")
    reader = ShardReader(folder)
    layers = {
        item.layer.name.rpartition(".")[2]: load_layer(
            item.packed, load_kernel(str(item.capability.impl)), reader, rank=rank
        )
        for item in planned.layers
        if item.capability is not None
    }

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = layers["gate_up_proj"](x).chunk(2, dim=-1)
            y: torch.Tensor = layers["down_proj"](nn.functional.silu(gate) * up)
            return y

    return Pair()


CASES = {
    "pair-tp": (linear_pair, "tp"),
    "moe-tp": (load, "tp"),
    "moe-ep": (load, "ep"),
}


def main(jobs: list[tuple[str, str]], index: int, size: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=index, world_size=size)
    results = {}
    for case, folder in jobs:
        build, style = CASES[case]
        rank = Rank(tp_rank=index, tp_size=size) if style == "tp" else Rank(ep_rank=index, ep_size=size)
        x = torch.randn(6, 128, generator=torch.Generator().manual_seed(7))
        with torch.inference_mode():
            part, whole = build(Path(folder), rank)(x), build(Path(folder), WHOLE)(x)
            total = part.clone()
            dist.all_reduce(total)
        distance, share = float((total - whole).norm() / whole.norm()), float(part.norm() / whole.norm())
        results[f"{case} {Path(folder).name}"] = (distance, share)
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
