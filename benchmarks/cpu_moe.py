"""Time of the cpu backend's experts as a ratio to a bf16 loop over experts, measured in the same run.

    python benchmarks/cpu_moe.py [--experts 64] [--top 8] [--hidden 1024] [--intermediate 768] [--rows 1 32 512]
                                 [--threads 1] [--schemes mxfp4/a16 ...] [--json]

The baseline gathers the rows of every expert that was chosen and runs them through two bf16 `F.linear`. Both are timed
in turn, round by round, and the ratio of each pair is taken before the median, so that other load on the machine moves
both. Ratios below 1 are faster than bf16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from side_by_side import machine, times_in_turn

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.reference.kernels import ExpertLoop
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme

SCHEMES = (
    *("bf16/a16", "fp8-tensor/a16", "fp8-channel/fp8-token", "fp8-block128x128/fp8-g128", "int8-channel/int8-token"),
    *("int4-g128/a16", "uint4-g128/a16", "mxfp8/a16", "mxfp8/mxfp8", "mxfp4/a16", "mxfp4/mxfp4", "nvfp4/a16"),
)


@dataclass(frozen=True)
class Shape:
    experts: int
    top: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class Result:
    """`ratio` is the layer's time over the bf16 loop's, `milliseconds` the layer's own, `resident` bytes per weight."""

    scheme: str
    rows: int
    ratio: float
    milliseconds: float
    resident: float


def stacked(scheme: Scheme, shape: Shape, rows: int, columns: int) -> CanonicalWeight:
    """The same Gaussian weight for every expert: codes do not change the time."""
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32) / columns**0.5
    if scheme.weight.element == "bf16":
        one = CanonicalWeight(scheme, rows, columns, {"codes": values.astype(ml_dtypes.bfloat16)})
    else:
        one = replace(oracle.quantize_weight(values, scheme.weight), scheme=scheme)
    tensors = {role: np.repeat(array[None], shape.experts, axis=0) for role, array in one.tensors.items()}
    return replace(one, tensors=tensors)


def layer_of(scheme: Scheme, shape: Shape) -> QuantExperts:
    w13 = stacked(scheme, shape, 2 * shape.intermediate, shape.hidden)
    w2 = stacked(scheme, shape, shape.hidden, shape.intermediate)
    moe = MoeSpec(shape.experts, shape.intermediate)
    spec = LayerSpec("bench", "moe", shape.hidden, shape.hidden, scheme, moe=moe)
    kernel = ExpertLoop()
    prepared = kernel.prepare(to_torch(w13, experts=shape.experts), to_torch(w2, experts=shape.experts), spec)
    return QuantExperts(spec, kernel, prepared)


def loop(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The baseline: bf16 all the way, as a model's own code does it."""
    y = torch.zeros_like(x)
    for expert in torch.unique(ids).tolist():
        rows, slots = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = F.linear(x[rows], w13[expert]).chunk(2, dim=1)
        out = F.linear(F.silu(gate) * up, w2[expert])
        y.index_add_(0, rows, out * weights[rows, slots].unsqueeze(1).to(out.dtype))
    return y


def bench(
    scheme_id: str, shape: Shape, half: tuple[torch.Tensor, torch.Tensor], rows: Sequence[int], rounds: int
) -> list[Result]:
    layer = layer_of(Scheme.parse(scheme_id), shape)
    count = 3 * shape.experts * shape.hidden * shape.intermediate
    results = []
    for m in rows:
        x = torch.randn(m, shape.hidden).to(torch.bfloat16)
        ids = torch.rand(m, shape.experts).argsort(1)[:, : shape.top].contiguous()
        weights = torch.rand(m, shape.top)
        runs: tuple[Callable[[], object], ...] = (
            lambda x=x, ids=ids, weights=weights: loop(x, *half, ids, weights),
            lambda x=x, ids=ids, weights=weights: layer(x, ids, weights),
        )
        calls = max(1, 8 // m)
        times = times_in_turn(runs, calls, rounds)
        ratio = median(own / base for base, own in times)
        results.append(Result(scheme_id, m, ratio, 1e3 * median(own for _, own in times), layer.nbytes / count))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    shape = Shape(arguments.experts, arguments.top, arguments.hidden, arguments.intermediate)
    half = (
        (torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden) / shape.hidden**0.5).to(torch.bfloat16),
        (torch.randn(shape.experts, shape.hidden, shape.intermediate) / shape.intermediate**0.5).to(torch.bfloat16),
    )
    described = machine(arguments.threads) | asdict(shape)
    results = [r for s in arguments.schemes for r in bench(s, shape, half, arguments.rows, arguments.rounds)]
    if arguments.json:
        print(json.dumps({"machine": described, "results": [asdict(r) for r in results]}, indent=2))
        return
    print(" ".join(f"{key}={value}" for key, value in described.items()))
    print(f"{'scheme':28s} {'rows':>5s} {'x bf16':>7s} {'ms':>9s} {'B/weight':>9s}")
    for r in results:
        print(f"{r.scheme:28s} {r.rows:5d} {r.ratio:7.2f} {r.milliseconds:9.2f} {r.resident:9.3f}")


if __name__ == "__main__":
    main()
