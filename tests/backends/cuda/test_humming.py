"""Linear layers over humming against the oracle: on CUDA its kernels, on the CPU the tensors that it takes in."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from omniplat_cuda.kernels.humming_fixups import FIXUPS, fixed
from omniplat_cuda.kernels.humming_forms import dequantized, form_of, input_tensors
from omniplat_cuda.spec import SPEC

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.conformance import expected
from omniplat.conformance.tolerances import excess
from omniplat.conformance.weights import random_weight
from omniplat.device import parse_device
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.match import Policy, match
from omniplat.portable.ahead import compile_kernels
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme
from tests.backends.cuda.building import CAPABILITIES, DTYPES, check, layer_of
from tests.support.triton import needs_cuda

#: kernel, scheme
LAYERS = [
    *[("humming_linear", f"{weight}/a16") for weight in (
        "mxfp4", "nvfp4", "int4-g128", "uint4-g128", "int4-g32", "uint4-channel", "int8-g128", "int8-channel",
        "int8-tensor", "int8-bnb", "mxfp8", "fp8-tensor", "fp8-channel")],
    ("humming_linear_block", "fp8-block128x128/a16"),
    ("humming_linear_fp8", "fp8-channel/fp8-token"),
    ("humming_linear_fp8", "fp8-tensor/fp8-token"),
    ("humming_linear_mxfp4_a8", "mxfp4/fp8-token"),
]  # fmt: skip
each_layer = pytest.mark.parametrize(("kernel", "scheme"), LAYERS)
#: N, K: filled up on both sides; long sums that programs share.
SHAPES = [(384, 640), (1024, 4096)]
ROWS = (1, 16, 64, 256, 4096)
COMPARED = 48


def weight_of(scheme: str, n: int, k: int, dtype: str = "bf16", seed: int = 0) -> CanonicalWeight:
    """A Gaussian weight; rows of different sizes, so that a scale in the wrong place shows."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, k)).astype(np.float32) * np.linspace(0.5, 2.0, n, dtype=np.float32)[:, None] / 8
    parsed = Scheme.parse(scheme)
    if parsed.weight.element == "int8_bnb":
        return random_weight(parsed, n, k, rng)
    return replace(oracle.quantize_weight(values, parsed.weight), scheme=parsed)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[tuple[str, str, int, int], QuantLinear]:
    """The layers of the tests that run, their kernels for `ROWS` compiled beside each other; a test meets failures."""
    from omniplat_cuda.kernels.humming_runtime import Key, bucket_of, compile_ahead

    asked = [item.callspec.params for item in request.session.items if "compiled" in getattr(item, "fixturenames", ())]
    layers, wanted = {}, set()
    for kernel, scheme, n, k in sorted({(p["kernel"], p["scheme"], p["n"], p["k"]) for p in asked}):
        try:
            layer = layer_of(kernel, weight_of(scheme, n, k), "cuda")
        except Exception as exc:
            print(f"{kernel} {scheme} {n}x{k}: {type(exc).__name__}: {exc}")
            continue
        layers[kernel, scheme, n, k] = layer
        wanted |= {Key(layer.config.layer, "dense", bucket_of(rows, "dense"), 0, True) for rows in ROWS}
    compile_ahead(wanted)
    return layers


@needs_cuda
@each_layer
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_kernels_compute_what_the_oracle_does(
    kernel: str, scheme: str, n: int, k: int, rows: int, compiled: dict[tuple[str, str, int, int], QuantLinear]
) -> None:
    weight = weight_of(scheme, n, k)
    layer = compiled[kernel, scheme, n, k]
    torch.manual_seed(rows)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    chosen = np.unique(np.linspace(0, rows - 1, min(rows, COMPARED)).astype(int))
    found = layer(x)[torch.from_numpy(chosen).cuda()].double().cpu().numpy()
    wanted = expected.linear(x.float().cpu().numpy()[chosen], weight, CAPABILITIES[kernel], "bf16")
    assert not (problem := excess(found, wanted.y, wanted.allowed)), str(problem)
    assert np.linalg.norm(found - wanted.y) < 6e-3 * np.linalg.norm(wanted.y)


@each_layer
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_tensors_stand_for_the_weight(kernel: str, scheme: str, dtype: str) -> None:
    n, k = (256, 384) if "block" in scheme else (200, 384)
    weight = weight_of(scheme, n, k)
    spec = LayerSpec("layer", "linear", n, k, weight.scheme, dtype=dtype)
    tensors = to_torch(weight)
    form = form_of(tensors, spec)
    found = dequantized(input_tensors(tensors, form, "layer"), form).double().numpy()
    wanted = oracle.dequantize(weight)
    rounded = 2.0 ** (-8 if dtype == "bf16" else -11) if form.scale_dtype.endswith("16") else 2.0**-24
    assert np.abs(found - wanted).max() <= rounded * np.abs(wanted).max()
    assert np.array_equal(found == 0, wanted == 0)


