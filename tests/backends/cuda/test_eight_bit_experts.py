"""Experts in 8 bits with the declared inputs: fp8 in blocks, fp8 and int8 by rows, against the oracle.

On CUDA the operator takes Triton's kernels, on a CPU plain torch; under the interpreter the two products run in Triton.
"""

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
from tests.backends.cuda.building import CAPABILITIES, DTYPES, each_device
from tests.support.routing import tiles_of
from tests.support.triton import TRITON_DEVICE, needs_cuda, needs_triton

#: Neither size is a multiple of a block or of a tile.
EXPERTS, HIDDEN, INNER, TOP = 5, 208, 176, 2
SCHEMES = [
    ("portable_moe_fp8_block", "fp8-block128x128/fp8-g128"),
    ("portable_moe_fp8_block", "fp8-block16x128/fp8-g128"),
    ("portable_moe_fp8", "fp8-channel/fp8-token"),
    ("portable_moe_fp8", "fp8-tensor/fp8-token"),
    ("portable_moe_int8", "int8-channel/int8-token"),
    ("portable_moe_int8", "int8-tensor/int8-token"),
]
each_scheme = pytest.mark.parametrize(("kernel", "scheme"), SCHEMES)


def weights_of(scheme: str, *, power: bool = False) -> tuple[CanonicalWeight, CanonicalWeight]:
    """w13 and w2, stacked; experts are of different sizes. With `power` scales of the input are powers of two."""
    rng = np.random.default_rng(0)
    parsed = Scheme.parse(scheme)
    if power:
        assert parsed.activation is not None
        parsed = parsed.with_activation(replace(parsed.activation, scale_format="e8m0", scale_rule="ceil"))
    sizes = np.exp2(np.arange(EXPERTS) - 5.0)[:, None, None]
    first, second = (
        replace(
            oracle.quantize_weight((rng.standard_normal(shape) * sizes).astype(np.float32), parsed.weight),
            scheme=parsed,
        )
        for shape in ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    )
    return first, second


def layer_of(
    kernel: str, w13: CanonicalWeight, w2: CanonicalWeight, device: str, dtype: str = "bf16", **moe: object
) -> QuantExperts:
    spec = LayerSpec("experts", "moe", HIDDEN, HIDDEN, w13.scheme, dtype=dtype, moe=MoeSpec(EXPERTS, INNER, **moe))  # type: ignore[arg-type]
    built = load_kernel(CAPABILITIES[kernel].impl)
    assert isinstance(built, MoeKernel)
    assert built.name == kernel
    tensors = [to_torch(weight, experts=EXPERTS, device=torch.device(device)) for weight in (w13, w2)]
    return QuantExperts(spec, built, built.prepare(*tensors, spec))


