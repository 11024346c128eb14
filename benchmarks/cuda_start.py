"""How long kernels hold up a first start and a second one: compiled ahead, and at first use.

    python benchmarks/cuda_start.py [--schemes ...] [--shapes 12288x3072 ...] [--rows 1 2 4 ...]

Each line is a process of its own. `empty` begins without Triton's cache, `filled` with that of the line before it;
`ahead` are the seconds of `compile_kernels`, `first calls` those of a call of every layer with every number of tokens
after it, and `compiled` the kernels that Triton compiled in either.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product

import torch
import triton
from cuda_host import SCHEMES, layer_of

from omniplat.portable.ahead import TOKENS, compile_kernels


def measure(schemes: list[str], shapes: list[str], rows: list[int], ahead: bool) -> dict[str, object]:
    """What one process sees."""
    compiled = []
    triton.knobs.compilation.listener = lambda **told: compiled.append(not told["cache_hit"])
    sizes = [tuple(int(size) for size in shape.split("x")) for shape in shapes]
    layers = [layer_of(scheme, n, k, "memory") for scheme, (n, k) in product(schemes, sizes)]
    for layer in layers:
        layer(torch.zeros(0, layer.spec.in_features, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
    start = time.perf_counter()
    if ahead:
        compile_kernels(layers, rows)
    between, before = time.perf_counter(), sum(compiled)
    with torch.inference_mode():
        for layer, count in product(layers, rows):
            layer(torch.zeros(count, layer.spec.in_features, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
    return {
        "ahead": between - start,
        "calls": time.perf_counter() - between,
        "compiled ahead": before,
        "compiled by calls": sum(compiled) - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--shapes", nargs="+", default=["12288x3072", "4096x4096"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--as", dest="role", choices=["", "ahead", "lazy"], default="", help="used by this script")
    arguments = parser.parse_args()
    if arguments.role:
        print(json.dumps(measure(arguments.schemes, arguments.shapes, arguments.rows, arguments.role == "ahead")))
        return
    print("| kernels | cache | ahead, s | first calls, s | compiled ahead | compiled by calls |")
    print("|---|---|---|---|---|---|", flush=True)
    for role in ("ahead", "lazy"):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "filled"):
                done = subprocess.run(
                    [sys.executable, *sys.argv, "--as", role],
                    env={**os.environ, "TRITON_CACHE_DIR": cache},
                    stdout=subprocess.PIPE,
                    check=True,
                    text=True,
                )
                found = json.loads(done.stdout.splitlines()[-1])
                print(
                    f"| {role} | {state} | {found['ahead']:.1f} | {found['calls']:.1f} | {found['compiled ahead']} | "
                    f"{found['compiled by calls']} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