@each_layer
def test_a_layer_on_the_cpu_computes_what_the_oracle_does(kernel: str, scheme: str) -> None:
    n, k = (128, 256) if "block" in scheme else (48, 256)
    weight = weight_of(scheme, n, k)
    layer = layer_of(kernel, weight, "cpu")
    torch.manual_seed(0)
    assert layer(torch.empty(0, k, dtype=torch.bfloat16)).shape == (0, n)
    check(layer, weight, torch.randn(5, k).bfloat16())
    check(layer, weight, torch.randn(2, 3, 2 * k).bfloat16()[..., ::2])


@each_layer
def test_it_traces_whole(kernel: str, scheme: str) -> None:
    n, k = (128, 256) if "block" in scheme else (48, 256)
    layer = layer_of(kernel, weight_of(scheme, n, k), "cpu")
    torch._dynamo.reset()
    compiled_layer = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(9, k).bfloat16()
    for rows in (9, 3, 1):
        torch.testing.assert_close(compiled_layer(x[:rows]), layer(x[:rows]), rtol=0, atol=0)


@needs_cuda
@pytest.mark.parametrize("scheme", ["mxfp4/a16", "nvfp4/a16"])
def test_it_traces_whole_on_the_device_and_a_graph_replays(scheme: str) -> None:
    n, k = SHAPES[1]
    layer = layer_of("humming_linear", weight_of(scheme, n, k), "cuda")
    x = torch.randn(16, k, device="cuda").bfloat16()
    eager = layer(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), eager, rtol=1e-2, atol=1e-2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for _ in range(3):
        x.copy_(torch.randn(16, k, device="cuda"))
        graph.replay()
        torch.testing.assert_close(y, layer(x), rtol=0, atol=0)


@needs_cuda
def test_kernels_are_compiled_ahead() -> None:
    n, k = SHAPES[0]
    weight = weight_of("mxfp4/a16", n, k)
    layer = layer_of("humming_linear", weight, "cuda")
    compile_kernels([layer], (1, 16))
    check(layer, weight, torch.randn(16, k, device="cuda").bfloat16())


@needs_cuda
def test_rows_alone_are_what_they_are_among_others() -> None:
    n, k = SHAPES[1]
    layer = layer_of("humming_linear", weight_of("mxfp4/a16", n, k), "cuda")
    x = torch.randn(300, k, device="cuda").bfloat16()
    torch.testing.assert_close(layer(x[7:8]), layer(x)[7:8], rtol=0, atol=0)


@needs_cuda
def test_streams_share_a_layer() -> None:
    n, k = SHAPES[1]
    layer = layer_of("humming_linear", weight_of("mxfp4/a16", n, k), "cuda")
    x = torch.randn(16, k, device="cuda").bfloat16()
    wanted = layer(x)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found: list[torch.Tensor] = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(layer(x))
    torch.cuda.synchronize()
    for y in found:
        torch.testing.assert_close(y, wanted, rtol=0, atol=0)


@needs_cuda
@pytest.mark.parametrize("scheme", ["mxfp4/a16", "nvfp4/a16", "uint4-g128/a16", "fp8-channel/a16", "mxfp8/a16"])
def test_f16_on_the_device(scheme: str) -> None:
    n, k = SHAPES[0]
    weight = weight_of(scheme, n, k)
    layer = layer_of("humming_linear", weight, "cuda", "f16")
    check(layer, weight, torch.randn(16, k, device="cuda").half())
    assert DTYPES[torch.float16] == "f16"


def test_bias_and_smoothing() -> None:
    bare = weight_of("mxfp4/a16", 48, 256)
    scheme = replace(bare.scheme, pre_scale=True)
    pre_scale = np.linspace(0.25, 1.25, 256, dtype=np.float32)
    bias = np.linspace(-3, 3, 48).astype(ml_dtypes.bfloat16)
    weight = replace(bare, scheme=scheme, tensors={**bare.tensors, "pre_scale": pre_scale})
    spec = LayerSpec("layer", "linear", 48, 256, scheme, bias=True)
    layer = layer_of("humming_linear", weight, "cpu")
    layer = QuantLinear(spec, layer.kernel, layer.kernel.prepare(to_torch(weight), spec),
                        torch.from_numpy(bias.astype(np.float32)).bfloat16())  # fmt: skip
    # the smoothed input is rounded to bf16 once more
    x = torch.randn(7, 256).bfloat16()
    smoothed = (x.float() * torch.from_numpy(pre_scale)).bfloat16().double().numpy()
    wanted = smoothed @ oracle.dequantize(bare).T + bias.astype(np.float64)
    np.testing.assert_allclose(layer(x).double().numpy(), wanted, rtol=2**-7, atol=2**-6)


