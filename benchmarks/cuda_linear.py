"""Time of the cuda backend's linear layers as a ratio to BF16 `torch.matmul`, measured in the same run.

    python benchmarks/cuda_linear.py [--shapes 12288x3072 4096x4096] [--rows 1 16 256 4096] [--schemes ...]
                                     [--prefer memory|speed] [--kernels NAME ...] [--rounds 11] [--json]

A shape is N x K. Device times are those of CUDA graphs that go through as many copies of the weight as fill several
times the L2 cache, on random data; quantizing the activation is part of a layer. Baseline and layer are replayed in
turn, round by round; a ratio is taken within a round, and its median, least and largest are shown: above 1 a layer is
faster than BF16. Each output is compared with the oracle's, as relative L2 over at most 64 of its rows. Host time is
that of eager calls which nothing waits for.

A scheme runs on the kernel that a plan would choose, or on each of `--kernels` that declares it. Those over vLLM's
operators need an installed vLLM, or a module whose import registers them, named by OMNIPLAT_VLLM_OPS.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from statistics import median

import numpy as np
import torch
from omniplat_cuda.spec import SPEC

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.capability import Accepted, Capability
from omniplat.conformance.expected import executed_activation
from omniplat.conformance.subject import equipped
from omniplat.conformance.weights import random_weight
from omniplat.device import parse_device
from omniplat.layer import LayerSpec
from omniplat.match import Policy, decide, match
from omniplat.portable.ahead import compile_kernels
from omniplat.runtime.kernel import LinearKernel, Workspaces, load_kernel
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme

SCHEMES = ("fp8-channel/fp8-token", "fp8-tensor/fp8-token", "fp8-tensor/fp8-tensor", "fp8-tensor/fp8-tensor-static",
           "int8-channel/int8-token", "mxfp8/mxfp8", "mxfp4/mxfp4", "mxfp4/a16", "nvfp4/a16", "int4-g128/a16",
           "nf4-b64/a16", "mxfp8/a16", "fp8-channel/a16", "fp8-block128x128/fp8-g128")  # fmt: skip
#: Bytes of weights that one replay reads at least.
ROTATED = 320 << 20
#: A bf16 output costs 1.7e-3 by itself; more than this is a wrong kernel.
LARGEST_ERROR = 1e-2


@dataclass(frozen=True)
class Result:
    """`ratio` is BF16's time over the layer's (median, least, largest), `error` against the oracle's layer."""

    scheme: str
    kernel: str
    shape: str
    rows: int
    ratio: tuple[float, float, float]
    microseconds: float
    bf16_microseconds: float
    host_microseconds: float
    bf16_host_microseconds: float
    error: float


def capabilities_of(spec: LayerSpec, prefer: str, kernels: Sequence[str]) -> list[Capability]:
    """What a plan would choose on Hopper among the kernels that exist, or those of the given names that accept."""
    built = [capability for capability in SPEC.capabilities if capability.impl]
    if kernels:
        device = equipped("cuda", "sm90")
        named = [capability for capability in built if capability.name in kernels]
        return [item for item in named if isinstance(decide(item, spec, device, Policy()), Accepted)]
    chosen = match(spec, built, parse_device("cuda:sm90"), Policy(prefer=prefer)).chosen
    if chosen is None:
        raise SystemExit(f"no kernel runs {spec.scheme.id}")
    return [chosen.capability]


@lru_cache(maxsize=1)
def weight_of(scheme: Scheme, n: int, k: int) -> tuple[CanonicalWeight, torch.Tensor]:
    """A Gaussian weight in canonical form, and in bf16 on the device. The last one is kept, for other kernels."""
    values = np.random.default_rng(0).standard_normal((n, k), dtype=np.float32)
    if scheme.weight.element in ("nf4", "fp4_bnb"):
        weight = random_weight(scheme, n, k, np.random.default_rng(0))
    else:
        weight = replace(oracle.quantize_weight(values, scheme.weight), scheme=scheme)
    if scheme.activation is not None and not scheme.activation.dynamic:
        weight = replace(weight, tensors={**weight.tensors, "input_scale": np.float32([5.0 / 448.0])})
    return weight, torch.from_numpy(values).cuda().to(torch.bfloat16)


def graph_of(run: Callable[[int], object], copies: int, *, errors: str = "global") -> torch.cuda.CUDAGraph:
    """`run(i)` for each copy of the weight. `errors` is torch's `capture_error_mode`: "thread_local" where another
    thread calls CUDA meanwhile."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(copies):
            run(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=errors):
        for i in range(copies):
            run(i)
    return graph


def replayed(graph: torch.cuda.CUDAGraph, copies: int, replays: int) -> float:
    """Microseconds per call."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / (replays * copies)


