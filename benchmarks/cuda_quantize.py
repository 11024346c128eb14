"""Device time of the quantizers of activations, of CUDA graphs, and the rate at which they read bf16 and write codes
and scales.

    python benchmarks/cuda_quantize.py [--activations fp8-token int8-token fp8-tensor-static mxfp4 mxfp8-blocks ...]
                                       [--rows 1 16 256 4096] [--columns 3072 4096 12288] [--rounds 5]

Each is timed with one input, which lies in the L2 cache where it fits, and with as many in turn as are several times
that cache. mxfp4 is rounded to the MX grid and held as e4m3 with one scale per token; of what ends in -blocks codes and
scales are those of the format. `copy` copies the input. Times are medians of the rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from cuda_linear import ROTATED, graph_of, replayed

from omniplat.portable.mx_grid import regroup_rows
from omniplat.portable.quantize import quantize_rows
from omniplat.portable.quantize_blocks import quantize_blocks
from omniplat.scheme import parse_activation_id

#: Calls in one graph, so that starting it weighs nothing, and inputs at most: few rows do not fill the cache.
CALLS, MOST = 32, 1024
BLOCKS = "-blocks"
ACTIVATIONS = ("fp8-token", "int8-token", "fp8-tensor-static", "mxfp4", "mxfp8-blocks", "mxfp4-blocks", "nvfp4-blocks")


def quantizer(activation: str) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """What quantizes rows [M, K], and gives codes and scales."""
    if activation == "copy":
        return lambda x: (x.clone(),)
    quant = parse_activation_id(activation.removesuffix(BLOCKS))
    if quant is None:
        raise ValueError(f"{activation} is not quantized")
    if activation.endswith(BLOCKS):
        multiplier = torch.full((1, 1), 1 / 300, device="cuda") if quant.second_scale else None
        return lambda x: quantize_blocks(x, quant, None, multiplier)
    if quant.scale_format == "e8m0":
        return lambda x: regroup_rows(x, quant, None)
    scale = None if quant.dynamic else torch.full((1, 1), 0.01, device="cuda")
    return lambda x: quantize_rows(x, quant, None, scale)


def times(run: Callable[[torch.Tensor], object], inputs: list[torch.Tensor], rounds: int) -> float:
    """Microseconds per call, the median of the rounds."""
    calls = max(CALLS, len(inputs))
    graph = graph_of(lambda i: run(inputs[i % len(inputs)]), calls)
    replayed(graph, calls, 1)
    return median(replayed(graph, calls, 5) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", nargs="+", default=[*ACTIVATIONS, "copy"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 4096])
    parser.add_argument("--columns", type=int, nargs="+", default=[3072, 4096, 12288])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"device={torch.cuda.get_device_name()} torch={torch.__version__}")
    print("| activation | M | K | one input us | GB/s | inputs in turn us | GB/s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for activation in arguments.activations:
        run = quantizer(activation)
        for columns in arguments.columns:
            for rows in arguments.rows:
                count = min(MOST, -(-ROTATED // (rows * columns * 2)))
                inputs = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
                one, turn = times(run, inputs[:1], arguments.rounds), times(run, inputs, arguments.rounds)
                moved = sum(tensor.nbytes for tensor in (inputs[0], *run(inputs[0])))
                rates = [moved / us / 1e3 for us in (one, turn)]
                print(
                    f"| {activation} | {rows} | {columns} | {one:.2f} | {rates[0]:.0f} | {turn:.2f} | {rates[1]:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
