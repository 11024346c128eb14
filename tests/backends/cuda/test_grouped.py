"""Experts over the grouped fp8 product, on CUDA and with torch's plain products in its place on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from omniplat_cuda.spec import SPEC

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.conformance import expected
from omniplat.conformance.build import make_routing
from omniplat.device import parse_device
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.match import Policy, match
from omniplat.oracle import moe as oracle_moe
from omniplat.runtime.kernel import MoeKernel, load_kernel
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme
from tests.backends.cuda.building import CAPABILITIES, each_device
from tests.support.triton import needs_cuda

EXPERTS, HIDDEN, INNER, TOP = 6, 128, 96, 2
SCHEMES = [
    ("scaled_grouped_mm", "fp8-channel/fp8-token"),
    ("scaled_grouped_mm", "fp8-tensor/fp8-token"),
    ("scaled_grouped_mm_mxfp8", "mxfp8/mxfp8"),
    ("scaled_grouped_mm_mxfp4", "mxfp4/mxfp4"),
]
each_scheme = pytest.mark.parametrize(("kernel", "scheme"), SCHEMES)


def weights_of(scheme: str) -> tuple[CanonicalWeight, CanonicalWeight]:
    """w13 and w2, stacked."""
    rng = np.random.default_rng(0)
    parsed = Scheme.parse(scheme)
    shapes = ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    first, second = (
        replace(oracle.quantize_weight(rng.standard_normal(shape).astype(np.float32) / 8, parsed.weight), scheme=parsed)
        for shape in shapes
    )
    return first, second


def layer_of(kernel: str, w13: CanonicalWeight, w2: CanonicalWeight, device: str, **moe: object) -> QuantExperts:
    spec = LayerSpec("experts", "moe", HIDDEN, HIDDEN, w13.scheme, moe=MoeSpec(EXPERTS, INNER, **moe))  # type: ignore[arg-type]
    built = load_kernel(CAPABILITIES[kernel].impl)
    assert isinstance(built, MoeKernel)
    assert built.name == kernel
    tensors = [to_torch(weight, experts=EXPERTS, device=torch.device(device)) for weight in (w13, w2)]
    return QuantExperts(spec, built, built.prepare(*tensors, spec))


def run(layer: QuantExperts, x: np.ndarray, routing: expected.Routing, device: str) -> np.ndarray:
    ids = torch.from_numpy(routing.ids.astype(np.int32)).to(device)
    weights = torch.from_numpy(routing.weights.astype(np.float32)).to(device)
    y = layer(torch.from_numpy(x).to(device).bfloat16(), ids, weights)
    assert y.dtype == torch.bfloat16
    return y.double().cpu().numpy()


def check(found: np.ndarray, wanted: expected.Expected) -> None:
    """Much nearer to the oracle's layer than that is to one without quantized activations. What lies between: the
    middle is rounded to bf16, which moves some values to the next code."""
    own = np.linalg.norm(wanted.y - wanted.unquantized)
    assert np.linalg.norm(found - wanted.y) < 0.6 * own
    assert np.linalg.norm(found - wanted.unquantized) > 0.6 * own


def rounded_input(rows: int) -> np.ndarray:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16().float().numpy()


@each_device
@each_scheme
@pytest.mark.parametrize("rows", [7, 65])
def test_a_layer_computes_what_the_oracle_does(kernel: str, scheme: str, rows: int, device: str) -> None:
    w13, w2 = weights_of(scheme)
    x, routing = rounded_input(rows), make_routing(rows, EXPERTS, TOP, np.random.default_rng(1))
    wanted = expected.experts(x, w13, w2, routing, CAPABILITIES[kernel], "bf16")
    check(run(layer_of(kernel, w13, w2, device), x, routing, device), wanted)


@each_device
@each_scheme
def test_experts_of_other_ranks_and_of_nobody_contribute_nothing(kernel: str, scheme: str, device: str) -> None:
    w13, w2 = weights_of(scheme)
    layer = layer_of(kernel, w13, w2, device)
    x, routing = rounded_input(33), make_routing(33, EXPERTS, TOP, np.random.default_rng(2))
    ids = np.where(routing.ids == 3, -1, routing.ids)
    known = expected.Routing(ids, routing.weights)
    check(run(layer, x, known, device), expected.experts(x, w13, w2, known, CAPABILITIES[kernel], "bf16"))
    # the same through a map: expert e is number 2 * e globally, and 3 and all odd ones are elsewhere
    mapping = torch.full((2 * EXPERTS,), -1, dtype=torch.int32, device=device)
    mapping[::2] = torch.arange(EXPERTS, dtype=torch.int32, device=device)
    mapping[6] = -1
    arguments = (
        torch.from_numpy(x).to(device).bfloat16(),
        torch.from_numpy(2 * routing.ids.astype(np.int32)).to(device),
    )
    y = layer(*arguments, torch.from_numpy(routing.weights.astype(np.float32)).to(device), mapping)
    np.testing.assert_array_equal(y.double().cpu().numpy(), run(layer, x, known, device))


@each_device
@each_scheme
def test_a_token_alone_is_what_it_is_among_others(kernel: str, scheme: str, device: str) -> None:
    layer = layer_of(kernel, *weights_of(scheme), device)
    x, routing = rounded_input(7), make_routing(7, EXPERTS, TOP, np.random.default_rng(4))
    alone = run(layer, x[3:4], expected.Routing(routing.ids[3:4], routing.weights[3:4]), device)
    np.testing.assert_allclose(alone, run(layer, x, routing, device)[3:4], rtol=2**-7, atol=2**-7 * np.abs(alone).max())


@each_device
@each_scheme
def test_no_rows(kernel: str, scheme: str, device: str) -> None:
    layer = layer_of(kernel, *weights_of(scheme), device)
    empty = torch.empty(0, TOP, device=device)
    x = torch.empty(0, HIDDEN, dtype=torch.bfloat16, device=device)
    assert layer(x, empty.to(torch.int32), empty).shape == (0, HIDDEN)


@each_device
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu-oai"])
def test_other_activations(activation: str, device: str) -> None:
    w13, w2 = weights_of("fp8-channel/fp8-token")
    layer = layer_of("scaled_grouped_mm", w13, w2, device, activation=activation, limit=2.0, alpha=1.5)
    x, routing = rounded_input(9), make_routing(9, EXPERTS, TOP, np.random.default_rng(3))
    moe = MoeSpec(EXPERTS, INNER, activation, limit=2.0, alpha=1.5)
    wanted = oracle_moe.experts(x, routing.ids, routing.weights, w13, w2, moe)
    found = run(layer, x, routing, device)
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


@each_device
@each_scheme
def test_it_is_registered_and_traces_whole(kernel: str, scheme: str, device: str) -> None:
    layer = layer_of(kernel, *weights_of(scheme), device)
    ids = torch.randint(0, EXPERTS, (9, TOP), dtype=torch.int32, device=device)
    x, weights = torch.randn(9, HIDDEN, device=device).bfloat16(), torch.rand(9, TOP, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, ids, weights), layer(x, ids, weights), rtol=0, atol=0)


@needs_cuda
@each_scheme
def test_a_graph_replays(kernel: str, scheme: str) -> None:
    layer = layer_of(kernel, *weights_of(scheme), "cuda")
    ids = torch.randint(0, EXPERTS, (9, TOP), dtype=torch.int32, device="cuda")
    x, weights = torch.randn(9, HIDDEN, device="cuda").bfloat16(), torch.rand(9, TOP, device="cuda")
    layer(x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, ids, weights)
    ids.copy_(torch.randint(0, EXPERTS, (9, TOP), dtype=torch.int32, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, layer(x, ids, weights), rtol=0, atol=0)


def test_nan_bias_and_other_schemes_are_refused() -> None:
    w13, w2 = weights_of("fp8-channel/fp8-token")
    codes = w13.tensors["codes"].copy()
    codes.view(np.uint8)[2, 3, 5] = 0x7F
    with pytest.raises(InvalidCheckpointError, match="holds NaN"):
        layer_of("scaled_grouped_mm", replace(w13, tensors={**w13.tensors, "codes": codes}), w2, "cpu")
    bias = np.zeros((EXPERTS, HIDDEN), np.float32)
    with pytest.raises(UnsupportedCombinationError, match="without bias"):
        layer_of("scaled_grouped_mm", w13, replace(w2, tensors={**w2.tensors, "bias": bias}), "cpu")
    with pytest.raises(UnsupportedCombinationError, match="needs"):
        layer_of("scaled_grouped_mm", *weights_of("int8-channel/int8-token"), "cpu")


@pytest.mark.parametrize(("kernel", "scheme"), SCHEMES)
def test_plans_take_these_kernels_on_hopper(kernel: str, scheme: str) -> None:
    spec = LayerSpec("experts", "moe", 4096, 4096, Scheme.parse(scheme), moe=MoeSpec(64, 3072))
    chosen = match(spec, SPEC.capabilities, parse_device("cuda:sm90"), Policy(prefer="speed")).chosen
    assert chosen is not None
    assert chosen.capability.name == kernel
