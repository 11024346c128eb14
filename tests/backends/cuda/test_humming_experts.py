"""Layers of experts over humming against the oracle: on CUDA its kernels, on the CPU the tensors that it takes in."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.capability import Accepted, Capability
from omniplat.conformance import expected
from omniplat.conformance.build import make_routing
from omniplat.conformance.subject import equipped
from omniplat.conformance.tolerances import excess
from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.match import Policy, decide
from omniplat.oracle import moe as oracle_moe
from omniplat.portable.ahead import compile_kernels
from omniplat.runtime.kernel import MoeKernel, load_kernel
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.tensors import DTYPES, to_torch
from omniplat.scheme import Scheme
from tests.backends.cuda.building import CAPABILITIES, each_device
from tests.support.triton import TRITON_DEVICE, needs_cuda, needs_triton

EXPERTS, HIDDEN, INNER, TOP = 6, 256, 128, 2
_WEIGHTS = (
    "mxfp4",
    "nvfp4",
    "int4-g128",
    "uint4-g128",
    "int4-g32",
    "int8-channel",
    "mxfp8",
    "fp8-tensor",
    "fp8-channel",
)
SCHEMES = [f"{weight}/a16" for weight in _WEIGHTS]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)
#: Scales of whole rows are for a kernel of bf16 layers alone.
BY_ROW = ("int8-channel", "fp8-tensor", "fp8-channel")
CASES = [
    (scheme, dtype)
    for scheme in SCHEMES
    for dtype in ("bf16", "f16")
    if dtype == "bf16" or not scheme.startswith(BY_ROW)
]
ROWS = (1, 7, 65, 300)


def capability_of(scheme: str) -> Capability:
    return CAPABILITIES["humming_moe_rows" if scheme.startswith(BY_ROW) else "humming_moe"]


def weights_of(scheme: str, hidden: int = HIDDEN, inner: int = INNER) -> tuple[CanonicalWeight, CanonicalWeight]:
    """w13 and w2, stacked; experts of different sizes, so that one in another's place shows."""
    rng = np.random.default_rng(0)
    parsed = Scheme.parse(scheme)
    size = np.linspace(0.5, 2.0, EXPERTS, dtype=np.float32)[:, None, None] / 8

    def stacked(n: int, k: int) -> CanonicalWeight:
        values = rng.standard_normal((EXPERTS, n, k)).astype(np.float32) * size
        return replace(oracle.quantize_weight(values, parsed.weight), scheme=parsed)

    return stacked(2 * inner, hidden), stacked(hidden, inner)


def layer_of(
    w13: CanonicalWeight, w2: CanonicalWeight, device: str, moe: MoeSpec | None = None, dtype: str = "bf16"
) -> QuantExperts:
    moe = moe or MoeSpec(EXPERTS, w2.in_features)
    spec = LayerSpec("experts", "moe", w13.in_features, w13.in_features, w13.scheme, dtype=dtype, moe=moe)
    built = load_kernel(capability_of(w13.scheme.id).impl)
    assert isinstance(built, MoeKernel)
    tensors = [to_torch(weight, experts=EXPERTS, device=torch.device(device)) for weight in (w13, w2)]
    return QuantExperts(spec, built, built.prepare(*tensors, spec))


def run(layer: QuantExperts, x: np.ndarray, routing: expected.Routing, device: str) -> np.ndarray:
    ids = torch.from_numpy(routing.ids.astype(np.int32)).to(device)
    weights = torch.from_numpy(routing.weights.astype(np.float32)).to(device)
    rows = torch.from_numpy(x).to(device, DTYPES[layer.spec.dtype])
    return layer(rows, ids, weights).double().cpu().numpy()


def rounded_input(rows: int, hidden: int = HIDDEN) -> np.ndarray:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows)).bfloat16().float().numpy()


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """On a device, the kernels of the tests that run, compiled beside each other. A test meets what failed."""
    if not torch.cuda.is_available():
        return
    from omniplat_cuda.kernels.humming_runtime import Key, bucket_of, compile_ahead

    asked = [item.callspec.params for item in request.session.items if "compiled" in getattr(item, "fixturenames", ())]
    layers = []
    for scheme, dtype in sorted({(p["scheme"], p["dtype"]) for p in asked if "dtype" in p}):
        try:
            config = layer_of(*weights_of(scheme), "cuda", dtype=dtype).config
        except Exception as exc:
            print(f"{scheme} {dtype}: {type(exc).__name__}: {exc}")
            continue
        layers += [config.w13_layer, config.w2_layer]
    compile_ahead(
        {Key(layer, "indexed", bucket_of(rows * TOP, "indexed"), 0, False) for layer in layers for rows in ROWS}
    )