def tokens(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Columns from 128 on are 8 times as large as the others: one scale for both would be seen."""
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
    x[:, 128:] *= 8
    return x.to(dtype)


def run(layer: QuantExperts, x: torch.Tensor, routing: expected.Routing, device: str) -> np.ndarray:
    ids = torch.from_numpy(routing.ids.astype(np.int32)).to(device)
    y = layer(x.to(device), ids, torch.from_numpy(routing.weights.astype(np.float32)).to(device))
    assert y.dtype == x.dtype
    return y.double().cpu().numpy()


def check(found: np.ndarray, wanted: expected.Expected, *, is_exact: bool = False) -> None:
    """Much nearer to the oracle's layer than that is to one without quantized inputs. What lies between: middles that
    are rounded to 16 bits, or to what FP8 units keep of a sum, which moves some of their values to the next code. With
    `is_exact` nothing of the kind happens."""
    own = np.linalg.norm(wanted.y - wanted.unquantized)
    assert np.linalg.norm(found - wanted.y) < (0.1 if is_exact else 0.7) * own
    assert np.linalg.norm(found - wanted.unquantized) > 0.6 * own


@each_device
@each_scheme
@pytest.mark.parametrize("rows", [1, 7, 65])
def test_a_layer_computes_what_the_oracle_does(kernel: str, scheme: str, rows: int, device: str) -> None:
    w13, w2 = weights_of(scheme)
    routing = make_routing(rows, EXPERTS, TOP, np.random.default_rng(1))
    for dtype, name in DTYPES.items():
        x = tokens(rows, dtype)
        wanted = expected.experts(x.float().numpy(), w13, w2, routing, CAPABILITIES[kernel], name)
        is_exact = dtype == torch.float32 and (device == "cpu" or kernel == "portable_moe_int8")
        check(run(layer_of(kernel, w13, w2, device, name), x, routing, device), wanted, is_exact=is_exact)


@each_device
def test_scales_of_inputs_that_are_powers_of_two(device: str) -> None:
    w13, w2 = weights_of("fp8-block128x128/fp8-g128", power=True)
    x, routing = tokens(9, torch.float32), make_routing(9, EXPERTS, TOP, np.random.default_rng(1))
    wanted = expected.experts(x.numpy(), w13, w2, routing, CAPABILITIES["portable_moe_fp8_block"], "f32")
    found = run(layer_of("portable_moe_fp8_block", w13, w2, device, "f32"), x, routing, device)
    check(found, wanted, is_exact=device == "cpu")


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
@each_scheme
@pytest.mark.parametrize("rows", [3, 70])
def test_the_products_in_triton(kernel: str, scheme: str, rows: int, device: str) -> None:
    """Both products, with rows of nobody, against those of the plain form. FP8 units keep less of a sum than f32, which
    moves some values of the middle to the next code."""
    from omniplat.portable import eight_bit_experts as form
    from omniplat.portable.experts_triton import tokens_of
    from omniplat.portable.routing import sort_by_expert
    from omniplat.portable.scaled_product_triton import tile_of_experts
    from omniplat.runtime.quant_text import decode_quant

    layer = layer_of(kernel, *weights_of(scheme), device)
    held, config = dict(layer.named_buffers()), layer.config
    up = form._Weight(held["w13_codes"], held["w13_scale"], None, config.w13_rows)
    down = form._Weight(held["w2_codes"], held["w2_scale"], None, config.w2_rows)
    middle = form._Middle(decode_quant(config.second), "gelu", 0.0, 1.0)
    ids = torch.from_numpy(make_routing(rows, EXPERTS, TOP, np.random.default_rng(2)).ids).to(device)
    ids[::3, 0] = -1
    order = sort_by_expert(ids, None, EXPERTS)
    codes, scale = form.quantized(tokens(rows).to(device), decode_quant(config.first), None)
    tile = tile_of_experts(tokens_of(ids.numel(), EXPERTS, ids.device))
    tiles = tiles_of(order, tile.tokens)
    found = form._in_triton(codes, scale, torch.float32, tile, tiles, up, middle, down)
    both = form._by_expert(codes[order.rows], scale[:, order.rows], up, order.ends)
    plain = form._by_expert(*form._activated(both, middle), down, order.ends)
    count = int(order.ends[-1])
    assert count < len(order.rows)
    error = torch.linalg.norm(found[:count] - plain[:count]) / torch.linalg.norm(plain[:count])
    assert error < (0.02 if device == "cuda" else 1e-3)


@each_device
@each_scheme
def test_experts_of_other_ranks_and_of_nobody_contribute_nothing(kernel: str, scheme: str, device: str) -> None:
    w13, w2 = weights_of(scheme)
    layer = layer_of(kernel, w13, w2, device)
    x, routing = tokens(33), make_routing(33, EXPERTS, TOP, np.random.default_rng(2))
    known = expected.Routing(np.where(routing.ids == 3, -1, routing.ids), routing.weights)
    found = run(layer, x, known, device)
    check(found, expected.experts(x.float().numpy(), w13, w2, known, CAPABILITIES[kernel], "bf16"))
    # the same through a map: expert e is number 2 * e globally, and 3 and all odd ones are elsewhere
    mapping = torch.full((2 * EXPERTS,), -1, dtype=torch.int32, device=device)
    mapping[::2] = torch.arange(EXPERTS, dtype=torch.int32, device=device)
    mapping[6] = -1
    ids = torch.from_numpy(2 * routing.ids.astype(np.int32)).to(device)
    y = layer(x.to(device), ids, torch.from_numpy(routing.weights.astype(np.float32)).to(device), mapping)
    np.testing.assert_array_equal(y.double().cpu().numpy(), found)


@each_device
@each_scheme
def test_biases_limits_and_other_activations(kernel: str, scheme: str, device: str) -> None:
    rng = np.random.default_rng(0)
    w13, w2 = (
        replace(w, tensors={**w.tensors, "bias": rng.standard_normal((EXPERTS, w.out_features)).astype(np.float32)})
        for w in weights_of(scheme)
    )
    x, routing = tokens(9), make_routing(9, EXPERTS, TOP, np.random.default_rng(3))
    for activation, limit in (("swiglu-oai", 7.0), ("gelu", 0.0), ("silu", 2.0), ("silu", 0.0)):
        moe = MoeSpec(EXPERTS, INNER, activation, limit=limit, alpha=1.7)
        layer = layer_of(kernel, w13, w2, device, activation=activation, limit=limit, alpha=1.7)
        wanted = oracle_moe.experts(x.float().numpy(), routing.ids, routing.weights, w13, w2, moe)
        assert np.linalg.norm(run(layer, x, routing, device) - wanted) < 0.02 * np.linalg.norm(wanted)


@each_device
def test_weights_of_two_block_heights(device: str) -> None:
    """As where an intermediate size cuts blocks of gate and up, and none of w2's."""
    w13, _ = weights_of("fp8-block16x128/fp8-g128")
    _, w2 = weights_of("fp8-block128x128/fp8-g128")
    x, routing = tokens(9, torch.float32), make_routing(9, EXPERTS, TOP, np.random.default_rng(1))
    wanted = expected.experts(x.numpy(), w13, w2, routing, CAPABILITIES["portable_moe_fp8_block"], "f32")
    found = run(layer_of("portable_moe_fp8_block", w13, w2, device, "f32"), x, routing, device)
    check(found, wanted, is_exact=device == "cpu")


@each_device
@each_scheme
def test_it_traces_whole(kernel: str, scheme: str, device: str) -> None:
    layer = layer_of(kernel, *weights_of(scheme), device)
    ids = torch.randint(0, EXPERTS, (9, TOP), dtype=torch.int32, device=device)
    x, weights = tokens(9).to(device), torch.rand(9, TOP, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, ids, weights), layer(x, ids, weights), rtol=0, atol=0)
    assert layer(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)


