"""Linear layers in FP8 blocks against the oracle, within what the declared sums and the output's rounding allow.

On CUDA the operator takes Triton's kernels, on a CPU plain torch; `test_scaled_product` has the kernels alone. Torch's
own product takes blocks of 128 rows, whole, on Hopper.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omniplat_cuda.kernels.fp8_block import has_block_product
from omniplat_cuda.spec import SPEC

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.device import parse_device
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.match import Policy, match
from omniplat.portable.ahead import compile_kernels
from omniplat.scheme import Scheme
from tests.backends.cuda.building import DTYPES, check, each_device, layer_of
from tests.support.triton import needs_cuda

KERNEL, NATIVE = "portable_fp8_block", "scaled_mm_block"
SCHEMES = tuple(f"fp8-block{rows}x128/fp8-g128" for rows in (128, 64, 32, 16))
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)
each_layer = pytest.mark.parametrize(
    ("kernel", "scheme", "n", "k"),
    [*((KERNEL, scheme, 200, 336) for scheme in SCHEMES), (NATIVE, SCHEMES[0], 256, 512)],
)


def weight_of(scheme: str | Scheme = SCHEMES[0], n: int = 200, k: int = 336, rule: str = "absmax") -> CanonicalWeight:
    """Neither N nor K is a multiple of a block; magnitudes differ from block to block."""
    parsed = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    assert parsed.activation is not None
    activation = replace(parsed.activation, scale_rule=rule, scale_format="e8m0" if rule == "ceil" else "f32")
    rng = np.random.default_rng(n + k)
    values = rng.standard_normal((n, k)) * np.exp2(rng.integers(-6, 2, (-(-n // 8), 1)).repeat(8, 0)[:n])
    weight = oracle.quantize_weight(values.astype(np.float32), parsed.weight)
    return replace(weight, scheme=replace(parsed, activation=activation))


def tokens(rows: int, k: int, device: str) -> torch.Tensor:
    """Groups of 128 columns are of sizes that differ by up to 2^6: one scale for all of them would be seen."""
    torch.manual_seed(rows)
    sizes = torch.exp2(torch.randint(-3, 4, (rows, -(-k // 128)))).repeat_interleave(128, 1)[:, :k]
    return (torch.randn(rows, k) * sizes).to(device)


@each_device
@each_scheme
@pytest.mark.parametrize("rule", ["absmax", "absmax-reciprocal", "ceil"])
def test_a_layer_computes_what_the_oracle_does(scheme: str, rule: str, device: str) -> None:
    weight = weight_of(scheme, rule=rule)
    for dtype, name in DTYPES.items():
        layer = layer_of(KERNEL, weight, device, name)
        assert layer(torch.empty(0, 336, dtype=dtype, device=device)).shape == (0, 200)
        for rows in (1, 5, 17, 130):
            check(layer, weight, tokens(rows, 336, device).to(dtype))
        check(layer, weight, torch.randn(2, 5, 672, device=device).to(dtype)[..., ::2])


@each_device
@each_scheme
def test_scales_of_the_weight_that_are_powers_of_two(scheme: str, device: str) -> None:
    """As DeepSeek stores them where activations have them, too: a byte each."""
    parsed = Scheme.parse(scheme)
    weight = weight_of(replace(parsed, weight=replace(parsed.weight, scale_format="e8m0")), rule="ceil")
    assert weight.tensors["scale"].dtype == np.uint8
    check(layer_of(KERNEL, weight, device), weight, tokens(9, 336, device).bfloat16())
    scale = weight.tensors["scale"].copy()
    scale[0, 0] = 255
    with pytest.raises(InvalidCheckpointError, match="NaN"):
        layer_of(KERNEL, replace(weight, tensors={**weight.tensors, "scale": scale}), device)


@each_device
def test_bias_is_added_before_the_one_rounding(device: str) -> None:
    bare = weight_of()
    bias = np.linspace(-40, 40, bare.out_features, dtype=np.float32)
    weight = replace(bare, tensors={**bare.tensors, "bias": bias})
    layer = layer_of(KERNEL, bare, device)
    layer.bias = torch.from_numpy(bias).to(device)
    check(layer, weight, tokens(9, 336, device).bfloat16())


@each_device
def test_smoothing_is_applied(device: str) -> None:
    bare = weight_of(replace(Scheme.parse(SCHEMES[0]), pre_scale=True))
    pre_scale = np.linspace(0.2, 1.2, bare.in_features, dtype=np.float32)
    weight = replace(bare, tensors={**bare.tensors, "pre_scale": pre_scale})
    check(layer_of(KERNEL, weight, device), weight, tokens(9, 336, device).bfloat16())


@each_device
@each_layer
def test_the_operator_is_well_registered(kernel: str, scheme: str, n: int, k: int, device: str) -> None:
    layer = layer_of(kernel, weight_of(scheme, n, k), device)
    x = tokens(70, k, device).bfloat16()
    arguments = (x, layer.codes, layer.scale, None, None, layer.config.activation, layer.config.block_rows, x.dtype)
    torch.library.opcheck(getattr(torch.ops.omniplat, layer.kernel.operator), arguments)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (70, 33, 3, 1):
        torch.testing.assert_close(compiled(x[:rows]), layer(x[:rows]), rtol=0, atol=0)


@needs_cuda
@each_layer
def test_a_graph_replays(kernel: str, scheme: str, n: int, k: int) -> None:
    layer = layer_of(kernel, weight_of(scheme, n, k), "cuda")
    x = tokens(70, k, "cuda").bfloat16()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(tokens(71, k, "cuda")[:70])
    graph.replay()
    torch.testing.assert_close(y, layer(x), rtol=0, atol=0)


@needs_cuda
def test_two_streams_run_one_layer() -> None:
    layer = layer_of(KERNEL, weight_of(n=1024, k=1024), "cuda")
    inputs = [tokens(rows, 1024, "cuda").bfloat16() for rows in (300, 301)]
    wanted = [layer(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(layer(x))
        torch.cuda.synchronize()
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@needs_cuda
def test_calls_find_what_was_compiled_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    layer = layer_of(KERNEL, weight_of(n=144, k=656), "cuda")
    assert compile_kernels([layer], (1, 32, 4096)) > 0
    told: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: told.append(event["cache_hit"]))
    for rows in (1, 3, 16, 17, 32, 500):
        layer(tokens(rows, 656, "cuda").bfloat16())
    assert all(told), "a call compiled a kernel"


@needs_cuda
@pytest.mark.parametrize("rows", [1, 16, 64, 4096])
def test_layers_of_a_models_size_on_cuda(rows: int) -> None:
    weight = weight_of(n=1536, k=7168)
    check(layer_of(KERNEL, weight, "cuda"), weight, tokens(rows, 7168, "cuda").bfloat16())


def test_tensors_are_kept_as_large_as_they_are_stored() -> None:
    weight = weight_of()
    assert layer_of(KERNEL, weight, "cpu").nbytes == weight.nbytes == 200 * 336 + 4 * 2 * 3


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_in_a_weight_is_refused(code: int) -> None:
    weight = weight_of()
    codes = weight.tensors["codes"].copy()
    codes.view(np.uint8)[3, 5] = code
    with pytest.raises(InvalidCheckpointError, match="holds NaN"):
        layer_of(KERNEL, replace(weight, tensors={**weight.tensors, "codes": codes}), "cpu")


@pytest.mark.parametrize(
    "scheme", ["fp8-block128x128/a16", "fp8-block128x128/fp8-token", "fp8-block64x64/fp8-g64", "fp8-channel/fp8-g128"]
)
def test_what_is_not_declared_is_refused(scheme: str) -> None:
    parsed = Scheme.parse(scheme)
    bare = oracle.quantize_weight(np.ones((32, 128), np.float32), parsed.weight)
    with pytest.raises(UnsupportedCombinationError, match="needs"):
        layer_of(KERNEL, replace(bare, scheme=parsed), "cpu")


@each_scheme
@pytest.mark.parametrize("arch", ["sm89", "sm90", "sm100", "sm120"])
def test_plans_take_it_where_there_are_fp8_units(scheme: str, arch: str) -> None:
    spec = LayerSpec("layer", "linear", 4096, 7168, Scheme.parse(scheme))
    for prefer in ("memory", "speed"):
        chosen = match(spec, SPEC.capabilities, parse_device(f"cuda:{arch}"), Policy(prefer=prefer)).chosen
        assert chosen is not None
        native = arch == "sm90" and scheme == SCHEMES[0]
        assert chosen.capability.name == (NATIVE if native else KERNEL)


@pytest.mark.parametrize(("n", "k"), [(128, 640), (144, 512)])
def test_torchs_product_is_for_whole_blocks_and_groups_in_fours(n: int, k: int) -> None:
    spec = LayerSpec("layer", "linear", n, k, Scheme.parse(SCHEMES[0]))
    chosen = match(spec, SPEC.capabilities, parse_device("cuda:sm90"), Policy()).chosen
    assert chosen is not None
    assert chosen.capability.name == KERNEL
    with pytest.raises(UnsupportedCombinationError, match=f"{NATIVE}  needs (in|out) a multiple of"):
        layer_of(NATIVE, weight_of(n=n, k=k), "cpu")


def products_counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens torch's product was given, call by call."""
    counted: list[int] = []
    product = torch._scaled_mm

    def counting(a: torch.Tensor, *rest: torch.Tensor, **named: object) -> torch.Tensor:
        counted.append(len(a))
        return product(a, *rest, **named)

    monkeypatch.setattr(torch, "_scaled_mm", counting)
    return counted


