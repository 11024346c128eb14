"""Time of layers that two GPUs share over NCCL, beside one GPU that has them whole, and beside BF16 on both.

    python benchmarks/cuda_two_gpus.py [--pair 12288x3072] [--experts 64x4096x3072] [--rows 1 16 256 4096]
                                       [--schemes ...] [--prefer memory|speed] [--rounds 7] [--device cuda|cpu] [--json]

`pair` is an MLP: a column-parallel layer of N x K, GELU, a row-parallel layer of K x N, and the sum of both GPUs' parts
(`all_reduce`). `experts tp` and `experts ep` are HunyuanImage-3's layer (see cuda_moe.py) with half of every expert, or
half of the experts, on each GPU, and that sum. One process for each GPU, one process group for everything.

Device times are those of CUDA graphs with the sum in them, which go through as many copies of the weights as fill
several times the L2 cache; GPUs start together, and the slower one counts. Four runs (one GPU and two, BF16 and
quantized) take turns, round by round. Ratios are taken within a round: `gain` is one GPU's time over two GPUs', and
`x BF16` is BF16's time over the layer's on as many GPUs; medians, of the last also the least and largest. `sum us` is
the sum alone. `difference` is relative L2 of two GPUs' output against one GPU's of the same quantized weights: where
scales belong to tokens, each part of a token has its own.

Layers run on the kernels that a plan chooses on this machine. `--device cpu` runs everything in two processes over gloo
on the cpu backend's: to see that it works; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing
from cuda_linear import graph_of, replayed
from cuda_moe import EXPERTS, HIDDEN, INNER
from two_gpus import RANKS, RUNS, Call, Layer, Place, experts, pair

from omniplat.conformance.subject import find_subject
from omniplat.portable.ahead import compile_kernels
from omniplat.scheme import Scheme

SCHEMES = ("fp8-channel/fp8-token", "mxfp8/mxfp8", "mxfp4/a16")
COLLECTIVES = {"cpu": "gloo", "cuda": "nccl"}
#: Rounding to fp8 costs 2.6e-2, and both sides do it twice; BF16 costs 2e-3. More is a wrong share.
LARGEST_DIFFERENCE = {"": 0.1, "bf16 ": 0.01}
HEAD = (
    "| layer | scheme | kernels | M | one us | two us | gain | BF16 one us | BF16 two us | BF16 gain | x BF16, one "
    "| x BF16, two | least to largest | sum us | difference |\n" + "|---" * 15 + "|"
)


@dataclass(frozen=True)
class Result:
    """`microseconds` of each of RUNS; ratios as the table has them."""

    layer: str
    scheme: str
    kernels: str
    rows: int
    microseconds: Mapping[str, float]
    gain: float
    bf16_gain: float
    ratio_one: float
    ratio_two: tuple[float, float, float]
    sum_microseconds: float
    difference: float

    def __str__(self) -> str:
        """A line of the table."""
        one, two, half_one, half_two = (f"{self.microseconds[name]:.1f}" for name in ("one", "two", *RUNS[::2]))
        middle, least, largest = self.ratio_two
        return (
            f"| {self.layer} | {self.scheme} | {self.kernels} | {self.rows} | {one} | {two} | {self.gain:.2f} | "
            f"{half_one} | {half_two} | {self.bf16_gain:.2f} | {self.ratio_one:.2f} | {middle:.2f} | "
            f"{least:.2f} to {largest:.2f} | {self.sum_microseconds:.1f} | {self.difference:.1e} |"
        )


def summed(call: Call, *inputs: torch.Tensor) -> torch.Tensor:
    part = call(*inputs)
    dist.all_reduce(part)
    return part


def layers(arguments: argparse.Namespace, place: Place) -> Iterator[Layer]:
    n, k = (int(size) for size in arguments.pair.split("x"))
    count, hidden, inner = (int(size) for size in arguments.experts.split("x"))
    for scheme in map(Scheme.parse, arguments.schemes):
        yield pair(scheme, n, k, place)
        for style in ("tp", "ep"):
            yield experts(scheme, style, (count, hidden, inner), place)


def times(calls: Mapping[str, Sequence[Call]], inputs: Sequence[torch.Tensor], rounds: int) -> dict[str, list[float]]:
    """Microseconds per call, round by round, of the slower rank; each rank goes through all of `calls` alike."""
    device = inputs[0].device
    token = torch.zeros(1, device=device)
    runs = {name: [partial(call, *inputs) for call in each] for name, each in calls.items()}
    graphs = {}
    if device.type == "cuda":
        graphs = {
            name: graph_of(lambda i, each=each: each[i](), len(each), errors="thread_local")
            for name, each in runs.items()
        }
    replays = 3 if len(inputs[0]) > 1024 else 20
    found = torch.zeros(rounds + 1, len(runs), device=device)
    for number in range(rounds + 1):
        for at, (name, each) in enumerate(runs.items()):
            # behind it the ranks' streams start together
            dist.all_reduce(token)
            if graphs:
                found[number, at] = replayed(graphs[name], len(each), replays)
                continue
            start = time.perf_counter()
            for run in each:
                run()
            found[number, at] = (time.perf_counter() - start) * 1e6 / len(each)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    # the first round warms up
    return dict(zip(runs, found[1:].t().tolist(), strict=True))


def measured(layer: Layer, rows: int, rounds: int) -> Result:
    inputs = layer.inputs(rows)
    calls = {
        name: [partial(summed, call) for call in each] if name.endswith("two") else each
        for name, each in layer.calls.items()
    }
    differences = {}
    for prefix, largest in LARGEST_DIFFERENCE.items():
        one, two = (calls[prefix + name][-1](*inputs).double() for name in ("one", "two"))
        differences[prefix] = difference = float((two - one).norm() / one.norm())
        assert difference < largest, f"{layer.name} {prefix or layer.scheme}: two GPUs are {difference:.2e} from one"
    found = times(calls, inputs, rounds)
    # what is added up is as large as the input
    alone = times({"sum": [partial(summed, torch.zeros_like)] * len(calls["two"])}, inputs[:1], rounds)
    ratios = sorted(base / own for base, own in zip(found["bf16 two"], found["two"], strict=True))
    return Result(
        layer.name,
        layer.scheme,
        layer.kernels,
        rows,
        {name: median(found[name]) for name in RUNS},
        _ratio(found["one"], found["two"]),
        _ratio(found["bf16 one"], found["bf16 two"]),
        _ratio(found["bf16 one"], found["one"]),
        (median(ratios), ratios[0], ratios[-1]),
        median(alone["sum"]),
        differences[""],
    )


def _ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return median(one / other for one, other in zip(over, under, strict=True))


def rank_main(rank: int, arguments: argparse.Namespace, file: str) -> None:
    """One of the two processes; the first prints."""
    on_cuda = arguments.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        COLLECTIVES[arguments.device],
        init_method=f"file://{file}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
        device_id=torch.device("cuda", rank) if on_cuda else None,
    )
    place = Place(find_subject(arguments.device), rank, arguments.prefer)
    results = []
    is_first = rank == 0
    if is_first and not arguments.json:
        print("device=" + (torch.cuda.get_device_name() if on_cuda else "cpu"), f"torch={torch.__version__}")
        print(HEAD, flush=True)
    for layer in layers(arguments, place):
        compile_kernels(layer.compiled, arguments.rows)
        for rows in arguments.rows:
            with torch.inference_mode():
                results.append(measured(layer, rows, arguments.rounds))
            if is_first and not arguments.json:
                print(results[-1], flush=True)
    if is_first and arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="12288x3072", metavar="NxK")
    parser.add_argument("--experts", default=f"{EXPERTS}x{HIDDEN}x{INNER}", metavar="ExHxI")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 4096])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--prefer", choices=["memory", "speed"], default="memory")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=list(COLLECTIVES), default="cuda")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() < RANKS:
        raise SystemExit(f"{RANKS} CUDA devices are needed, {torch.cuda.device_count()} are here")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (arguments, os.path.join(folder, "rendezvous")), RANKS)


if __name__ == "__main__":
    main()