@needs_cuda
@each_scheme
def test_a_graph_replays(kernel: str, scheme: str) -> None:
    layer = layer_of(kernel, *weights_of(scheme), "cuda")
    ids = torch.randint(0, EXPERTS, (9, TOP), dtype=torch.int32, device="cuda")
    x, weights = tokens(9).cuda(), torch.rand(9, TOP, device="cuda")
    layer(x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, ids, weights)
    ids.copy_(torch.randint(0, EXPERTS, (9, TOP), dtype=torch.int32, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, layer(x, ids, weights), rtol=0, atol=0)


@needs_cuda
@each_scheme
def test_two_streams_run_one_layer(kernel: str, scheme: str) -> None:
    layer = layer_of(kernel, *weights_of(scheme), "cuda")
    inputs = [(tokens(rows).cuda(), torch.randint(0, EXPERTS, (rows, TOP), device="cuda")) for rows in (300, 301)]
    weights = torch.rand(301, TOP, device="cuda")
    wanted = [layer(x, ids, weights[: len(x)]) for x, ids in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, (x, ids) in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(layer(x, ids, weights[: len(x)]))
        torch.cuda.synchronize()
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_nan_and_other_schemes_are_refused() -> None:
    w13, w2 = weights_of(SCHEMES[0][1])
    codes = w13.tensors["codes"].copy()
    codes.view(np.uint8)[2, 3, 5] = 0x7F
    with pytest.raises(InvalidCheckpointError, match="holds NaN"):
        layer_of("portable_moe_fp8_block", replace(w13, tensors={**w13.tensors, "codes": codes}), w2, "cpu")
    smoothed = replace(w13, tensors={**w13.tensors, "pre_scale": np.ones((EXPERTS, HIDDEN), np.float32)})
    with pytest.raises(UnsupportedCombinationError, match="no roles but"):
        layer_of("portable_moe_fp8_block", smoothed, w2, "cpu")
    for kernel, scheme in (
        ("portable_moe_fp8_block", "fp8-channel/fp8-token"),
        ("portable_moe_fp8_block", "fp8-block128x128/fp8-token"),
        ("portable_moe_fp8", "fp8-channel/a16"),
        ("portable_moe_int8", "int8-channel/fp8-token"),
        ("portable_moe_int8", "int8-channel/int8-tensor"),
    ):
        with pytest.raises(UnsupportedCombinationError, match="needs"):
            layer_of(kernel, *weights_of(scheme), "cpu")


@each_scheme
@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm100", "sm120"])
def test_plans_take_these_kernels(kernel: str, scheme: str, arch: str) -> None:
    spec = LayerSpec("experts", "moe", 7168, 7168, Scheme.parse(scheme), moe=MoeSpec(64, 2048))
    chosen = match(spec, SPEC.capabilities, parse_device(f"cuda:{arch}"), Policy()).chosen
    assert chosen is not None
    if arch == "sm80" and "fp8" in kernel:
        assert chosen.capability.executes == "a16"
    elif arch == "sm90" and kernel == "portable_moe_fp8":
        assert chosen.capability.name == "scaled_grouped_mm"
    else:
        assert chosen.capability.name == kernel
