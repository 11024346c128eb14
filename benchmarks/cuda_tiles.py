"""Time of Triton's kernels for every tile that could be chosen: where their `tile_of` and `TILE` come from.

    python benchmarks/cuda_tiles.py [--kernel weight_only|int8] [--schemes mxfp4 ...] [--shapes 12288x3072] [--rows 16]

Device times are those of CUDA graphs over copies of the weight that together are several times the L2 cache. Lines
are sorted, fastest first; BF16 `torch.matmul` of the same run stands at the head of each list.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context

import numpy as np
import torch
from cuda_linear import ROTATED, graph_of, replayed
from omniplat_cuda.kernels.int8_gemm import is_hopper

from omniplat.conformance.weights import random_weight
from omniplat.layer import LayerSpec
from omniplat.portable import int8_gemm_triton as int8
from omniplat.portable import weight_only_triton as weight_only
from omniplat.portable.weight_only import PortableLinear
from omniplat.portable.word_weights import WordForm, decode_form
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme

Run = Callable[[int], object]
#: Rows of the weight that is made; larger ones are copies of it.
MADE = 256


def buffers_of(scheme: str, n: int, k: int) -> tuple[WordForm, dict[str, torch.Tensor]]:
    weight = random_weight(Scheme.parse(f"{scheme}/a16"), MADE, k, np.random.default_rng(0))
    spec = LayerSpec("bench", "linear", MADE, k, weight.scheme)
    prepared = PortableLinear().prepare(to_torch(weight, device=torch.device("cuda")), spec)
    form = decode_form(prepared.config.form)
    # scales of blocks are those of several rows
    by_rows = (MADE, MADE // form.rows)
    tensors = {
        name: held.repeat([n // MADE if size in by_rows else 1 for size in held.shape])
        for name, held in prepared.tensors.items()
    }
    return replace(form, out_features=n), tensors


def weight_only_tiles(m: int, form: WordForm) -> Iterator[weight_only.Tile | weight_only.FragmentTile]:
    tokens = min(128, max(8, 1 << (m - 1).bit_length()))
    few = [(16, 4), (32, 4), (64, 4), (32, 8)]
    many = [(64, 0, 4), (128, 0, 4), (128, 0, 8), (256, 0, 8)]
    if m > 64:
        for (row, slices, warps), stages in product(many, (3, 4)):
            yield weight_only.Tile(row, tokens, slices, warps, stages)
    elif weight_only.takes_fragments(form, form.in_features, torch.bfloat16, "", torch.device("cuda")):
        shapes, waits, registers = product((16, 32, 48), (4, 8)), product((1, 2), (False, True)), (0, 128, 168)
        for (rows, warps), (ahead, tokens_ahead), most in product(shapes, waits, registers):
            yield weight_only.FragmentTile(rows, min(tokens, 32), warps, ahead, tokens_ahead, most)
            if tokens == 64:
                yield weight_only.FragmentTile(rows, 64, warps, ahead, tokens_ahead, most)
    else:
        for (row, slices), stages, unroll in product(few, (2, 3, 4), (1, 2)):
            yield weight_only.Tile(row, tokens, slices, slices, stages, unroll)


def weight_only_runs(scheme: str, n: int, k: int, m: int) -> Iterator[tuple[str, int, Run]]:
    """(tile, copies of the weight, call with one of them) of every tile."""
    form, tensors = buffers_of(scheme, n, k)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    copies = [{name: t.clone() for name, t in tensors.items()} for _ in range(max(2, -(-ROTATED // size)))]
    x = torch.randn(m, k, device="cuda").bfloat16()
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    for tile in weight_only_tiles(m, form):

        def run(i: int, tile: weight_only.Tile | weight_only.FragmentTile = tile) -> None:
            held = copies[i % len(copies)]
            optional = (held.get(role) for role in ("zero", "row_scale"))
            weight_only.weight_only_product(
                x, held["words"], held.get("table"), held["scale"], *optional, None, y, form, tile
            )

        yield str(tile), len(copies), run


def compiled(scheme: str, k: int, m: int) -> None:
    """Puts every tile's kernel into Triton's cache on the disk: they do not depend on the weight's rows."""
    for _, _, run in weight_only_runs(scheme, MADE, k, m):
        # a tile that cannot be compiled says so when it is measured
        with contextlib.suppress(Exception):
            run(0)