@each_device
@pytest.mark.parametrize("rule", ["absmax", "absmax-reciprocal", "ceil"])
def test_torchs_product_computes_what_the_oracle_does(rule: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that do not come in fours, and few, for which Triton's product is taken."""
    counted = products_counted(monkeypatch)
    weight = weight_of(n=256, k=1024, rule=rule)
    for dtype, name in DTYPES.items():
        layer = layer_of(NATIVE, weight, device, name)
        assert layer(torch.empty(0, 1024, dtype=dtype, device=device)).shape == (0, 256)
        for rows in (1, 16, 17, 64, 131):
            check(layer, weight, tokens(rows, 1024, device).to(dtype))
        check(layer, weight, torch.randn(2, 15, 2048, device=device).to(dtype)[..., ::2])
    native = has_block_product(torch.device(device, 0))
    assert counted == ([20, 64, 132, 32] * len(DTYPES) if native else [])


@each_device
def test_torchs_product_with_a_bias_and_smoothed(device: str) -> None:
    """A bias is added before the one rounding."""
    bare = weight_of(replace(Scheme.parse(SCHEMES[0]), pre_scale=True), n=256, k=512)
    bias = np.linspace(-40, 40, bare.out_features, dtype=np.float32)
    smooth = {"pre_scale": np.linspace(0.2, 1.2, bare.in_features, dtype=np.float32)}
    weight = replace(bare, tensors={**bare.tensors, **smooth, "bias": bias})
    layer = layer_of(NATIVE, replace(bare, tensors={**bare.tensors, **smooth}), device)
    layer.bias = torch.from_numpy(bias).to(device)
    for rows in (9, 70):
        check(layer, weight, tokens(rows, 512, device).bfloat16())


def test_without_fp8_units_weights_are_decoded() -> None:
    spec = LayerSpec("layer", "linear", 4096, 7168, Scheme.parse(SCHEMES[0]))
    chosen = match(spec, SPEC.capabilities, parse_device("cuda:sm80"), Policy()).chosen
    assert chosen is not None
    assert chosen.capability.name == "portable_linear"
