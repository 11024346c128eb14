"""How near 8-bit layers of the cuda backend come to exact sums, by the length of a row and with outliers in the input.

    python benchmarks/cuda_sums.py [--columns 3072 4096 12288 18432] [--factors 1 10 100 5000] [--device cuda]

Inputs and weights are Gaussian; then one token in 16, or one channel in 64, is larger by a factor. Two figures for each
layer, as relative L2 over 64 tokens and 128 rows of the weight, against float64 products:

* sums: of what the layer multiplies, its codes times their scales. A bf16 output costs 1.7e-3 by itself.
* inputs: of the weight that it stands for and the inputs as they were, which is what quantizing them costs, too.

`_scaled_mm` is torch's product of the same codes with f32 outputs and scales of 1, with fast accumulation and without.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from omniplat_cuda.spec import SPEC

from omniplat import oracle
from omniplat.conformance.expected import executed_activation
from omniplat.layer import LayerSpec
from omniplat.portable.mx_grid import regroup_rows_torch
from omniplat.portable.quantize import quantize_rows_torch
from omniplat.runtime.kernel import LinearKernel, load_kernel
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme

LAYERS = (
    ("fp8-channel/fp8-token", "scaled_mm_row"),
    ("mxfp8/mxfp8", "scaled_mm_mxfp8"),
    ("mxfp4/mxfp4", "scaled_mm_mxfp4"),
    ("int8-channel/int8-token", "int_mm"),
)
TOKENS, ROWS = 64, 128


def inputs(columns: int, factors: list[int], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(TOKENS, columns, device=device, generator=generator)
    for factor in factors:
        if factor == 1:
            yield "Gaussian", x.bfloat16()
            continue
        tokens, channels = x.clone(), x.clone()
        tokens[::16] *= factor
        channels[:, ::64] *= factor
        yield f"tokens x{factor}", tokens.bfloat16()
        yield f"channels x{factor}", channels.bfloat16()


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def layers(scheme_id: str, name: str, columns: int, factors: list[int], device: torch.device) -> Iterator[str]:
    scheme = Scheme.parse(scheme_id)
    capability = next(capability for capability in SPEC.capabilities if capability.name == name)
    values = np.random.default_rng(1).standard_normal((ROWS, columns)).astype(np.float32)
    weight = replace(oracle.quantize_weight(values, scheme.weight), scheme=scheme)
    kernel = load_kernel(capability.impl)
    assert isinstance(kernel, LinearKernel)
    spec = LayerSpec("bench", "linear", ROWS, columns, scheme)
    layer = QuantLinear(spec, kernel, kernel.prepare(to_torch(weight, device=device), spec))
    dense = torch.from_numpy(oracle.dequantize(weight)).to(device)
    quant = executed_activation(capability, scheme)
    assert quant is not None
    for label, x in inputs(columns, factors, device):
        on_grid = quant.scale_format == "e8m0"
        codes, scale = regroup_rows_torch(x, quant, None) if on_grid else quantize_rows_torch(x, quant, None, None)
        numbers = codes.view(torch.int8 if quant.is_integer else torch.float8_e4m3fn).double()
        y = layer(x)
        sums, exact = apart(y, numbers * scale.double() @ dense.t()), apart(y, x.double() @ dense.t())
        yield f"| {columns} | {label} | {scheme_id} | {name} | {sums:.1e} | {exact:.1e} |"


def products(columns: int, device: torch.device) -> str:
    x, w = (torch.randn(size, columns, device=device).to(torch.float8_e4m3fn) for size in (256, 256))
    one = torch.ones((), device=device)
    wanted = x.double() @ w.double().t()
    errors = [
        apart(torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast), wanted)
        for fast in (True, False)
    ]
    return f"| {columns} | {errors[0]:.1e} | {errors[1]:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="+", default=[3072, 4096, 12288, 18432])
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 10, 100, 5000])
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    print("| K | _scaled_mm, fast accumulation | promoted to f32 |\n|---|---|---|", flush=True)
    for columns in arguments.columns:
        print(products(columns, device), flush=True)
    print("\n| K | input | scheme | kernel | sums | inputs |\n|---|---|---|---|---|---|", flush=True)
    for columns in arguments.columns:
        for scheme_id, name in LAYERS:
            for line in layers(scheme_id, name, columns, arguments.factors, device):
                print(line, flush=True)


if __name__ == "__main__":
    main()
