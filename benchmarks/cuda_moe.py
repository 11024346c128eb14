"""Time of the cuda backend's layers of experts as a ratio to a BF16 layer over `grouped_mm`, measured in the same run.

    python benchmarks/cuda_moe.py [--schemes mxfp4/mxfp4 ...] [--prefer memory|speed] [--rows 1 16 32 256 4096]
                                  [--kernels NAME ...] [--rounds 7] [--json]

HunyuanImage-3's layer: 64 experts, 8 of them per token, hidden size 4096, intermediate size 3072, random routing. Both
layers sort rows by expert, run w13, the gated activation and w2, and add up the experts of a token, from CUDA graphs;
quantizing is included. The layers take turns, round by round; a ratio is taken within a round. Each output is compared
with a float64 layer over the dequantized weights and quantized activations, as relative L2 over 8 tokens. `--kernels`
measures each of the kernels named that takes a scheme, in place of the one that a plan chooses.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.nn.functional as F
from cuda_linear import capabilities_of, graph_of, replayed

from omniplat.layer import LayerSpec, MoeSpec
from omniplat.portable.ahead import compile_kernels
from omniplat.portable.eight_bits import as_numbers
from omniplat.portable.mx_grid import regroup_rows_torch
from omniplat.portable.quantize import quantize_rows_torch
from omniplat.portable.quantize_groups import quantize_groups_torch
from omniplat.portable.routing import sort_by_expert, weighted_sum
from omniplat.portable.word_weights import code_values
from omniplat.runtime.kernel import MoeKernel, load_kernel
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import Scheme, parse_activation_id

EXPERTS, TOP, HIDDEN, INNER = 64, 8, 4096, 3072
SCHEMES = ("fp8-channel/fp8-token", "mxfp8/mxfp8", "mxfp4/mxfp4")


@dataclass(frozen=True)
class Result:
    """`ratio` is BF16's time over the layer's (median, least, largest), `error` against the float64 layer."""

    scheme: str
    kernel: str
    rows: int
    ratio: tuple[float, float, float]
    microseconds: float
    bf16_microseconds: float
    error: float


def quantized(values: torch.Tensor, scheme: Scheme) -> tuple[WeightTensors, torch.Tensor]:
    """Round to nearest, on the device: the weight, and what it stands for in bf16."""
    experts, n, k = values.shape
    rows = values.reshape(-1, k)
    if scheme.weight_id in ("fp8-channel", "int8-channel"):
        by_row = parse_activation_id(scheme.weight_id.replace("channel", "token"))
        codes, scale = quantize_rows_torch(rows, by_row, None, None)  # type: ignore[arg-type]
        codes = as_numbers(codes)
        tensors = {"codes": codes.view(experts, n, k), "scale": scale.view(experts, n, 1)}
        dense = codes.float() * scale
    elif scheme.weight_id == "fp8-block128x128":
        blocks = values.float().view(experts, n // 128, 128, k // 128, 128)
        scale = blocks.abs().amax((2, 4), keepdim=True) / 448
        codes = (blocks / scale).to(torch.float8_e4m3fn)
        tensors = {"codes": codes.view(experts, n, k), "scale": scale.view(experts, n // 128, k // 128)}
        dense = codes.float() * scale
    elif scheme.weight.element == "nf4":
        groups = rows.float().view(len(rows), -1, scheme.weight.group_size)
        scale = groups.abs().amax(2, keepdim=True)
        table = code_values("nf4").to(values.device)
        index = torch.bucketize(groups / scale, (table[1:] + table[:-1]) / 2)
        nibbles = index.to(torch.uint8).view(len(rows), k)
        dense = table[index] * scale
        codes = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
        tensors = {"codes": codes.view(experts, n, -1), "scale": scale.view(experts, n, -1)}
    elif scheme.weight_id not in ("mxfp4", "mxfp8"):
        raise SystemExit(f"cuda_moe makes no {scheme.weight_id} weights")
    else:
        groups = rows.float().view(len(rows), -1, 32)
        exponent = torch.floor(torch.log2(groups.abs().amax(2, keepdim=True))) - (2 if scheme.weight.bits == 4 else 8)
        scaled = groups / torch.exp2(exponent)
        if scheme.weight.bits == 4:
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=values.device)
            bounds = (table[1:] + table[:-1]) / 2
            index = torch.bucketize(scaled.abs(), bounds)
            nibbles = (index | ((scaled < 0).long() << 3)).to(torch.uint8).view(len(rows), k)
            codes = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
            dense = table[index].copysign(scaled) * torch.exp2(exponent)
        else:
            eights = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
            codes, dense = eights.view(len(rows), k), eights.float() * torch.exp2(exponent)
        scale = (exponent.squeeze(2) + 127).to(torch.uint8)
        tensors = {"codes": codes.view(experts, n, -1), "scale": scale.view(experts, n, -1)}
    return WeightTensors(scheme, n, k, tensors, experts), dense.view(experts, n, k).bfloat16()


def bf16_layer(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same steps as the quantized layers', with BF16 products."""
    order = sort_by_expert(ids, expert_map, len(w13))
    both = F.grouped_mm(x[order.rows], w13.transpose(1, 2), offs=order.ends)
    gate, up = both.chunk(2, dim=1)
    out = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=order.ends)
    if not x.is_cuda:
        return weighted_sum(out, order.place, weights, order.ends[-1:], torch.bfloat16)
    from omniplat.portable.experts_triton import combine

    return combine(out, order.place, weights, order.ends[-1:], torch.bfloat16)


