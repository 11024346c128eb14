"""How long it takes to round a weight on a CUDA device and on the CPU, for every method of online quantization.

    python benchmarks/cuda_online.py [--shape 12288x3072] [--methods fp8 mxfp4 ...] [--rounds 5]

A weight in bf16 lies on the CPU, as a checkpoint brings it, and its codes and scales end there: `device ms` has both
transfers in it. `lying there` is without the first, for weights that an engine puts there itself. Medians of the
rounds; the CPU's is one. Arrays of both are compared byte for byte.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import torch

from omniplat.canonical import CanonicalWeight
from omniplat.online import METHODS, parse_method
from omniplat.portable.round_weight import round_on_device
from omniplat.runtime.online import round_to_nearest
from omniplat.scheme import Scheme

Runs = Iterator[tuple[int, CanonicalWeight]]


def timed(make: Callable[[], Runs]) -> tuple[float, dict[str, np.ndarray]]:
    """Milliseconds, and the arrays."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    parts = [weight.tensors for _, weight in make()]
    spent = (time.perf_counter() - start) * 1e3
    return spent, {role: np.concatenate([part[role] for part in parts]) for role in parts[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="12288x3072")
    parser.add_argument("--methods", nargs="+", default=[name for name in METHODS if name != "bitsandbytes"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    n, k = (int(size) for size in arguments.shape.split("x"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {n}x{k}, {torch.get_num_threads()} threads")
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    lying = weight.cuda()
    print("| method | weight | CPU ms | device ms | lying there |\n|---|---|---|---|---|")
    for name in arguments.methods:
        scheme = Scheme(parse_method(name).weight)
        spent, wanted = timed(lambda scheme=scheme: round_to_nearest(weight, scheme))
        brought: list[float] = []
        there: list[float] = []
        for _ in range(arguments.rounds + 1):
            for figures, source in ((brought, weight), (there, lying)):
                taken, found = timed(lambda scheme=scheme, source=source: round_on_device(source.cuda(), scheme))
                figures.append(taken)
                for role, array in wanted.items():
                    same = np.array_equal(found[role].view(np.uint8), np.ascontiguousarray(array).view(np.uint8))
                    assert same, f"{name}: {role} differs"
        print(
            f"| {name} | {scheme.weight_id} | {spent:.0f} | {median(brought[1:]):.1f} | {median(there[1:]):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
