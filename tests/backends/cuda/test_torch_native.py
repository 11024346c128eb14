"""Linear layers over torch's own 8-bit products against the oracle: on CUDA, and on the CPU's forms."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from omniplat_cuda.spec import SPEC

from omniplat import oracle
from omniplat.device import parse_device
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.match import Policy, match
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme
from tests.backends.cuda.building import (
    check,
    each_device,
    kernel_of,
    layer_of,
    require_product,
    weight_of,
)
from tests.support.triton import needs_cuda

#: kernel -> schemes that it declares
SCHEMES = [
    *[("scaled_mm_tensor", f"fp8-tensor/{a}") for a in ("fp8-tensor", "fp8-tensor-static")],
    *[("scaled_mm_row", f"{w}/{a}") for w in ("fp8-tensor", "fp8-channel")
      for a in ("fp8-token", "fp8-tensor", "fp8-tensor-static")],
    *[("int_mm", f"{w}/{a}") for w in ("int8-tensor", "int8-channel")
      for a in ("int8-token", "int8-tensor", "int8-tensor-static")],
]  # fmt: skip
each_scheme = pytest.mark.parametrize(("kernel", "scheme"), SCHEMES)


@each_device
@each_scheme
def test_a_layer_computes_what_the_oracle_does(kernel: str, scheme: str, device: str) -> None:
    weight = weight_of(Scheme.parse(scheme))
    torch.manual_seed(0)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")):
        layer = layer_of(kernel, weight, device, name)
        for rows in (0, 1, 3, 16, 17, 257):
            x = torch.randn(rows, 96, device=device).to(dtype)
            if rows == 0:
                assert layer(x).shape == (0, 48)
            else:
                check(layer, weight, x)
        check(layer, weight, torch.randn(2, 5, 192, device=device).to(dtype)[..., ::2])


@each_device
@each_scheme
@pytest.mark.parametrize("bias_dtype", [ml_dtypes.bfloat16, np.float32])
def test_bias_is_added_before_the_one_rounding(kernel: str, scheme: str, device: str, bias_dtype: type) -> None:
    bare = weight_of(Scheme.parse(scheme))
    bias = (100 + np.arange(48)).astype(bias_dtype)
    weight = replace(bare, tensors={**bare.tensors, "bias": bias})
    spec = LayerSpec("layer", "linear", 48, 96, bare.scheme, bias=True)
    require_product(kernel, device)
    built = kernel_of(kernel)
    prepared = built.prepare(to_torch(bare, device=torch.device(device)), spec)
    torch.manual_seed(1)
    x = torch.randn(17, 96, device=device).to(torch.bfloat16)
    given = torch.from_numpy(bias.astype(np.float32)).to(device)
    given = given if bias_dtype is np.float32 else given.to(torch.bfloat16)
    y = built.apply(prepared.config, prepared.tensors, x, given, torch.bfloat16, None).double().cpu().numpy()
    wanted = oracle.linear(x.cpu().float().numpy(), weight)
    # a bias that is added to a rounded product costs two roundings of numbers around 100
    assert np.abs(y - wanted).max() <= 0.25 + 0.02 * np.abs(wanted - bias.astype(np.float64)).max()
    assert np.abs(y - wanted).mean() < 0.2


@each_device
@each_scheme
def test_smoothing_is_applied(kernel: str, scheme: str, device: str) -> None:
    bare = weight_of(replace(Scheme.parse(scheme), pre_scale=True))
    weight = replace(bare, tensors={**bare.tensors, "pre_scale": np.linspace(0.2, 1.2, 96, dtype=np.float32)})
    torch.manual_seed(2)
    check(layer_of(kernel, weight, device), weight, torch.randn(9, 96, device=device).bfloat16())


@each_device
def test_fused_parts_keep_their_own_scales(device: str) -> None:
    first, second = (weight_of(Scheme.parse("fp8-tensor/fp8-tensor"), n=16, seed=seed) for seed in (1, 2))
    joined = {role: np.concatenate([first.tensors[role], second.tensors[role]]) for role in ("codes", "scale")}
    weight = replace(first, out_features=32, tensors=joined)
    assert len(np.unique(weight.tensors["scale"])) == 2
    layer = layer_of("scaled_mm_tensor", weight, device)
    check(layer, weight, torch.randn(5, 96, device=device).bfloat16())


@each_device
@each_scheme
def test_the_operator_is_well_registered(kernel: str, scheme: str, device: str) -> None:
    weight = weight_of(Scheme.parse(scheme))
    layer = layer_of(kernel, weight, device)
    x = torch.randn(17, 96, device=device).bfloat16()
    op = torch.ops.omniplat.cuda_int_linear if kernel == "int_mm" else torch.ops.omniplat.cuda_scaled_linear
    tensors = dict(layer.named_buffers())
    arguments = (x, tensors["codes"], tensors["scale"], None, tensors.get("input_scale"), None,
                 layer.config.activation, torch.bfloat16)  # fmt: skip
    torch.library.opcheck(op, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (17, 3, 1):
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


def test_tensors_are_kept_as_large_as_they_are_stored() -> None:
    weight = weight_of(Scheme.parse("fp8-channel/fp8-token"))
    assert layer_of("scaled_mm_row", weight, "cpu").nbytes == 48 * 96 + 48 * 4


def test_nan_in_a_weight_is_refused() -> None:
    weight = weight_of(Scheme.parse("fp8-channel/fp8-token"))
    codes = weight.tensors["codes"].copy()
    codes.view(np.uint8)[3, 5] = 0xFF
    with pytest.raises(InvalidCheckpointError, match="holds NaN"):
        layer_of("scaled_mm_row", replace(weight, tensors={**weight.tensors, "codes": codes}), "cpu")


def test_a_static_scheme_needs_its_scale() -> None:
    weight = weight_of(Scheme.parse("fp8-tensor/fp8-tensor-static"))
    tensors = {role: array for role, array in weight.tensors.items() if role != "input_scale"}
    with pytest.raises(InvalidCheckpointError, match="needs input_scale"):
        layer_of("scaled_mm_tensor", replace(weight, tensors=tensors), "cpu")


@pytest.mark.parametrize(
    ("kernel", "scheme", "n", "k"),
    [
        ("scaled_mm_tensor", "fp8-channel/fp8-token", 48, 96),
        ("scaled_mm_row", "fp8-channel/a16", 48, 96),
        ("scaled_mm_row", "fp8e5m2-channel/fp8-token", 48, 96),
        ("scaled_mm_row", "fp8-channel/fp8-token", 40, 96),
        ("scaled_mm_row", "fp8-channel/fp8-token", 48, 88),
        ("int_mm", "int4-channel/int8-token", 48, 96),
        ("int_mm", "int8-channel/int8-token", 44, 96),
        ("int_mm", "int8-channel/int8-token-asym", 48, 96),
    ],
)  # fmt: skip
def test_what_is_not_declared_is_refused(kernel: str, scheme: str, n: int, k: int) -> None:
    with pytest.raises(UnsupportedCombinationError, match="needs"):
        layer_of(kernel, weight_of(Scheme.parse(scheme), n, k), "cpu")


def test_a_rule_of_rounding_that_no_quantizer_has_is_refused() -> None:
    scheme = Scheme.parse("int8-channel/int8-token")
    assert scheme.activation is not None
    odd = replace(scheme, activation=replace(scheme.activation, rounding="half-away"))
    with pytest.raises(UnsupportedCombinationError, match="nearest even"):
        layer_of("int_mm", weight_of(odd), "cpu")


@pytest.mark.parametrize(
    ("scheme", "kernel"),
    [
        ("fp8-channel/fp8-token", "scaled_mm_row"),
        ("fp8-tensor/fp8-tensor-static", "scaled_mm_tensor"),
        ("fp8-tensor/fp8-token", "scaled_mm_row"),
    ],
)
def test_plans_take_these_kernels_on_hopper(scheme: str, kernel: str) -> None:
    spec = LayerSpec("layer", "linear", 4096, 4096, Scheme.parse(scheme))
    chosen = match(spec, SPEC.capabilities, parse_device("cuda:sm90"), Policy()).chosen
    assert chosen is not None
    assert chosen.capability.name == kernel
    assert chosen.capability.impl