@pytest.mark.parametrize("scheme", [f"{weight}/a16" for weight in BY_ROW])
def test_scales_of_rows_are_not_for_f16(scheme: str) -> None:
    """Sums over parts of K, without their scales, leave the range of f16."""
    spec = LayerSpec("experts", "moe", HIDDEN, HIDDEN, Scheme.parse(scheme), dtype="f16", moe=MoeSpec(EXPERTS, INNER))
    for capability in CAPABILITIES.values():
        if capability.name.startswith("humming_moe") and capability.impl:
            assert not isinstance(decide(capability, spec, equipped("cuda", "sm90"), Policy()), Accepted)


@each_device
@pytest.mark.parametrize(("scheme", "dtype"), CASES)
@pytest.mark.usefixtures("compiled")
def test_experts_compute_what_the_oracle_does(scheme: str, dtype: str, device: str) -> None:
    w13, w2 = weights_of(scheme)
    layer = layer_of(w13, w2, device, dtype=dtype)
    for rows in ROWS:
        x, routing = rounded_input(rows), make_routing(rows, EXPERTS, TOP, np.random.default_rng(rows))
        wanted = expected.experts(x, w13, w2, routing, capability_of(scheme), dtype)
        found = run(layer, x, routing, device)
        assert not (problem := excess(found, wanted.y, wanted.allowed)), f"{rows} rows: {problem}"
        assert np.linalg.norm(found - wanted.y) < 1e-2 * np.linalg.norm(wanted.y)


@each_device
@pytest.mark.parametrize("scheme", ["mxfp4/a16", "uint4-g128/a16"])
def test_sizes_that_are_filled_up(scheme: str, device: str) -> None:
    # 640 rows and 384 columns of w13
    w13, w2 = weights_of(scheme, 384, 640 if "g128" in scheme else 320)
    x, routing = rounded_input(33, 384), make_routing(33, EXPERTS, TOP, np.random.default_rng(5))
    wanted = expected.experts(x, w13, w2, routing, capability_of(scheme), "bf16")
    found = run(layer_of(w13, w2, device), x, routing, device)
    assert not (problem := excess(found, wanted.y, wanted.allowed)), str(problem)


@each_device
def test_experts_of_other_ranks_and_of_nobody_contribute_nothing(device: str) -> None:
    w13, w2 = weights_of("mxfp4/a16")
    layer = layer_of(w13, w2, device)
    x, routing = rounded_input(33), make_routing(33, EXPERTS, TOP, np.random.default_rng(2))
    ids = np.where(routing.ids == 3, -1, routing.ids)
    ids[5] = -1
    known = expected.Routing(ids, routing.weights)
    wanted = expected.experts(x, w13, w2, known, capability_of(w13.scheme.id), "bf16")
    found = run(layer, x, known, device)
    assert not (problem := excess(found, wanted.y, wanted.allowed)), str(problem)
    assert not found[5].any()
    # the same through a map: expert e is number 2 * e globally, and 3 and all odd ones are elsewhere
    mapping = torch.full((2 * EXPERTS,), -1, dtype=torch.int32, device=device)
    mapping[::2] = torch.arange(EXPERTS, dtype=torch.int32, device=device)
    mapping[6] = -1
    globally = torch.from_numpy(np.where(ids < 0, -1, 2 * routing.ids).astype(np.int32)).to(device)
    weights = torch.from_numpy(routing.weights.astype(np.float32)).to(device)
    y = layer(torch.from_numpy(x).to(device).bfloat16(), globally, weights, mapping)
    np.testing.assert_allclose(y.double().cpu().numpy(), found, rtol=2**-7, atol=2**-7 * np.abs(found).max())


def with_bias(weight: CanonicalWeight, rng: np.random.Generator) -> CanonicalWeight:
    bias = rng.standard_normal((EXPERTS, weight.out_features)).astype(ml_dtypes.bfloat16)
    return replace(weight, tensors={**weight.tensors, "bias": bias})


@each_device
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu-oai"])
def test_biases_and_other_activations(activation: str, device: str) -> None:
    rng = np.random.default_rng(7)
    w13, w2 = (with_bias(weight, rng) for weight in weights_of("mxfp4/a16"))
    moe = MoeSpec(EXPERTS, INNER, activation, limit=2.0, alpha=1.5)
    x, routing = rounded_input(9), make_routing(9, EXPERTS, TOP, np.random.default_rng(3))
    wanted = oracle_moe.experts(x, routing.ids, routing.weights, w13, w2, moe)
    found = run(layer_of(w13, w2, device, moe), x, routing, device)
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


