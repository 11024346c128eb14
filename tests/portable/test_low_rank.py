"""SVDQuant's layers against the oracle: a residual held in words, and the low-rank pair beside it."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat.canonical import Array, CanonicalWeight
from omniplat.capability import Capability
from omniplat.conformance import expected
from omniplat.conformance.tolerances import excess
from omniplat.conformance.weights import random_weight
from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable.decoded import DECODED_RESIDENT, LOW_RANK_RESIDENT, LOW_RANK_WEIGHTS
from omniplat.portable.low_rank import PortableLowRank, on_device
from omniplat.reference.low_rank import LowRankLinear
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme
from tests.support.triton import TRITON_DEVICE, needs_cuda, needs_triton

CAPABILITY = Capability("portable_low_rank", "linear", ("*",), ("a16",), executes="a16")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
PAIRS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
each_scheme = pytest.mark.parametrize("weight_id", LOW_RANK_WEIGHTS)


def weight_of(weight_id: str, n: int = 80, k: int = 384, *, pair: str = "bf16", bias: bool = True) -> CanonicalWeight:
    """Activations are declared, and none is quantized here. The pair is a good part of the output."""
    declared = {"svdq-nvfp4": "svdq-nvfp4", "svdq-int4-g64": "svdq-int4"}.get(weight_id, "a16")
    scheme = Scheme.parse(f"{weight_id}/{declared}")
    weight = random_weight(scheme, n, k, np.random.default_rng(len(weight_id)), bias=bias)
    held = {role: (4 * weight.tensors[role]).astype(PAIRS[pair]) for role in ("low_rank_down", "low_rank_up")}
    return replace(weight, tensors={**weight.tensors, **held})


def layer_of(weight: CanonicalWeight, device: str = "cpu", kernel: object = None, dtype: str = "bf16") -> QuantLinear:
    bias = "bias" in weight.tensors
    spec = LayerSpec("layer", "linear", weight.out_features, weight.in_features, weight.scheme, dtype, bias)
    used = kernel or PortableLowRank()
    tensors = to_torch(weight, device=torch.device(device))
    return QuantLinear(spec, used, used.prepare(tensors, spec), tensors.tensors.get("bias"))  # type: ignore[attr-defined, arg-type]


def check(weight: CanonicalWeight, y: torch.Tensor, x: torch.Tensor, dtype: str) -> None:
    values = x.cpu().to(torch.float32).numpy().reshape(-1, weight.in_features)
    wanted = expected.linear(values, weight, CAPABILITY, dtype)
    found = y.cpu().to(torch.float64).numpy().reshape(wanted.y.shape)
    assert not (problem := excess(found, wanted.y, wanted.allowed)), str(problem)


@each_scheme
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_plain_form(weight_id: str, dtype: str, pair: str, bias: bool) -> None:
    weight = weight_of(weight_id, pair=pair, bias=bias)
    layer = layer_of(weight, dtype=dtype)
    torch.manual_seed(0)
    for shape in ((3, 384), (2, 5, 384), (384,)):
        x = torch.randn(shape).to(DTYPES[dtype])
        y = layer(x)
        assert y.shape == (*shape[:-1], 80)
        assert y.dtype == x.dtype
        check(weight, y, x, dtype)
    assert layer(torch.empty(0, 384, dtype=DTYPES[dtype])).shape == (0, 80)


@each_scheme
def test_it_is_the_reference_where_nothing_is_quantized(weight_id: str) -> None:
    """Both keep sums in float32: what is left between them is the order of additions."""
    declared = weight_of(weight_id)
    weight = replace(declared, scheme=declared.scheme.with_activation(None))
    x = torch.randn(7, 384)
    found, wanted = (layer_of(weight, kernel=kernel, dtype="f32")(x) for kernel in (None, LowRankLinear()))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@each_scheme
def test_the_pair_sees_the_input_before_it_is_smoothed(weight_id: str) -> None:
    """With a residual of zeros nothing of the smoothing vector is left."""
    weight = weight_of(weight_id, bias=False)
    zeros = np.zeros_like(weight.tensors["codes"])
    layer = layer_of(replace(weight, tensors={**weight.tensors, "codes": zeros}), dtype="f32")
    x = torch.randn(3, 384)
    down, up = (torch.from_numpy(weight.tensors[role].astype(np.float32)) for role in ("low_rank_down", "low_rank_up"))
    torch.testing.assert_close(layer(x), (x @ down) @ up.t())


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
@each_scheme
@pytest.mark.parametrize(("rows", "bias"), [(5, True), (70, True), (70, False), (0, True)])
def test_the_form_of_devices(weight_id: str, rows: int, bias: bool, device: str) -> None:
    """Of few tokens the residual is added up in float32; of many it is written out in bf16, by Triton."""
    weight = weight_of(weight_id, bias=bias)
    held = dict(layer_of(weight, device).named_buffers())
    form = layer_of(weight).config.form
    optional = (held.get(role) for role in ("row_scale", "pre_scale", "low_rank_down", "low_rank_up", "bias"))
    x = torch.randn(2, rows, 384, device=device).bfloat16()
    y = on_device(x, held["words"], held["scale"], *optional, form, torch.bfloat16)
    assert y.shape == (2, rows, 80)
    if rows:
        check(weight, y, x, "bf16")


@each_scheme
@pytest.mark.parametrize(("rows", "bias"), [(5, True), (60, False), (65, True), (300, False)])
@pytest.mark.parametrize(("dtype", "pair"), [("bf16", "bf16"), ("bf16", "f16"), ("f16", "f16")])
@needs_cuda
def test_the_operator_on_cuda(weight_id: str, rows: int, dtype: str, pair: str, bias: bool) -> None:
    weight = weight_of(weight_id, 272, 1152, pair=pair, bias=bias)
    layer = layer_of(weight, "cuda", dtype=dtype)
    x = torch.randn(rows, 1152, device="cuda").to(DTYPES[dtype])
    check(weight, layer(x), x, dtype)
    wide = torch.randn(rows, 2304, device="cuda").to(DTYPES[dtype])[:, ::2]
    check(weight, layer(wide), wide, dtype)
    assert layer(x[:0]).shape == (0, 272)


@needs_cuda
@pytest.mark.parametrize("rows", [17, 100])
def test_a_graph_replays(rows: int) -> None:
    layer = layer_of(weight_of("svdq-nvfp4"), "cuda")
    x = torch.randn(rows, 384, device="cuda").bfloat16()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn(rows, 384, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@each_scheme
def test_the_operator_is_well_registered(weight_id: str, device: str) -> None:
    layer = layer_of(weight_of(weight_id), device)
    held = dict(layer.named_buffers())
    optional = (held.get(role) for role in ("row_scale", "pre_scale", "low_rank_down", "low_rank_up", "bias"))
    x = torch.randn(3, 384, device=device).bfloat16()
    arguments = (x, held["words"], held["scale"], *optional, layer.config.form, torch.bfloat16)
    torch.library.opcheck(torch.ops.omniplat.weight_only_low_rank_linear, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 1):
        x = torch.randn(rows, 384, device=device).bfloat16()
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("pair", PAIRS)
@each_scheme
def test_what_is_kept(weight_id: str, pair: str) -> None:
    """The pair takes what it takes in the file, the residual what its own scheme declares; one number a row aside."""
    weight = weight_of(weight_id, n=96, k=768, pair=pair)
    of_pair = sum(weight.tensors[role].nbytes for role in ("low_rank_down", "low_rank_up"))
    rest = sum(weight.tensors[role].nbytes for role in ("codes", "scale"))
    base = "nvfp4" if weight_id == "svdq-nvfp4" else "int4-g64"
    kept = of_pair + dict(DECODED_RESIDENT).get(base, 1.0) * rest
    found = layer_of(weight).nbytes - weight.tensors["bias"].nbytes - weight.tensors["pre_scale"].nbytes
    assert found == pytest.approx(kept, abs=4 * 96)
    assert found <= dict(LOW_RANK_RESIDENT).get(weight_id, 1.0) * (of_pair + rest) + 4 * 96


def ordered(weight: CanonicalWeight) -> dict[str, Array]:
    return {**weight.tensors, "group_index": np.arange(384, dtype=np.int32) % 3}


def test_what_it_does_not_run_is_refused() -> None:
    for weight_id in ("mxfp4", "nvfp4", "int4-g64"):
        with pytest.raises(UnsupportedCombinationError, match="needs a low-rank pair"):
            layer_of(random_weight(Scheme.parse(f"{weight_id}/a16"), 80, 384, np.random.default_rng(0)))
    weight = weight_of("svdq-int4-g64")
    with pytest.raises(UnsupportedCombinationError, match="needs no roles but"):
        layer_of(replace(weight, tensors=ordered(weight)))