def host(run: Callable[[int], object], calls: int = 100) -> float:
    """Microseconds that the host spends on one eager call; the least of five series."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run(0)
        best = min(best, (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return best * 1e6


def bench(spec: LayerSpec, capability: Capability, rows: Sequence[int], rounds: int) -> list[Result]:
    scheme, n, k = spec.scheme, spec.out_features, spec.in_features
    weight, half = weight_of(scheme, n, k)
    kernel = load_kernel(capability.impl)
    assert isinstance(kernel, LinearKernel)
    prepared = kernel.prepare(to_torch(weight, device=torch.device("cuda")), spec)
    first = QuantLinear(spec, kernel, prepared)
    compile_kernels([first], rows)
    copies = max(2, -(-ROTATED // first.nbytes))
    layers = [first]
    for _ in range(copies - 1):
        tensors = {name: tensor.clone() for name, tensor in prepared.tensors.items()}
        layers.append(QuantLinear(spec, kernel, replace(prepared, tensors=tensors)))
    workspaces = Workspaces()
    for each in layers:
        each.share_workspace(workspaces)
    halves = [half.clone() for _ in range(copies)]
    results = []
    for count in rows:
        x = torch.randn(count, k, device="cuda").to(torch.bfloat16)

        def baseline(i: int, x: torch.Tensor = x) -> torch.Tensor:
            return torch.matmul(x, halves[i].t())

        def layer(i: int, x: torch.Tensor = x) -> torch.Tensor:
            y: torch.Tensor = layers[i](x)
            return y

        with torch.inference_mode():
            graphs = [graph_of(run, copies) for run in (baseline, layer)]
            replays = 2 if count > 1024 else 10
            for graph in graphs:
                replayed(graph, copies, replays)
            times = [[replayed(graph, copies, replays) for graph in graphs] for _ in range(rounds)]
            hosts = [host(run) if count <= 256 else float("nan") for run in (baseline, layer)]
            found = layer(copies - 1)
        ratios = sorted(base / own for base, own in times)
        results.append(
            Result(
                scheme.id,
                kernel.name,
                f"{n}x{k}",
                count,
                (median(ratios), ratios[0], ratios[-1]),
                median(own for _, own in times),
                median(base for base, _ in times),
                hosts[1],
                hosts[0],
                error_of(found, x, weight, capability),
            )
        )
        assert results[-1].error < LARGEST_ERROR, f"{results[-1]} is not what the oracle computes"
    return results


def error_of(found: torch.Tensor, x: torch.Tensor, weight: CanonicalWeight, capability: Capability) -> float:
    """Relative L2 against the oracle's quantized input times its dequantized weight, in float64 on the device."""
    executed = executed_activation(capability, weight.scheme)
    quantized = x.double().cpu().numpy()
    if executed is not None:
        quantized = oracle.quantize_activation(
            x.float().cpu().numpy(), executed, input_scale=weight.tensors.get("input_scale")
        )
    chosen = np.linspace(0, len(quantized) - 1, min(64, len(quantized))).astype(int)
    matrix = torch.from_numpy(oracle.dequantize(weight)).cuda()
    wanted = torch.from_numpy(quantized[chosen]).cuda() @ matrix.t()
    return float((found[torch.from_numpy(chosen).cuda()].double() - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["12288x3072", "4096x4096"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 4096])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--prefer", choices=["memory", "speed"], default="memory")
    parser.add_argument("--kernels", nargs="+", default=[])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if module := os.environ.get("OMNIPLAT_VLLM_OPS"):
        import_module(module)
    torch.manual_seed(0)
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
    }
    if not arguments.json:
        print(" ".join(f"{key}={value}" for key, value in machine.items()))
        print(
            "| scheme | kernel | shape | M | x BF16 | least to largest | us | BF16 us | host us | BF16 host us "
            "| error |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    results = []
    for shape in arguments.shapes:
        n, k = (int(size) for size in shape.split("x"))
        for scheme in arguments.schemes:
            spec = LayerSpec("bench", "linear", n, k, Scheme.parse(scheme))
            for capability in capabilities_of(spec, arguments.prefer, arguments.kernels):
                found = bench(spec, capability, arguments.rows, arguments.rounds)
                results += found
                if not arguments.json:
                    print("\n".join(line_of(result) for result in found), flush=True)
    if arguments.json:
        print(json.dumps({"machine": machine, "results": [asdict(r) for r in results]}, indent=2))


def line_of(r: Result) -> str:
    """A line of the table."""
    ratio = f"{r.ratio[0]:.2f} | {r.ratio[1]:.2f} to {r.ratio[2]:.2f}"
    hosts = " | ".join("-" if h != h else f"{h:.0f}" for h in (r.host_microseconds, r.bf16_host_microseconds))
    return (
        f"| {r.scheme} | {r.kernel} | {r.shape} | {r.rows} | {ratio} | {r.microseconds:.1f} | "
        f"{r.bf16_microseconds:.1f} | {hosts} | {r.error:.1e} |"
    )


if __name__ == "__main__":
    main()