@each_device
def test_no_rows(device: str) -> None:
    layer = layer_of(*weights_of("mxfp4/a16"), device)
    empty = torch.empty(0, TOP, device=device)
    x = torch.empty(0, HIDDEN, dtype=torch.bfloat16, device=device)
    assert layer(x, empty.to(torch.int32), empty).shape == (0, HIDDEN)


@each_device
def test_it_traces_whole(device: str) -> None:
    layer = layer_of(*weights_of("mxfp4/a16"), device)
    ids = torch.randint(0, EXPERTS, (9, TOP), dtype=torch.int32, device=device)
    x, weights = torch.randn(9, HIDDEN, device=device).bfloat16(), torch.rand(9, TOP, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, ids, weights), layer(x, ids, weights), rtol=1e-2, atol=1e-2)


@needs_cuda
def test_a_graph_replays() -> None:
    layer = layer_of(*weights_of("mxfp4/a16"), "cuda")
    compile_kernels([layer], (9,))
    ids = torch.randint(0, EXPERTS, (9, TOP), dtype=torch.int32, device="cuda")
    x, weights = torch.randn(9, HIDDEN, device="cuda").bfloat16(), torch.rand(9, TOP, device="cuda")
    layer(x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, ids, weights)
    ids.copy_(torch.randint(0, EXPERTS, (9, TOP), dtype=torch.int32, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, layer(x, ids, weights), rtol=1e-2, atol=1e-2)


@needs_cuda
@pytest.mark.parametrize("rows", [1, 16])
def test_they_are_deterministic_where_torch_is_to_be(rows: int) -> None:
    w13, w2 = weights_of("mxfp4/a16")
    layer = layer_of(w13, w2, "cuda")
    x, routing = rounded_input(rows), make_routing(rows, EXPERTS, TOP, np.random.default_rng(rows))
    torch.use_deterministic_algorithms(True)
    try:
        found = [run(layer, x, routing, "cuda") for _ in range(50)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    wanted = expected.experts(x, w13, w2, routing, capability_of("mxfp4/a16"), "bf16")
    assert not (problem := excess(found[0], wanted.y, wanted.allowed)), problem


def test_smoothed_experts_are_refused() -> None:
    w13, w2 = weights_of("mxfp4/a16")
    smoothed = replace(w13, tensors={**w13.tensors, "pre_scale": np.ones((EXPERTS, HIDDEN), np.float32)})
    with pytest.raises(UnsupportedCombinationError, match="not smoothed"):
        layer_of(smoothed, w2, "cpu")


class TestAlignment:
    pytestmark = needs_triton

    @pytest.mark.parametrize(("rows", "slots", "experts", "tile"), [(1, 8, 64, 8), (33, 2, 6, 40), (700, 4, 5, 48)])
    @pytest.mark.parametrize("mapped", [False, True])
    def test_pairs_come_in_tiles_of_one_expert(
        self, rows: int, slots: int, experts: int, tile: int, mapped: bool
    ) -> None:
        from omniplat_cuda.kernels.align_triton import align

        ids = torch.randint(-1, experts, (rows, slots), generator=torch.Generator().manual_seed(rows))
        if mapped:
            # every other rank's are the odd ones
            expert_map = torch.full((2 * experts,), -1, dtype=torch.int32)
            expert_map[::2] = torch.arange(experts, dtype=torch.int32)
            globally = torch.where(ids < 0, 1, 2 * ids).to(TRITON_DEVICE)
            tiles = align(globally, expert_map.to(TRITON_DEVICE), experts, tile)
        else:
            tiles = align(ids.to(TRITON_DEVICE), None, experts, tile)
        ordered, expert, count = (part.cpu() for part in tiles.routing)
        flat, pairs = ids.flatten(), ids.numel()
        wanted, of_tile = [], []
        for number in range(experts):
            own = (flat == number).nonzero().flatten().tolist()
            held = -(-len(own) // tile)
            wanted += own + [pairs] * (held * tile - len(own))
            of_tile += [number] * held
        assert int(count) == len(wanted)
        assert ordered[: len(wanted)].tolist() == wanted
        assert expert[: len(of_tile)].tolist() == of_tile
        assert int(tiles.pairs) == pairs
        assert torch.equal(tiles.place.cpu(), torch.where(ids < 0, pairs, torch.arange(pairs).view(rows, slots)).int())
