"""MX weights on FP8 units: the declared values are multiplied, whatever they are stored as on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from omniplat_cuda.spec import SPEC

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.device import parse_device
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.match import Policy, match
from omniplat.oracle.reencode import reencode
from omniplat.scheme import Scheme
from tests.backends.cuda.building import check, each_device, layer_of, weight_of
from tests.support.triton import needs_cuda

SCHEMES = [
    ("scaled_mm_mxfp8", "mxfp8/mxfp8"),
    ("scaled_mm_mxfp8", "mxfp8/fp8-token"),
    ("scaled_mm_mxfp4", "mxfp4/mxfp4"),
    ("scaled_mm_mxfp4_a8", "mxfp4/fp8-token"),
    ("scaled_mm_mxfp4_a8", "mxfp4/mxfp4"),
    ("fp8_decoded_mxfp4", "mxfp4/mxfp4"),
    ("fp8_decoded_mxfp4_a8", "mxfp4/fp8-token"),
    ("fp8_decoded_mxfp4_a8", "mxfp4/mxfp4"),
]
each_scheme = pytest.mark.parametrize(("kernel", "scheme"), SCHEMES)


def with_span(scheme: str, span: int) -> CanonicalWeight:
    """Rows whose last group lies `span` binades below the others."""
    weight = weight_of(Scheme.parse(scheme))
    scale = np.full_like(weight.tensors["scale"], 125)
    scale[:, -1] -= span
    return replace(weight, tensors={**weight.tensors, "scale": scale})


@each_device
@each_scheme
def test_a_layer_computes_what_the_oracle_does(kernel: str, scheme: str, device: str) -> None:
    weight = weight_of(Scheme.parse(scheme))
    torch.manual_seed(0)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")):
        layer = layer_of(kernel, weight, device, name)
        assert layer(torch.empty(0, 96, dtype=dtype, device=device)).shape == (0, 48)
        for rows in (1, 3, 17, 257):
            check(layer, weight, torch.randn(rows, 96, device=device).to(dtype))
        check(layer, weight, torch.randn(2, 5, 192, device=device).to(dtype)[..., ::2])


@each_device
@each_scheme
def test_rows_of_any_legal_span(kernel: str, scheme: str, device: str) -> None:
    weight = with_span(scheme, 14 if scheme.startswith("mxfp4") else 8)
    check(layer_of(kernel, weight, device), weight, torch.randn(9, 96, device=device).bfloat16())


@each_scheme
def test_a_row_beyond_the_span_is_refused(kernel: str, scheme: str) -> None:
    with pytest.raises(InvalidCheckpointError, match="binades"):
        layer_of(kernel, with_span(scheme, 15), "cpu")


@each_device
@each_scheme
def test_smoothing_is_applied(kernel: str, scheme: str, device: str) -> None:
    bare = weight_of(replace(Scheme.parse(scheme), pre_scale=True))
    weight = replace(bare, tensors={**bare.tensors, "pre_scale": np.linspace(0.2, 1.2, 96, dtype=np.float32)})
    check(layer_of(kernel, weight, device), weight, torch.randn(9, 96, device=device).bfloat16())


@pytest.mark.parametrize(("kernel", "scheme"), [case for case in SCHEMES if case[0].startswith("scaled_mm")])
def test_what_lies_on_the_device_is_the_oracles_re_encoding(kernel: str, scheme: str) -> None:
    weight = with_span(scheme, 5)
    moved = reencode(weight, "fp8-channel")
    layer = layer_of(kernel, weight, "cpu")
    np.testing.assert_array_equal(layer.codes.numpy(), moved.tensors["codes"].view(np.uint8))
    np.testing.assert_array_equal(layer.scale.numpy(), moved.tensors["scale"].reshape(1, -1))
    assert layer.nbytes == 48 * 96 + 48 * 4


@each_device
@each_scheme
def test_it_traces_whole(kernel: str, scheme: str, device: str) -> None:
    layer = layer_of(kernel, weight_of(Scheme.parse(scheme)), device)
    x = torch.randn(17, 96, device=device).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (17, 3):
        torch.testing.assert_close(compiled(x[:rows]), layer(x[:rows]), rtol=0, atol=0)


@needs_cuda
@each_scheme
def test_a_graph_replays(kernel: str, scheme: str) -> None:
    layer = layer_of(kernel, weight_of(Scheme.parse(scheme)), "cuda")
    x = torch.randn(17, 96, device="cuda").bfloat16()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn(17, 96, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, layer(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kernel", "scheme", "k"),
    [
        ("scaled_mm_mxfp8", "mxfp8e5m2/fp8-token", 96),
        ("scaled_mm_mxfp8", "mxfp4/fp8-token", 96),
        ("scaled_mm_mxfp4", "mxfp4/a16", 96),
        ("scaled_mm_mxfp4", "nvfp4/nvfp4", 96),
        ("scaled_mm_mxfp4_a8", "mxfp4/int8-token", 96),
        ("fp8_decoded_mxfp4", "mxfp4/fp8-token", 96),
        ("fp8_decoded_mxfp4_a8", "mxfp8/fp8-token", 96),
    ],
)
def test_what_is_not_declared_is_refused(kernel: str, scheme: str, k: int) -> None:
    with pytest.raises(UnsupportedCombinationError, match="needs"):
        layer_of(kernel, weight_of(Scheme.parse(scheme), 48, k), "cpu")


@pytest.mark.parametrize("kernel", ["scaled_mm_mxfp4", "fp8_decoded_mxfp4"])
def test_an_activation_rule_that_no_quantizer_has_is_refused(kernel: str) -> None:
    scheme = Scheme.parse("mxfp4/mxfp4")
    assert scheme.activation is not None
    odd = replace(scheme, activation=replace(scheme.activation, rounding="half-away"))
    with pytest.raises(UnsupportedCombinationError, match=r"nearest.even"):
        layer_of(kernel, weight_of(odd), "cpu")


@pytest.mark.parametrize(
    ("scheme", "prefer", "kernel"),
    [
        ("mxfp8/mxfp8", "memory", "scaled_mm_mxfp8"),
        ("mxfp4/mxfp4", "speed", "scaled_mm_mxfp4"),
        ("mxfp4/mxfp4", "memory", "fp8_decoded_mxfp4"),
        ("mxfp4/fp8-token", "memory", "fp8_decoded_mxfp4_a8"),
    ],
)
def test_plans_take_these_kernels_on_hopper(scheme: str, prefer: str, kernel: str) -> None:
    spec = LayerSpec("layer", "linear", 4096, 4096, Scheme.parse(scheme))
    chosen = match(spec, SPEC.capabilities, parse_device("cuda:sm90"), Policy(prefer=prefer)).chosen
    assert chosen is not None
    assert chosen.capability.name == kernel
    assert chosen.capability.via == "fp8-channel"


def test_the_oracle_multiplies_the_same_weight() -> None:
    weight = with_span("mxfp4/mxfp4", 14)
    np.testing.assert_array_equal(oracle.dequantize(reencode(weight, "fp8-channel")), oracle.dequantize(weight))
