"""Weight-only layers of experts against the oracle, within the bound that float32 sums and 16-bit outputs allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from omniplat.canonical import CanonicalWeight
from omniplat.capability import Capability
from omniplat.conformance import expected
from omniplat.conformance.build import make_routing
from omniplat.conformance.tolerances import excess
from omniplat.conformance.weights import random_weight, stack
from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.oracle import moe as oracle_moe
from omniplat.portable.routing import sort_by_expert
from omniplat.portable.weight_only_experts import PortableExperts
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme
from tests.support.routing import tiles_of
from tests.support.triton import TRITON_DEVICE, needs_cuda, needs_triton

EXPERTS, HIDDEN, INNER, TOP = 5, 128, 192, 2
CAPABILITY = Capability("portable_moe", "moe", ("*",), ("a16",), executes="a16")
SCHEMES = (
    "mxfp4",
    "mxfp4-dual",
    "mxfp8",
    "nvfp4",
    "int4-g64",
    "uint4-g32",
    "nf4-b64",
    "fp8-channel",
    "fp8-block32x32",
    "int8-channel",
)
each_scheme = pytest.mark.parametrize("weight_id", SCHEMES)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def weights_of(weight_id: str, w2_id: str = "") -> tuple[CanonicalWeight, CanonicalWeight]:
    rng = np.random.default_rng(len(weight_id))
    first, second = (
        stack([random_weight(Scheme.parse(f"{name}/a16"), n, k, rng) for _ in range(EXPERTS)])
        for name, n, k in ((weight_id, 2 * INNER, HIDDEN), (w2_id or weight_id, HIDDEN, INNER))
    )
    return first, second


def layer_of(w13: CanonicalWeight, w2: CanonicalWeight, device: str, **moe: object) -> QuantExperts:
    spec = LayerSpec("experts", "moe", HIDDEN, HIDDEN, w13.scheme, moe=MoeSpec(EXPERTS, INNER, **moe))  # type: ignore[arg-type]
    kernel = PortableExperts()
    tensors = [to_torch(weight, experts=EXPERTS, device=torch.device(device)) for weight in (w13, w2)]
    return QuantExperts(spec, kernel, kernel.prepare(*tensors, spec))


def run(layer: QuantExperts, x: np.ndarray, routing: expected.Routing, device: str) -> np.ndarray:
    ids = torch.from_numpy(routing.ids.astype(np.int32)).to(device)
    y = layer(
        torch.from_numpy(x).to(device).bfloat16(), ids, torch.from_numpy(routing.weights.astype(np.float32)).to(device)
    )
    return y.double().cpu().numpy()


def input_of(rows: int) -> np.ndarray:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16().float().numpy()


def check(
    found: np.ndarray, x: np.ndarray, w13: CanonicalWeight, w2: CanonicalWeight, routing: expected.Routing
) -> None:
    wanted = expected.experts(x, w13, w2, routing, CAPABILITY, "bf16")
    assert not (problem := excess(found, wanted.y, wanted.allowed)), str(problem)


@devices
@each_scheme
@pytest.mark.parametrize("rows", [1, 9])
def test_a_layer_computes_what_the_oracle_does(weight_id: str, rows: int, device: str) -> None:
    w13, w2 = weights_of(weight_id)
    x, routing = input_of(rows), make_routing(rows, EXPERTS, TOP, np.random.default_rng(1))
    check(run(layer_of(w13, w2, device), x, routing, device), x, w13, w2, routing)


@needs_cuda
@pytest.mark.parametrize("weight_id", ["mxfp4", "int4-g64"])
@pytest.mark.parametrize("rows", [100, 700])
def test_many_rows_on_cuda(weight_id: str, rows: int) -> None:
    w13, w2 = weights_of(weight_id)
    x, routing = input_of(rows), make_routing(rows, EXPERTS, TOP, np.random.default_rng(1))
    check(run(layer_of(w13, w2, "cuda"), x, routing, "cuda"), x, w13, w2, routing)


@devices
def test_weights_of_two_schemes(device: str) -> None:
    w13, w2 = weights_of("mxfp4", "fp8-channel")
    x, routing = input_of(7), make_routing(7, EXPERTS, TOP, np.random.default_rng(1))
    check(run(layer_of(w13, w2, device), x, routing, device), x, w13, w2, routing)


@devices
def test_experts_of_other_ranks_and_of_nobody_contribute_nothing(device: str) -> None:
    w13, w2 = weights_of("mxfp4")
    layer = layer_of(w13, w2, device)
    x, routing = input_of(33), make_routing(33, EXPERTS, TOP, np.random.default_rng(2))
    known = expected.Routing(np.where(routing.ids == 3, -1, routing.ids), routing.weights)
    check(run(layer, x, known, device), x, w13, w2, known)
    mapping = torch.full((2 * EXPERTS,), -1, dtype=torch.int32, device=device)
    mapping[::2] = torch.arange(EXPERTS, dtype=torch.int32, device=device)
    mapping[6] = -1
    ids = torch.from_numpy(2 * routing.ids.astype(np.int32)).to(device)
    weights = torch.from_numpy(routing.weights.astype(np.float32)).to(device)
    y = layer(torch.from_numpy(x).to(device).bfloat16(), ids, weights, mapping)
    np.testing.assert_array_equal(y.double().cpu().numpy(), run(layer, x, known, device))


@devices
def test_biases_limits_and_other_activations(device: str) -> None:
    rng = np.random.default_rng(0)
    w13, w2 = (
        replace(w, tensors={**w.tensors, "bias": rng.standard_normal((EXPERTS, w.out_features)).astype(np.float32)})
        for w in weights_of("mxfp4")
    )
    for activation, limit in (("swiglu-oai", 7.0), ("gelu", 0.0), ("silu", 2.0), ("silu", 0.0)):
        layer = layer_of(w13, w2, device, activation=activation, limit=limit, alpha=1.7)
        x, routing = input_of(9), make_routing(9, EXPERTS, TOP, np.random.default_rng(3))
        moe = MoeSpec(EXPERTS, INNER, activation, limit=limit, alpha=1.7)
        wanted = oracle_moe.experts(x, routing.ids, routing.weights, w13, w2, moe)
        found = run(layer, x, routing, device)
        assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


@devices
def test_it_traces_whole(device: str) -> None:
    layer = layer_of(*weights_of("mxfp4"), device)
    ids = torch.randint(0, EXPERTS, (9, TOP), dtype=torch.int32, device=device)
    x, weights = torch.randn(9, HIDDEN, device=device).bfloat16(), torch.rand(9, TOP, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, ids, weights), layer(x, ids, weights), rtol=0, atol=0)
    empty = layer(x[:0], ids[:0], weights[:0])
    assert empty.shape == (0, HIDDEN)


@needs_cuda
def test_a_graph_replays() -> None:
    layer = layer_of(*weights_of("mxfp4"), "cuda")
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


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
@pytest.mark.parametrize("weight_id", ["mxfp4", "uint4-g32", "fp8-block32x32"])
@pytest.mark.parametrize("slices", [0, 2])
def test_the_triton_form_by_expert(weight_id: str, slices: int, device: str) -> None:
    """The product alone, as the interpreter runs it: rows of every expert, of nobody, and of an expert without rows."""
    from omniplat.portable.weight_only_triton import Tile, weight_only_product
    from omniplat.portable.word_weights import decode_form

    w13, w2 = weights_of(weight_id)
    layer = layer_of(w13, w2, device)
    held, form = dict(layer.named_buffers()), decode_form(layer.config.w13)
    ids = torch.tensor([[0, 3], [3, -1], [1, 4], [3, 0]] * 6, device=device)
    order = sort_by_expert(ids, None, EXPERTS)
    x = torch.randn(len(ids), HIDDEN, device=device).bfloat16()
    y = torch.zeros(len(order.rows), 2 * INNER, device=device)
    optional = (held.get(f"w13_{name}") for name in ("zero", "row_scale"))
    weight_only_product(x, held["w13_words"], None, held["w13_scale"], *optional, None, y, form,
                        Tile(32, 16, slices, 4, 2), tiles_of(order, 16))  # fmt: skip
    for token, slot in np.ndindex(*ids.shape):
        expert = int(ids[token, slot])
        if expert >= 0:
            one = expected.linear(
                x[token : token + 1].float().cpu().numpy(), oracle_moe.expert_of(w13, expert), CAPABILITY, "bf16"
            )
            found = y[order.place[token, slot]].double().cpu().numpy()[None]
            assert not (problem := excess(found, one.y, one.allowed)), str(problem)


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_nobody_computed_are_not_read(device: str, dtype: torch.dtype) -> None:
    from omniplat.portable.experts_triton import combine
    from omniplat.portable.routing import weighted_sum

    out = torch.randn(6, 40, device=device)
    out[4:] = torch.nan
    place = torch.tensor([[0, 3], [4, 1], [5, 2]], device=device)
    weights = torch.rand(2, 3, device=device).to(dtype).t()
    held = torch.tensor([4], dtype=torch.int32, device=device)
    y = combine(out, place, weights, held, torch.float32)
    kept = torch.where((place < 4)[:, :, None], out[place], 0.0)
    torch.testing.assert_close(y, (kept * weights.float()[:, :, None]).sum(1))
    torch.testing.assert_close(weighted_sum(out, place, weights, held, torch.float32), y)


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
@pytest.mark.parametrize("scheme", ["fp8-token", "mxfp4"])
def test_the_activation_is_quantized_in_the_same_pass(scheme: str, device: str) -> None:
    """Codes and scales are those of the activation's values: within what two ways to compute silu differ by."""
    from omniplat.portable.experts_triton import silu_and_mul
    from omniplat.portable.gated import quantize_gated
    from omniplat.portable.mx_grid import regroup_rows_torch
    from omniplat.portable.quantize import quantize_rows_torch
    from omniplat.scheme import parse_activation_id

    quant = parse_activation_id(scheme)
    assert quant is not None
    both = torch.randn(9, 2 * 160, device=device)
    both[3] = 0
    gate, up = both.double().chunk(2, dim=1)
    wanted = (torch.nn.functional.silu(gate) * up).float()
    torch.testing.assert_close(silu_and_mul(both), wanted)
    codes, scale = quantize_gated(both, quant)
    plain = (
        regroup_rows_torch(wanted, quant, None) if scheme == "mxfp4" else quantize_rows_torch(wanted, quant, None, None)
    )
    torch.testing.assert_close(scale, plain[1], rtol=1e-6, atol=0)
    same = (codes == plain[0]).float().mean()
    assert same > 0.99


@pytest.mark.parametrize("weight_id", ["int3-g64", "fp8e5m2-channel", "mxfp6e2m3", "mxint8", "int4-tensor"])
def test_what_is_not_decoded_is_refused(weight_id: str) -> None:
    with pytest.raises(UnsupportedCombinationError, match="needs"):
        layer_of(*weights_of(weight_id), "cpu")
