"""Calls of one linear layer of the cuda backend, for a profiler to look at.

    ncu --clock-control none --set full -k regex:fragments --launch-skip 20 --launch-count 1 \
        python benchmarks/cuda_profile.py --scheme nf4-b64/a16 --shape 4096x4096 --rows 32

Weights are rotated past the L2 cache, as in `cuda_linear.py`, which says what the same calls take without a profiler.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from cuda_linear import ROTATED, capabilities_of, weight_of

from omniplat.layer import LayerSpec
from omniplat.runtime.kernel import LinearKernel, load_kernel
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", required=True)
    parser.add_argument("--shape", default="4096x4096", help="N x K")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--prefer", choices=["memory", "speed"], default="memory")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    n, k = (int(size) for size in arguments.shape.split("x"))
    spec = LayerSpec("bench", "linear", n, k, Scheme.parse(arguments.scheme))
    kernel = load_kernel(capabilities_of(spec, arguments.prefer, ())[0].impl)
    assert isinstance(kernel, LinearKernel)
    weight, _ = weight_of(spec.scheme, n, k)
    prepared = kernel.prepare(to_torch(weight, device=torch.device("cuda")), spec)
    layers = [QuantLinear(spec, kernel, prepared)]
    for _ in range(-(-ROTATED // layers[0].nbytes) - 1):
        tensors = {name: tensor.clone() for name, tensor in prepared.tensors.items()}
        layers.append(QuantLinear(spec, kernel, replace(prepared, tensors=tensors)))
    x = torch.randn(arguments.rows, k, device="cuda").to(torch.bfloat16)
    with torch.inference_mode():
        for call in range(arguments.calls):
            layers[call % len(layers)](x)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