def uint4_with(zero: np.ndarray) -> CanonicalWeight:
    weight = weight_of("uint4-g128/a16", 48, 256)
    return replace(weight, tensors={**weight.tensors, "zero_point": zero})


@pytest.mark.parametrize(
    ("zero", "kind"),
    [
        (np.arange(96, dtype=np.int16).reshape(48, 2) % 16, "int"),
        # GPTQ's zero points of the first version reach 16
        (np.arange(96, dtype=np.int16).reshape(48, 2) % 17, "float"),
        (np.full((48, 2), 7.5, np.float32), "float"),
    ],
)
def test_zero_points_that_are_no_codes(zero: np.ndarray, kind: str) -> None:
    weight = uint4_with(zero)
    layer = layer_of("humming_linear", weight, "cpu")
    assert f'"zero":"{kind}"' in layer.config.form
    check(layer, weight, torch.randn(3, 256).bfloat16())


def test_zero_points_that_the_dtype_does_not_hold_are_refused() -> None:
    with pytest.raises(UnsupportedCombinationError, match="numbers of bf16"):
        layer_of("humming_linear", uint4_with(np.full((48, 2), 7.4375 + 2**-8, np.float32)), "cpu")


def test_parts_keep_their_own_scales() -> None:
    for scheme, role in (("fp8-tensor/a16", "scale"), ("nvfp4/a16", "global_scale")):
        first, second = (weight_of(scheme, 16, 256, seed=seed) for seed in (1, 2))
        second = replace(second, tensors={**second.tensors, role: second.tensors[role] * np.float32(1.5)})
        joined = {name: np.concatenate([first.tensors[name], second.tensors[name]]) for name in first.tensors}
        weight = replace(first, out_features=32, tensors=joined)
        layer = layer_of("humming_linear", weight, "cpu")
        assert '"channel"' in layer.config.form
        check(layer, weight, torch.randn(3, 256).bfloat16())


def test_nan_and_wide_rows_are_refused() -> None:
    weight = weight_of("mxfp4/fp8-token", 48, 256)
    scale = weight.tensors["scale"].copy()
    scale[3, 1] = 255
    with pytest.raises(InvalidCheckpointError, match="NaN"):
        layer_of("humming_linear", replace(weight, tensors={**weight.tensors, "scale": scale}), "cpu")
    scale = weight.tensors["scale"].copy()
    scale[3, 1] = scale[3].max() - 12
    wide = replace(weight, tensors={**weight.tensors, "scale": scale})
    with pytest.raises(InvalidCheckpointError, match="11 binades"):
        layer_of("humming_linear_mxfp4_a8", wide, "cpu")
    codes = weight.tensors["codes"].copy()
    codes[3, 16:32] = 0x80
    layer_of("humming_linear_mxfp4_a8", replace(wide, tensors={**wide.tensors, "codes": codes}), "cpu")


@pytest.mark.parametrize(
    ("kernel", "scheme"),
    [
        ("humming_linear", "int3-g128/a16"),
        ("humming_linear", "fp8-block128x128/a16"),
        ("humming_linear_fp8", "mxfp8/fp8-token"),
        ("humming_linear_fp8", "fp8-channel/fp8-tensor"),
    ],
)
def test_what_is_not_declared_is_refused(kernel: str, scheme: str) -> None:
    with pytest.raises(UnsupportedCombinationError, match="needs"):
        layer_of(kernel, weight_of(scheme, 128, 256), "cpu")


def test_schedules_known_to_be_wrong_are_replaced() -> None:
    deep = {"block_shape": (8, 128, 256), "warp_shape": (8, 32, 64), "use_tma": True, "num_stages": 3}
    assert fixed(deep, "indexed", 16)["block_shape"] == (8, 128, 128)
    assert fixed(deep, "dense", 16) == deep
    narrow = {"block_shape": (64, 128, 128), "warp_shape": (64, 16, 128), "use_tma": False}
    assert fixed(narrow, "indexed", 8)["warp_shape"] == (64, 32, 128)
    assert fixed(narrow, "indexed", 16) == narrow
    assert all(fixup.reason for fixup in FIXUPS)


@pytest.mark.parametrize(
    ("scheme", "arch", "kernel"),
    [
        ("mxfp4/a16", "sm90", "portable_linear"),
        ("int8-bnb/int8-bnb", "sm90", "humming_linear"),
        ("nvfp4/a16", "sm120", "humming_linear"),
        ("int4-g128/a16", "sm75", "humming_linear_turing"),
    ],
)
def test_plans_take_it_where_nothing_faster_is(scheme: str, arch: str, kernel: str) -> None:
    dtype = "f16" if arch == "sm75" else "bf16"
    spec = LayerSpec("layer", "linear", 4096, 4096, Scheme.parse(scheme), dtype=dtype)
    chosen = match(spec, SPEC.capabilities, parse_device(f"cuda:{arch}"), Policy()).chosen
    assert chosen is not None
    assert chosen.capability.name == kernel