def error_of(
    y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor,
    scheme: Scheme, executes: str,
) -> float:  # fmt: skip
    """Relative L2 of the first 8 tokens."""

    quant = parse_activation_id(executes)

    def seen(values: torch.Tensor) -> torch.Tensor:
        if quant is None:
            return values.double()
        if quant.is_microscaled:
            codes, scale = regroup_rows_torch(values, quant, None)
        elif quant.granularity == "group":
            codes, scale = quantize_groups_torch(values, quant, None)
            scale = scale.t().repeat_interleave(quant.group_size, 1)[:, : values.shape[1]]
        else:
            codes, scale = quantize_rows_torch(values, quant, None, None)
        return as_numbers(codes).double() * scale.double()

    few = min(8, len(x))
    wanted = torch.zeros(few, HIDDEN, dtype=torch.float64, device=x.device)
    rows = seen(x[:few])
    for token in range(few):
        for slot in range(TOP):
            expert = int(ids[token, slot])
            gate, up = (rows[token] @ w13[expert].double().t()).chunk(2)
            hidden = seen((F.silu(gate) * up).float()[None])[0]
            wanted[token] += weights[token, slot].double() * (hidden @ w2[expert].double().t())
    return float((y[:few].double() - wanted).norm() / wanted.norm())


def bench(scheme_id: str, rows: list[int], rounds: int, prefer: str, kernels: list[str]) -> list[Result]:
    scheme = Scheme.parse(scheme_id)
    spec = LayerSpec("bench", "moe", HIDDEN, HIDDEN, scheme, moe=MoeSpec(EXPERTS, INNER, top_k=TOP))
    first, w13 = quantized(torch.randn(EXPERTS, 2 * INNER, HIDDEN, device="cuda") * 0.02, scheme)
    second, w2 = quantized(torch.randn(EXPERTS, HIDDEN, INNER, device="cuda") * 0.02, scheme)
    results = []
    for capability in capabilities_of(spec, prefer, kernels):
        kernel = load_kernel(capability.impl)
        assert isinstance(kernel, MoeKernel)
        layer = QuantExperts(spec, kernel, kernel.prepare(first, second, spec))
        executes = capability.executes or scheme.activation_id
        results += measured(layer, scheme, executes, w13, w2, rows, rounds)
    return results


def measured(
    layer: QuantExperts,
    scheme: Scheme,
    executes: str,
    w13: torch.Tensor,
    w2: torch.Tensor,
    rows: list[int],
    rounds: int,
) -> list[Result]:
    """One kernel, for each number of rows."""
    compile_kernels([layer], rows)
    results = []
    for count in rows:
        x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
        ids = torch.rand(count, EXPERTS, device="cuda").topk(TOP, 1).indices.to(torch.int32)
        weights = torch.rand(count, TOP, device="cuda")
        with torch.inference_mode():
            runs = (
                lambda i, x=x, ids=ids, weights=weights: bf16_layer(x, ids, weights, w13, w2),
                lambda i, x=x, ids=ids, weights=weights: layer(x, ids, weights),
            )
            graphs = [graph_of(run, 1) for run in runs]
            replays = 3 if count > 1024 else 20
            for graph in graphs:
                replayed(graph, 1, replays)
            times = [[replayed(graph, 1, replays) for graph in graphs] for _ in range(rounds)]
            error = error_of(runs[1](0), x, ids, weights, w13, w2, scheme, executes)
        ratios = sorted(base / own for base, own in times)
        results.append(
            Result(
                scheme.id,
                layer.kernel.name,
                count,
                (median(ratios), ratios[0], ratios[-1]),
                median(own for _, own in times),
                median(base for base, _ in times),
                error,
            )
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 256, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prefer", choices=["memory", "speed"], default="speed")
    parser.add_argument("--kernels", nargs="+", default=[])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = [
        r
        for scheme in arguments.schemes
        for r in bench(scheme, arguments.rows, arguments.rounds, arguments.prefer, arguments.kernels)
    ]
    if arguments.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "results": [asdict(r) for r in results]}, indent=2))
        return
    print(f"device={torch.cuda.get_device_name()} torch={torch.__version__} cuda={torch.version.cuda}")
    print("| scheme | kernel | M | x BF16 | least to largest | us | BF16 us | error |")
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        print(f"| {r.scheme} | {r.kernel} | {r.rows} | {r.ratio[0]:.2f} | {r.ratio[1]:.2f} to {r.ratio[2]:.2f} | "
              f"{r.microseconds:.0f} | {r.bf16_microseconds:.0f} | {r.error:.1e} |")  # fmt: skip


if __name__ == "__main__":
    main()
