"""Linear layers over bitsandbytes' 4-bit operator against the oracle: on CUDA, and on the CPU, where it has one too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from omniplat.canonical import CanonicalWeight
from omniplat.conformance.weights import random_weight
from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme
from tests.backends.cuda.building import check, each_device, layer_of
from tests.support.triton import needs_cuda

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
KERNEL = "bitsandbytes_4bit"
each_scheme = pytest.mark.parametrize("scheme", ["nf4-b64/a16", "fp4bnb-b64/a16", "nf4-b128/a16"])


def weight_of(scheme: str, n: int = 48, k: int = 256) -> CanonicalWeight:
    return random_weight(Scheme.parse(scheme), n, k, np.random.default_rng(0))


@each_device
@each_scheme
@pytest.mark.parametrize(("n", "k"), [(48, 256), (1024, 2048)])
def test_a_layer_computes_what_the_oracle_does(scheme: str, n: int, k: int, device: str) -> None:
    weight = weight_of(scheme, n, k)
    layer = layer_of(KERNEL, weight, device)
    torch.manual_seed(0)
    assert layer(torch.empty(0, k, dtype=torch.bfloat16, device=device)).shape == (0, n)
    # of 4, 5 and 1537 rows bitsandbytes takes another path
    for rows in (1, 4, 5, 33) if device == "cpu" or n > 48 else (1, 4, 5, 33, 1537):
        check(layer, weight, torch.randn(rows, k, device=device).bfloat16())
    check(layer, weight, torch.randn(2, 3, 2 * k, device=device).bfloat16()[..., ::2])


@each_scheme
def test_codes_are_bitsandbytes_own(scheme: str) -> None:
    weight = weight_of(scheme)
    layer = layer_of(KERNEL, weight, "cpu")
    config = layer.config
    found = torch.ops.bitsandbytes.dequantize_4bit(
        layer.codes, layer.absmax.reshape(-1), config.blocksize, config.quant_type, (48, 256), torch.float32
    )
    from omniplat import oracle

    np.testing.assert_allclose(found.numpy(), oracle.dequantize(weight), rtol=1e-5, atol=1e-7)


@each_device
def test_biases_of_any_dtype(device: str) -> None:
    bare = weight_of("nf4-b64/a16")
    spec = LayerSpec("layer", "linear", 48, 256, bare.scheme, bias=True)
    kernel = layer_of(KERNEL, bare, device).kernel
    x = torch.randn(5, 256, device=device).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        bias = torch.linspace(-3, 3, 48, device=device).to(dtype)
        prepared = kernel.prepare(to_torch(bare, device=torch.device(device)), spec)
        layer = QuantLinear(spec, kernel, prepared, bias)
        weight = replace(bare, tensors={**bare.tensors, "bias": bias.float().cpu().numpy()})
        check(layer, weight, x)


@each_device
def test_it_traces_whole(device: str) -> None:
    layer = layer_of(KERNEL, weight_of("nf4-b64/a16"), device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(9, 256, device=device).bfloat16()
    for rows in (9, 3, 1):
        torch.testing.assert_close(compiled(x[:rows]), layer(x[:rows]), rtol=0, atol=0)


@needs_cuda
def test_a_graph_replays() -> None:
    layer = layer_of(KERNEL, weight_of("nf4-b64/a16"), "cuda")
    x = torch.randn(5, 256, device="cuda").bfloat16()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn(5, 256, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, layer(x), rtol=0, atol=0)


def test_other_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedCombinationError, match="needs weight"):
        layer_of(KERNEL, weight_of("nf4-b16/a16"), "cpu")
