"""Time of the cpu backend's linear layers as a ratio to float32 `F.linear`, measured in the same run.

    python benchmarks/cpu_linear.py [--size 2048] [--rows 1 16 256] [--threads 1] [--schemes mxfp8/mxfp8 ...] [--json]

Baseline and layer are timed in turn, round by round, and the ratio of each pair is taken before the median, so that
other load on the machine moves both. Ratios below 1 are faster than float32. A bf16 baseline stands beside it.
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
from omniplat.capability import matches
from omniplat.layer import LayerSpec
from omniplat.reference.spec import SPEC
from omniplat.runtime.kernel import LinearKernel, load_kernel
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme

SCHEMES = (
    *("bf16/a16", "fp8-channel/a16", "fp8-channel/fp8-token", "fp8-block128x128/fp8-g128"),
    *("int8-channel/a16", "int8-channel/int8-token", "int4-g128/a16", "uint4-g128/a16"),
    *("mxfp8/a16", "mxfp8/mxfp8", "mxfp4/a16", "mxfp4/mxfp4", "nvfp4/a16", "nvfp4/nvfp4"),
)


@dataclass(frozen=True)
class Result:
    """`ratio` is the layer's time over float32's, `milliseconds` the layer's own, `resident` bytes per weight."""

    scheme: str
    kernel: str
    rows: int
    ratio: float
    bf16_ratio: float
    milliseconds: float
    resident: float


def layer_of(scheme: Scheme, size: int) -> QuantLinear:
    """A square layer of Gaussian weights, with the kernel that the plan would take."""
    values = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    if scheme.weight.element == "bf16":
        weight = CanonicalWeight(scheme, size, size, {"codes": values.astype(ml_dtypes.bfloat16)})
    else:
        weight = replace(oracle.quantize_weight(values, scheme.weight), scheme=scheme)
    spec = LayerSpec("bench", "linear", size, size, scheme)
    kernel = kernel_of(scheme)
    return QuantLinear(spec, kernel, kernel.prepare(to_torch(weight), spec))


def kernel_of(scheme: Scheme) -> LinearKernel[object]:
    fitting = [
        c
        for c in SPEC.capabilities
        if c.op == "linear" and matches(c.weights, scheme.weight_id) and matches(c.activations, scheme.activation_id)
    ]
    kernel = load_kernel(max(fitting, key=lambda c: c.priority).impl)
    assert isinstance(kernel, LinearKernel)
    return kernel


def bench(scheme_id: str, size: int, rows: Sequence[int], rounds: int) -> list[Result]:
    layer = layer_of(Scheme.parse(scheme_id), size)
    weight = torch.randn(size, size)
    half = weight.to(torch.bfloat16)
    results = []
    for count in rows:
        x = torch.randn(count, size)
        narrow = x.to(torch.bfloat16)
        runs: tuple[Callable[[], object], ...] = (
            lambda x=x: F.linear(x, weight),
            lambda narrow=narrow: F.linear(narrow, half),
            lambda narrow=narrow: layer(narrow),
        )
        calls = max(1, 64 // count)
        times = times_in_turn(runs, calls, rounds)
        ratio = median(own / base for base, _, own in times)
        bf16 = median(own / base for _, base, own in times)
        milliseconds = 1e3 * median(own for _, _, own in times)
        results.append(
            Result(scheme_id, layer.kernel.name, count, ratio, bf16, milliseconds, layer.nbytes / size / size)
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    described = machine(arguments.threads) | {"size": arguments.size}
    results = [r for s in arguments.schemes for r in bench(s, arguments.size, arguments.rows, arguments.rounds)]
    if arguments.json:
        print(json.dumps({"machine": described, "results": [asdict(r) for r in results]}, indent=2))
        return
    print(" ".join(f"{key}={value}" for key, value in described.items()))
    print(f"{'scheme':28s} {'kernel':16s} {'rows':>5s} {'x f32':>7s} {'x bf16':>7s} {'ms':>9s} {'B/weight':>9s}")
    for r in results:
        figures = f"{r.rows:5d} {r.ratio:7.2f} {r.bf16_ratio:7.2f} {r.milliseconds:9.3f} {r.resident:9.3f}"
        print(f"{r.scheme:28s} {r.kernel:16s} {figures}")


if __name__ == "__main__":
    main()
