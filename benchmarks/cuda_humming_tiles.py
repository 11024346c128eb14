"""Times of schedules of humming's kernels beside the one that its heuristics choose, for few rows.

    python benchmarks/cuda_humming_tiles.py [--shapes 12288x3072 4096x4096] [--schemes mxfp4/a16 ...] [--rows 1 16]

Device times are those of CUDA graphs that go through as many copies of the weight as fill several times the L2 cache;
BF16 is `torch.matmul` in the same run. A schedule that humming refuses is printed with its reason; `differs` is the
relative L2 between its output and that of the heuristics' choice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from cuda_linear import ROTATED, capabilities_of, graph_of, replayed, weight_of
from humming.config import LayerConfig
from humming.kernel.humming import HummingKernel
from humming.tune import get_heuristics_config
from omniplat_cuda.kernels.humming_runtime import Schedule, launch

from omniplat.layer import LayerSpec
from omniplat.runtime.kernel import LinearKernel, load_kernel
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme

#: Block of N and K, warp of N and K, blocks on one multiprocessor, stages; without TMA and producer warps.
MMA = [
    (128, 128, 64, 32, 1, 4), (128, 128, 64, 32, 2, 4), (128, 128, 32, 64, 2, 4), (128, 64, 64, 32, 2, 4),
    (128, 64, 64, 32, 4, 4), (128, 128, 64, 32, 2, 3), (256, 64, 64, 32, 2, 4), (128, 256, 64, 64, 1, 4),
    (64, 128, 64, 32, 2, 4), (64, 256, 64, 64, 2, 4), (256, 128, 64, 64, 1, 4), (128, 128, 64, 32, 2, 5),
]  # fmt: skip


def schedules(rows: int) -> list[dict[str, object]]:
    m = 8 if rows <= 8 else 16
    return [
        {
            "mma_type": "mma",
            "block_shape": (m, block_n, block_k),
            "warp_shape": (m, warp_n, warp_k),
            "num_stages": stages,
            "num_ctas_per_sm": blocks,
            "use_stream_k": True,
            "use_tma": False,
            "use_warp_spec": False,
        }
        for block_n, block_k, warp_n, warp_k, blocks, stages in MMA
    ]


def timed(run: Callable[[int], object], copies: int) -> float:
    graph = graph_of(run, copies)
    replayed(graph, copies, 10)
    return min(replayed(graph, copies, 10) for _ in range(5))


def bench(scheme_id: str, n: int, k: int, all_rows: list[int]) -> None:
    scheme = Scheme.parse(scheme_id)
    weight, half = weight_of(scheme, n, k)
    spec = LayerSpec("bench", "linear", n, k, scheme)
    kernel = load_kernel(capabilities_of(spec, "memory", ["humming_linear"])[0].impl)
    assert isinstance(kernel, LinearKernel)
    prepared = kernel.prepare(to_torch(weight, device=torch.device("cuda")), spec)
    size = sum(tensor.nbytes for tensor in prepared.tensors.values())
    copies = max(2, -(-ROTATED // size))
    names = ("weight", "weight_scale", "weight_scale_2", "zero_point")
    layers = [
        [None if (t := prepared.tensors.get(name)) is None else t.clone() for name in names] for _ in range(copies)
    ]
    halves = [half.clone() for _ in range(max(2, -(-ROTATED // half.nbytes)))]
    description = prepared.config.layer

    def compiled(schedule: dict[str, object]) -> Schedule | str:
        try:
            configs = HummingKernel.prepare_kernels(description, '{"gemm_type": "dense"}', json.dumps(schedule), 0)
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        return Schedule(configs, 0)

    for rows in all_rows:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        base = timed(lambda i, x=x: torch.matmul(x, halves[i].t()), len(halves))
        own = get_heuristics_config(LayerConfig(**json.loads(description)), shape_m=rows, gemm_type="dense")
        tried = [own, *schedules(rows)]
        with ThreadPoolExecutor(16) as executor:
            kernels = list(executor.map(compiled, tried))
        first = None
        for schedule, built in zip(tried, kernels, strict=True):
            if isinstance(built, str):
                print(f"{scheme_id} {n}x{k} M={rows} {schedule}: {built[:120]}", flush=True)
                continue
            try:
                y = launch(built, x, *layers[0])
                first = y if first is None else first
                differs = ((y.float() - first.float()).norm() / first.float().norm()).item()
                time = timed(lambda i, x=x, built=built: launch(built, x, *layers[i]), copies)
            except Exception as exc:
                print(f"{scheme_id} {n}x{k} M={rows} {schedule}: {type(exc).__name__}: {str(exc)[:120]}", flush=True)
                continue
            keys = ("mma_type", "block_shape", "warp_shape", "num_ctas_per_sm", "num_stages")
            text = " ".join(str(schedule.get(key)) for key in keys)
            print(f"{scheme_id} {n}x{k} M={rows} {text}: {time:.1f} us, {base / time:.2f}x, differs {differs:.1e}",
                  flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["12288x3072", "4096x4096"])
    parser.add_argument("--schemes", nargs="+", default=["mxfp4/a16", "nvfp4/a16", "int4-g128/a16", "mxfp8/a16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for shape in arguments.shapes:
        n, k = (int(size) for size in shape.split("x"))
        for scheme in arguments.schemes:
            bench(scheme, n, k, arguments.rows)


if __name__ == "__main__":
    main()