def int8_runs(n: int, k: int, m: int) -> Iterator[tuple[str, int, Run]]:
    count = max(2, -(-ROTATED // (n * k)))
    codes = [torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda") for _ in range(count)]
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
    x_scale, scale = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
    shapes = (
        [(128, 256, 128), (256, 128, 128), (128, 128, 128), (128, 256, 64), (256, 128, 64)]
        if m > 512
        else [(64, 128, 128), (64, 64, 128), (64, 64, 256)]
        if m > 32
        else [(max(16, m), 64, 256), (max(16, m), 32, 256), (max(16, m), 64, 128), (max(16, m), 128, 128)]
    )
    for (bm, bn, bk), warps, stages, descriptors in product(shapes, (4, 8), (3, 4), (True, False)):
        tile = int8.Tile(bm, bn, bk, warps, stages, descriptors)

        def run(i: int, tile: int8.Tile = tile) -> None:
            int8.int8_product(x, codes[i % count], x_scale, scale, None, torch.bfloat16, tile)

        yield str(tile), count, run
    if not is_hopper(x.device):
        return
    from omniplat_cuda.kernels import int8_gemm_hopper as hopper

    rings = [
        (128, 128, 128, 6, 32),
        (128, 128, 128, 6, 64),
        (128, 128, 64, 12, 32),
        (64, 128, 128, 8, 64),
        (128, 64, 128, 8, 32),
    ]
    for turns in [hopper.Tile(*ring, band) for ring, band in product(rings, (8, 16, 32) if m > 1024 else (16,))]:

        def run_in_turns(i: int, tile: hopper.Tile = turns) -> None:
            hopper.int8_product(x, codes[i % count], x_scale, scale, None, torch.bfloat16, tile)

        yield f"in turns: {turns}", count, run_in_turns


def measured(name: str, copies: int, run: Run, m: int) -> tuple[float, str]:
    """Microseconds per call; infinity, and why, for a tile that the device cannot run."""
    try:
        graph = graph_of(run, copies)
    except Exception as exc:  # a tile may need more shared memory or registers than there are
        return float("inf"), f"{name}: {type(exc).__name__}: {str(exc)[:80]}"
    replays = 2 if m > 1024 else 10
    replayed(graph, copies, replays)
    return min(replayed(graph, copies, replays) for _ in range(5)), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=["weight_only", "int8"], default="weight_only")
    parser.add_argument("--schemes", nargs="+", default=["mxfp4"])
    parser.add_argument("--shapes", nargs="+", default=["12288x3072"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.kernel == "weight_only":
        depths = sorted({int(shape.split("x")[1]) for shape in arguments.shapes})
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            list(pool.map(compiled, *zip(*product(arguments.schemes, depths, arguments.rows), strict=True)))
    for shape, m in product(arguments.shapes, arguments.rows):
        n, k = (int(size) for size in shape.split("x"))
        x = torch.randn(m, k, device="cuda").bfloat16()
        halves = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(max(2, -(-ROTATED // (2 * n * k))))]
        base, _ = measured("bf16", len(halves), lambda i, x=x, halves=halves: torch.matmul(x, halves[i].t()), m)
        for scheme in arguments.schemes if arguments.kernel == "weight_only" else ["int8"]:
            runs = int8_runs(n, k, m) if scheme == "int8" else weight_only_runs(scheme, n, k, m)
            print(f"{scheme} {shape} M={m}: bf16 {base:.1f} us", flush=True)
            for time, name in sorted(measured(*run, m) for run in runs):
                print(f"  {time:8.1f} us  {base / time:5.2f}x  {name}", flush=True)


if __name__ == "__main__":
    main()
