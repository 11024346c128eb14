"""What an eager call of a linear layer costs the host: nothing waits for the device, and the device has little to do.

    python benchmarks/cuda_host.py [--schemes ...] [--shape 1024x1024] [--rows 1 16 256] [--prefer memory|speed]

Each figure is the least of many series of calls, in microseconds. `layer` is `QuantLinear`, `operator` the one custom
operator that it calls, `BF16` is `torch.nn.Linear`. The weight is small, so that the device keeps up: a queue that is
full would make the host wait.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch
from cuda_linear import capabilities_of

from omniplat.conformance.weights import random_weight
from omniplat.layer import LayerSpec
from omniplat.portable.ahead import compile_kernels
from omniplat.runtime.kernel import LinearKernel, load_kernel
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme

SCHEMES = ("fp8-channel/fp8-token", "fp8-tensor/fp8-tensor-static", "int8-channel/int8-token", "mxfp8/mxfp8",
           "mxfp4/mxfp4", "mxfp4/a16", "nvfp4/a16", "int4-g128/a16", "nf4-b64/a16")  # fmt: skip


def host(run: Callable[[], object], calls: int = 50, series: int = 40) -> float:
    """Microseconds that the host spends on one call."""
    best = float("inf")
    for _ in range(series):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return best * 1e6


def layer_of(scheme_id: str, n: int, k: int, prefer: str) -> QuantLinear:
    scheme = Scheme.parse(scheme_id)
    spec = LayerSpec(scheme_id, "linear", n, k, scheme)
    kernel = load_kernel(capabilities_of(spec, prefer, ())[0].impl)
    assert isinstance(kernel, LinearKernel)
    weight = to_torch(random_weight(scheme, n, k, np.random.default_rng(0)), device=torch.device("cuda"))
    return QuantLinear(spec, kernel, kernel.prepare(weight, spec))


def operator_of(layer: QuantLinear, x: torch.Tensor) -> Callable[[], object]:
    """The call of the kernel, without the module around it."""
    tensors = dict(layer.named_buffers())
    return lambda: layer.kernel.apply(layer.config, tensors, x, None, x.dtype, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--shape", default="1024x1024")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--prefer", choices=["memory", "speed"], default="speed")
    arguments = parser.parse_args()
    n, k = (int(size) for size in arguments.shape.split("x"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {version('triton')}")
    half = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    layers = [layer_of(scheme, n, k, arguments.prefer) for scheme in arguments.schemes]
    compile_kernels(layers, arguments.rows)
    print("| scheme | kernel | M | layer | operator | BF16 |\n|---|---|---|---|---|---|")
    with torch.inference_mode():
        for rows in arguments.rows:
            x = torch.randn(rows, k, device="cuda").to(torch.bfloat16)
            base = host(lambda x=x: half(x))
            for layer in layers:
                figures = (host(lambda layer=layer, x=x: layer(x)), host(operator_of(layer, x)), base)
                shown = " | ".join(f"{figure:.1f}" for figure in figures)
                print(f"| {layer.spec.scheme.id} | {layer.kernel.name} | {rows} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
