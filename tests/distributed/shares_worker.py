"""One of two ranks: loads its share of every case's layers, runs them and the whole ones, and writes what came out.

    python -m tests.distributed.shares_worker ROOT DEVICE RANK SIZE FILE

DEVICE is cpu (the cpu backend's kernels, gloo), cuda (one GPU for each rank, NCCL) or cuda-shared (one GPU for all of
them, which NCCL refuses: gloo). Outputs are in ROOT/RANK.npz, as `case|layer|input|what`: `part` of this rank, `total`
of all of them, `whole` of one device. Rows of a column-parallel layer's total are those of one rank after the other's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from omniplat.canonical import Array
from omniplat.checkpoint.reader import ShardReader
from omniplat.conformance.build import routing_tensors, to_input, to_output
from omniplat.conformance.subject import Subject, find_subject
from omniplat.planner import PlannedLayer
from omniplat.runtime.kernel import load_kernel
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.load import load_layer
from omniplat.runtime.moe import expert_map_of
from omniplat.runtime.slicer import WHOLE, Rank, column_range
from tests.distributed.shares import CASES, DOWN, UP, Case, gaussian, inputs, named, plan, routing, write

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "cuda-shared": "gloo"}
Outputs = Iterator[tuple[str, torch.Tensor]]


def summed(part: torch.Tensor) -> torch.Tensor:
    total = part.clone()
    dist.all_reduce(total)
    return total


def side_by_side(part: torch.Tensor, size: int) -> torch.Tensor:
    pieces = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(pieces, part)
    return torch.cat(pieces, dim=1)


class Ranks:
    """This rank's and the whole layers of one checkpoint."""

    def __init__(self, case: Case, root: Path, subject: Subject, index: int, size: int) -> None:
        written = write(case, root)
        self.case, self.subject, self.index, self.size = case, subject, index, size
        self.items = named(plan(written, subject))
        self.reader = ShardReader(written.folder)

    def load(self, item: PlannedLayer, rank: Rank) -> QuantLinear | QuantExperts:
        return load_layer(item.packed, load_kernel(item.impl), self.reader, rank=rank, device=self.subject.torch_device)

    def tensor(self, x: Array) -> torch.Tensor:
        return to_input(x, "bf16", self.subject)

    def linears(self) -> Outputs:
        rank = Rank(tp_rank=self.index, tp_size=self.size)
        layers = {name: (self.load(item, rank), self.load(item, WHOLE)) for name, item in self.items.items()}
        for name, item in self.items.items():
            own, whole = layers[name]
            for kind, values in inputs(self.case, item).items():
                x = self.tensor(values)
                if item.packed.split.style == "row":
                    held = column_range(x.shape[1], rank)
                    part = own(x[:, held.start : held.stop])
                    total = summed(part)
                else:
                    part = own(x)
                    total = side_by_side(part, self.size)
                yield from ((f"{name}|{kind}|part", part), (f"{name}|{kind}|total", total))
                yield f"{name}|{kind}|whole", whole(x)
        if self.case.data == "random":
            x = self.tensor(gaussian(self.items[UP]))
            part, whole = (_mlp(up, down, x) for up, down in zip(layers[UP], layers[DOWN], strict=True))
            yield from (("mlp|gaussian|part", part), ("mlp|gaussian|total", summed(part)))
            yield "mlp|gaussian|whole", whole

    def experts(self) -> Outputs:
        (item,) = self.items.values()
        x = self.tensor(gaussian(item))
        ids, weights = routing_tensors(routing(), self.subject)
        yield "experts|gaussian|whole", self.load(item, WHOLE)(x, ids, weights)
        assert item.packed.spec.moe is not None
        for style in ("tp", "ep"):
            rank = Rank(**{f"{style}_rank": self.index, f"{style}_size": self.size})
            mapping = None
            if style == "ep":
                mapping = expert_map_of(item.packed.spec.moe.experts, rank, self.subject.torch_device)
            part = self.load(item, rank)(x, ids, weights, mapping)
            yield from ((f"experts|{style}|part", part), (f"experts|{style}|total", summed(part)))


def _mlp(up: QuantLinear, down: QuantLinear, x: torch.Tensor) -> torch.Tensor:
    """Column-parallel, then row-parallel: nothing is exchanged in between. What lies there is rounded once."""
    gate, value = up(x).float().chunk(2, dim=1)
    y: torch.Tensor = down((F.silu(gate) * value).to(x.dtype))
    return y


def main(root: Path, device: str, index: int, size: int, file: str) -> None:
    torch.set_num_threads(1)
    on = torch.device("cpu")
    if device != "cpu":
        on = torch.device("cuda", index if device == "cuda" else 0)
        torch.cuda.set_device(on)
    dist.init_process_group(
        COLLECTIVES[device],
        init_method=f"file://{file}",
        rank=index,
        world_size=size,
        timeout=timedelta(seconds=120),
        device_id=on if device == "cuda" else None,
    )
    subject = find_subject(on.type)
    found: dict[str, Array] = {}
    with torch.inference_mode():
        for case in CASES:
            ranks = Ranks(case, root / f"checkpoints-{index}", subject, index, size)
            for what, tensor in ranks.experts() if case.experts else ranks.linears():
                assert tensor.device == on
                found[f"{case.name}|{what}"] = to_output(tensor)
            print(case.name, flush=True)
    np.savez(root / f"{index}.npz", **found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
