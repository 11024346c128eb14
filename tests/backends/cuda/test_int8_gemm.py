"""int8 products by Hopper's kernel: to the bit what the portable one gives, and where it is taken.

It runs on a Hopper only. Elsewhere Triton's own compiler makes it for one; the interpreter has no Gluon: with it, this
file runs in a process without.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omniplat.portable.quantize import has_triton
from omniplat.scheme import Scheme, parse_activation_id
from tests.backends.cuda.building import layer_of, needs_gluon, weight_of
from tests.support.cubin import Resources, resources
from tests.support.triton import needs_compiler, needs_cuda, run_without_interpreter

if has_triton():
    import triton
    from omniplat_cuda.kernels import int8_gemm
    from triton.backends.compiler import GPUTarget

    from omniplat.portable import int8_gemm_triton
    from omniplat.portable.compilation import Compilation, compile_calls
    from omniplat.portable.launch import collected
    from tests.backends.cuda.overtaking import overtaking
    from tests.support.standin import StandIn, standing_in

    HAS_HOPPER = torch.cuda.is_available() and int8_gemm.is_hopper(torch.device("cuda", 0))
else:
    HAS_HOPPER = False

needs_installed = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="no Hopper, or no Triton with its Gluon")
#: Multiprocessors of an H200, and of nothing else that matters here.
PROCESSORS = 132


def operands(m: int, n: int, k: int, one_token_scale: bool, bias: torch.dtype | None, device: str) -> tuple[Any, ...]:
    x, codes = (torch.randint(-128, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n))
    x_scale = torch.rand(1 if one_token_scale else m, 1, device=device) / 100
    scale = torch.rand(1, n, device=device) / 100
    return x, codes, x_scale, scale, None if bias is None else torch.randn(n, device=device).to(bias)


#: A tile and less, a ring and less, edges within tiles, one tile for a program, an odd number of them and many.
SHAPES = [
    (1, 8, 16),
    (130, 136, 80),
    (600, 264, 2064),
    (128 * 12, 128 * 11, 768),
    (513, 128 * 80, 784),
    (4166, 4104, 144),
]


@needs_cuda
@needs_hopper
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize(
    ("one_token_scale", "bias", "dtype"),
    [
        (False, None, torch.bfloat16),
        (True, torch.bfloat16, torch.bfloat16),
        (False, torch.float32, torch.float16),
        (True, None, torch.float16),
    ],
)
def test_the_product(
    m: int, n: int, k: int, one_token_scale: bool, bias: torch.dtype | None, dtype: torch.dtype
) -> None:
    from omniplat_cuda.kernels import int8_gemm_hopper

    torch.manual_seed(m)
    # only the first call goes through Triton's binder
    for _ in range(2):
        x, codes, x_scale, scale, added = operands(m, n, k, one_token_scale, bias, "cuda")
        found = int8_gemm_hopper.int8_product(x, codes, x_scale, scale, added, dtype)
        wanted = (x.double() @ codes.double().t()).float() * scale * x_scale
        wanted = wanted if added is None else wanted + added.float()
        torch.testing.assert_close(found, wanted.to(dtype), rtol=0, atol=0)


@needs_cuda
@needs_hopper
def test_a_graph_replays_and_streams_share_a_layer() -> None:
    """Descriptors are made at every call: those of a graph stay what they were, and no call has another's."""
    scheme = Scheme.parse("int8-channel/int8-token")
    layer = layer_of("int_mm", weight_of(scheme, 264, 2064), "cuda")
    x = torch.randn(600, 2064, device="cuda").bfloat16()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [torch.randn(rows, 2064, device="cuda").bfloat16() for rows in (520, 600, 777, 1024)]
    wanted = [layer(other) for other in inputs]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for other in inputs * 5:
        for stream, results in zip(streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(layer(other))
    torch.cuda.synchronize()
    for results in found:
        for result, right in zip(results, wanted * 5, strict=True):
            torch.testing.assert_close(result, right, rtol=0, atol=0)
    x.copy_(inputs[1])
    graph.replay()
    torch.testing.assert_close(y, wanted[1], rtol=0, atol=0)


@needs_cuda
@needs_hopper
@pytest.mark.parametrize("one_token_scale", [False, True])
def test_it_waits_for_what_is_ahead_of_it(one_token_scale: bool) -> None:
    from omniplat_cuda.kernels.int8_gemm_hopper import int8_product

    x, codes, x_scale, scale, bias = operands(600, 264, 2064, one_token_scale, torch.bfloat16, "cuda")

    def product(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        return int8_product(x, codes, x_scale, scale, bias, torch.bfloat16)

    wanted = product(x, x_scale)
    for found in overtaking(product, x, x_scale):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Nothing is compiled yet, and nothing that was compiled here is left to a real device."""
    from omniplat_cuda.kernels import int8_gemm_hopper

    def forget() -> None:
        int8_gemm_hopper._launch_of.cache_clear()
        int8_gemm_hopper._ping_pong.device_caches.clear()

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(int8_gemm_hopper, "multiprocessors", lambda device: PROCESSORS)
    forget()
    with standing_in(StandIn()) as standin:
        yield standin
        forget()


@needs_compiler
@needs_gluon
@pytest.mark.parametrize(
    ("one_token_scale", "bias", "dtype"), [(False, None, torch.bfloat16), (True, torch.float32, torch.float16)]
)
def test_it_is_compiled_ahead(
    driver: StandIn, one_token_scale: bool, bias: torch.dtype | None, dtype: torch.dtype
) -> None:
    """One form for every number of tokens and every shape: a call finds it, and holds it."""
    from omniplat_cuda.kernels import int8_gemm_hopper

    calls = [
        partial(int8_gemm_hopper.int8_product, *operands(m, n, k, one_token_scale, bias, "cpu"), dtype)
        for m, n, k in ((513, 256, 128), (4096, 1024, 64))
    ]
    assert compile_calls(calls) == Compilation(compiled=1, cached=0)
    assert not driver.launched
    for call in calls * 2:
        call()
    assert driver.loaded == 1
    # no more programs than tiles of 128 by 128, nor than multiprocessors
    assert [launched.grid for launched in driver.launched] == [(10, 1, 1), (PROCESSORS, 1, 1)] * 2


@needs_compiler
@needs_gluon
def test_what_it_is_compiled_to(driver: StandIn, tmp_path: Path) -> None:
    """Products of a warpgroup in int8, as wide as the tile, within the registers and the shared memory of an sm90. All
    three groups of warps wait for the kernel ahead of theirs."""
    from omniplat_cuda.kernels import int8_gemm_hopper

    found: list[Any] = []
    compiling = SimpleNamespace(collect=lambda launch, arguments: found.append(launch.compile(arguments)))
    with collected(compiling):
        int8_gemm_hopper.int8_product(*operands(513, 256, 128, False, torch.bfloat16, "cpu"), torch.bfloat16)
    (compiled,) = found
    # four of 32 columns, for each of two halves of the tokens and of two warpgroups
    assert compiled.asm["ptx"].count("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8") == 4 * 2 * 2
    assert "cp.async.bulk.tensor.2d.global.shared::cta" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024
    # three groups of four warps start with all there are
    assert resources(compiled, tmp_path) == Resources(registers=168, stack=0)
    assert compiled.metadata.launch_pdl
    before, *after = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert len(after) == 3
    assert not re.search(r"\b(ld|st)\.global|cp\.async\.bulk\.tensor", before)


@needs_compiler
@pytest.mark.parametrize("activation", ["int8-token", "fp8-tensor-static", "mxfp4"])
@pytest.mark.parametrize(("device", "releases"), [(90, True), (90, False), (89, True)])
def test_quantizers_let_it_start(monkeypatch: pytest.MonkeyPatch, activation: str, device: int, releases: bool) -> None:
    """Before they read, where they are asked to: the instruction is of sm90, so that it is nowhere else."""
    from omniplat.portable import mx_grid_triton, quantize_triton

    quant = parse_activation_id(activation)
    assert quant is not None
    for module in (mx_grid_triton, quantize_triton):
        monkeypatch.setattr(module, "launches_early", lambda _: device == 90)
    x, given = torch.zeros(4, 256, dtype=torch.bfloat16), None if quant.dynamic else torch.ones(1, 1)
    found: list[Any] = []
    compiling = SimpleNamespace(collect=lambda launch, arguments: found.append(launch.compile(arguments)))

    def forget() -> None:
        for cached in (mx_grid_triton._launch_of, quantize_triton._form_of):
            cached.cache_clear()
        for kernel in (mx_grid_triton._rows, quantize_triton._rows):
            kernel.device_caches.clear()

    # what is compiled depends on the device, which Triton keeps with it
    forget()
    with standing_in(StandIn(GPUTarget("cuda", device, 32))), collected(compiling):
        if quant.scale_format == "e8m0":
            mx_grid_triton.regroup_rows(x, quant, None, releases=releases)
        else:
            quantize_triton.quantize_rows(x, quant, None, given, releases=releases)
    forget()
    early = releases and device == 90
    before, *after = found[0].asm["ptx"].split("griddepcontrol.launch_dependents")
    assert len(after) == early
    assert ("ld.global" in before) != early


@needs_installed
@pytest.mark.parametrize(
    ("capability", "hip", "found"),
    [((9, 0), None, True), ((12, 0), None, True), ((8, 9), None, False), ((9, 4), "7.0", False)],
)
def test_which_devices_start_kernels_early(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, found: bool
) -> None:
    from omniplat.portable.rows_triton import launches_early

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    # past the cache, which other tests' devices are in
    assert launches_early.__wrapped__(torch.device("cuda", 0)) == found
    assert not launches_early(torch.device("cpu"))


@needs_installed
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "hopper", "taken"),
    [
        (513, 64, 64, torch.bfloat16, True, True),
        (4096, 8, 16, torch.float16, True, True),
        (512, 64, 64, torch.bfloat16, True, False),
        (513, 64, 64, torch.float32, True, False),
        (513, 64, 72, torch.bfloat16, True, False),
        (513, 60, 64, torch.bfloat16, True, False),
        (513, 64, 64, torch.bfloat16, False, False),
    ],
)
def test_where_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, dtype: torch.dtype, hopper: bool, taken: bool
) -> None:
    import omniplat_cuda.kernels as package

    given = operands(m, n, k, False, None, "cpu")
    wanted = torch.empty(0)
    here = SimpleNamespace(int8_product=lambda *arguments: (arguments, wanted)[1])
    monkeypatch.setitem(sys.modules, "omniplat_cuda.kernels.int8_gemm_hopper", here)
    monkeypatch.setattr(package, "int8_gemm_hopper", here, raising=False)
    monkeypatch.setattr(int8_gemm, "is_hopper", lambda device: hopper)
    monkeypatch.setattr(int8_gemm_triton, "int8_product", lambda *arguments: torch.empty(1))
    assert (int8_gemm.int8_product(*given, dtype) is wanted) == taken


@needs_installed
@pytest.mark.parametrize(
    ("capability", "release", "hip", "found"),
    [
        ((9, 0), "3.6.0", None, True),
        ((9, 0), "3.6.0+git1234", None, True),
        ((10, 0), "3.6.0", None, False),
        ((8, 9), "3.6.0", None, False),
        ((9, 0), "3.5.1", None, False),
        ((9, 0), "3.7.1", None, True),
        ((9, 0), "3.8.0", None, True),
        ((9, 0), "3.9.0", None, True),
        ((9, 0), "3.10.0", None, False),
        ((9, 4), "3.6.0", "7.0", False),
    ],
)
def test_which_devices_run_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], release: str, hip: str | None, found: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(triton, "__version__", release)
    # past the cache, which other tests' devices are in
    asked = int8_gemm.is_hopper.__wrapped__
    assert asked(torch.device("cuda", 0)) == found
    assert not asked(torch.device("cpu"))


def test_without_the_interpreter() -> None:
    run_without_interpreter(__file__)
