"""mxfp4 weights that stay in 4 bits: how they lie in memory, what PTX makes of them, and that the kernel compiles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from omniplat_cuda.kernels.decoded_ptx import CONSTRAINTS, NORMAL, decoder
from omniplat_cuda.kernels.decoded_words import MAX_BELOW, to_e4m3, to_shifts, to_words

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.oracle.reencode import reencode
from omniplat.portable.quantize import has_triton
from omniplat.portable.reencode import row_binades
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme
from tests.backends.cuda.building import each_device, layer_of, needs_gluon, require_product
from tests.support.cubin import resources
from tests.support.ptx import evaluated
from tests.support.triton import needs_compiler, needs_cuda, run_without_interpreter

if has_triton():
    from omniplat.portable.compilation import Compilation, compile_calls
    from omniplat.portable.launch import Launch, collected
    from tests.backends.cuda.overtaking import overtaking
    from tests.support.standin import StandIn, standing_in


def weight_of(rows: int, columns: int, span: int, seed: int) -> CanonicalWeight:
    """Groups anywhere within `span` binades, one of each row at either end, and some of zeros."""
    rng = np.random.default_rng(seed)
    scheme = Scheme.parse("mxfp4/mxfp4")
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    values[rng.random((rows, columns // 32)).repeat(32, axis=1) < 0.1] = 0.0
    weight = oracle.quantize_weight(values, scheme.weight)
    scale = 130 - rng.integers(0, span + 1, (rows, columns // 32))
    scale[:, 0], scale[:, -1] = 130, 130 - span
    return CanonicalWeight(scheme, rows, columns, {**weight.tensors, "scale": scale.astype(np.uint8)})


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 13),
    span=st.integers(0, MAX_BELOW),
    seed=st.integers(0, 2**32),
)
def test_words_and_shifts_hold_the_re_encoded_weight(rows: int, groups: int, span: int, seed: int) -> None:
    weight = weight_of(rows, 32 * groups, 0 if groups == 1 else span, seed)
    wanted = reencode(weight, "fp8-channel")
    stored = to_torch(weight)
    below, scale = row_binades(stored)
    words, shifts = to_words(stored.tensors["codes"]), to_shifts(below)
    found = to_e4m3(words, shifts, weight.in_features)
    np.testing.assert_array_equal(found.numpy(), wanted.tensors["codes"].view(np.uint8))
    np.testing.assert_array_equal(scale.numpy(), wanted.tensors["scale"])


def registers(words: torch.Tensor) -> NDArray[np.uint64]:
    """[rows, q, group]: the words of each row's only block."""
    return words.numpy().view("<u4").reshape(len(words), 4, 4).astype(np.uint64)


@pytest.mark.parametrize(("wide", "spans"), [(False, NORMAL), (True, MAX_BELOW)])
def test_the_ptx_decodes_every_code_under_every_shift(wide: bool, spans: int) -> None:
    """In each of the eight places of a word, in each of the four groups."""
    rows = 16 * (spans + 1)
    row = np.arange(rows)[:, None]
    nibbles = ((row // (spans + 1) + np.arange(128)) % 16).astype(np.uint8)
    codes = torch.from_numpy(nibbles[:, ::2] | nibbles[:, 1::2] << 4)
    below = torch.from_numpy(((row + np.arange(4)) % (spans + 1)).astype(np.uint8))
    words, shifts = to_words(codes), to_shifts(below)
    # [row, group, half, q, i]
    wanted = to_e4m3(words, shifts, 128).numpy().reshape(rows, 4, 2, 4, 4)
    held = registers(words)
    for first in (0, 2):
        for q in range(4):
            inputs = [*(held[:, q, group] for group in range(4)), shifts[0].numpy().view(np.uint32).astype(np.uint64)]
            found = evaluated(decoder(first, wide), 4, inputs)
            for index, register in enumerate(found):
                there = wanted[:, first + index // 2, index % 2, q]
                np.testing.assert_array_equal(register.view(np.uint8).reshape(rows, 4), there)


def test_operands_are_as_many_as_the_text_has() -> None:
    """Four registers come out of both calls; sixteen bytes of words go in, and sixteen numbers of 32 bits."""
    assert CONSTRAINTS.split(",") == ["=&r"] * 4 + ["r"] * 20


@each_device
@pytest.mark.parametrize(("span", "wide"), [(0, False), (NORMAL, False), (NORMAL + 1, True), (MAX_BELOW, True)])
def test_both_forms_are_the_re_encoded_kernels_product(span: int, wide: bool, device: str) -> None:
    """To the last bit: also the order of sums is the same."""
    weight = weight_of(272, 416, span, 3)
    decoded, moved = (layer_of(name, weight, device) for name in ("fp8_decoded_mxfp4", "scaled_mm_mxfp4"))
    assert decoded.config.wide == wide
    torch.manual_seed(0)
    # only the first call of a form goes through Triton's binder
    for rows in (1, 17, 100, 300, 2000) * 2 if device == "cuda" else (5,):
        x = torch.randn(rows, 416, device=device).bfloat16()
        torch.testing.assert_close(decoded(x), moved(x), rtol=0, atol=0)


def test_what_lies_on_the_device_is_what_is_stored() -> None:
    layer = layer_of("fp8_decoded_mxfp4", weight_of(48, 256, 5, 0), "cpu")
    assert layer.nbytes == 48 * (256 // 2 + 256 // 32) + 48 * 4


@needs_cuda
def test_a_bias_of_any_dtype_is_added_before_rounding() -> None:
    weight = weight_of(272, 416, 3, 1)
    layer = layer_of("fp8_decoded_mxfp4", weight, "cuda")
    x = torch.randn(300, 416, device="cuda").bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        bias = torch.randn(272, device="cuda").to(dtype)
        buffers = dict(layer.named_buffers())
        exact, found = (
            layer.kernel.apply(layer.config, buffers, x, added, out_dtype, None)
            for added, out_dtype in ((None, torch.float32), (bias, torch.bfloat16))
        )
        torch.testing.assert_close(found, (exact + bias.float()).bfloat16(), rtol=0, atol=0)


@needs_cuda
@pytest.mark.parametrize(
    ("tokens", "rows", "stages", "out_dtype"),
    [
        (16, 64, 8, torch.bfloat16),
        (32, 64, 12, torch.bfloat16),
        (64, 64, 12, torch.float16),
        (16, 128, 8, torch.float32),
        (64, 128, 8, torch.bfloat16),
        (128, 128, 6, torch.float16),
        (256, 128, 4, torch.bfloat16),
        (256, 128, 4, torch.float32),
    ],
)
def test_every_tile(
    monkeypatch: pytest.MonkeyPatch, tokens: int, rows: int, stages: int, out_dtype: torch.dtype
) -> None:
    """Which one is taken depends on the device. Three programs take several each, so that their rings go round and
    round; sums of so few bits are exact, whatever their order."""
    from omniplat_cuda.kernels import decoded_gluon

    require_product("fp8_decoded_mxfp4", "cuda")
    tile = decoded_gluon.Tile(tokens, rows, stages)
    assert tile in [held for held, _ in decoded_gluon._TILES]
    monkeypatch.setattr(decoded_gluon, "multiprocessors", lambda device: 3)
    stored = to_torch(weight_of(272, 416, 3, 5), device=torch.device("cuda"))
    below, scale = row_binades(stored)
    words, shifts = to_words(stored.tensors["codes"].view(torch.uint8)), to_shifts(below)
    weight = to_e4m3(words, shifts, 416).view(torch.float8_e4m3fn).double()
    torch.manual_seed(tokens)
    bias = torch.randn(272, device="cuda")
    for count in (5 * tokens - 3, 1):
        x = torch.randint(-1, 2, (count, 416), device="cuda")
        codes, x_scale = x.to(torch.float8_e4m3fn).view(torch.uint8), torch.rand(count, 1, device="cuda")
        found = decoded_gluon.decoded_product(
            codes, words, shifts, x_scale, scale.reshape(1, -1), bias, out_dtype, False, tile
        )
        wanted = (x.double() @ weight.t()).float() * scale.reshape(1, -1) * x_scale + bias
        torch.testing.assert_close(found, wanted.to(out_dtype), rtol=0, atol=0)


@needs_cuda
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(272, 416, 3000), (12288, 3072, 1000)])
def test_it_waits_for_what_is_ahead_of_it(rows: int, columns: int, tokens: int) -> None:
    from omniplat_cuda.kernels import decoded_gluon

    require_product("fp8_decoded_mxfp4", "cuda")
    stored = to_torch(weight_of(rows, columns, 3, 5), device=torch.device("cuda"))
    below, scale = row_binades(stored)
    words, shifts = to_words(stored.tensors["codes"].view(torch.uint8)), to_shifts(below)
    tile = decoded_gluon.tile_of(tokens, rows, words.device)

    def product(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        row_scale = scale.reshape(1, -1)
        return decoded_gluon.decoded_product(x, words, shifts, x_scale, row_scale, None, torch.bfloat16, False, tile)

    x, x_scale = torch.randn(tokens, columns, device="cuda"), torch.rand(tokens, 1, device="cuda")
    codes = x.to(torch.float8_e4m3fn).view(torch.uint8)
    wanted = product(codes, x_scale)
    for found in overtaking(product, codes, x_scale):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """No device, which is taken for an H200 with its multiprocessors."""
    from omniplat_cuda.kernels import decoded_gluon

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(decoded_gluon, "multiprocessors", lambda device: 132)
    held = (decoded_gluon.tile_of, decoded_gluon._launch_of)
    for cached in held:
        cached.cache_clear()
    with standing_in(StandIn()) as standin:
        yield standin
    for cached in held:
        cached.cache_clear()


class Compiles:
    """Compiles what would be launched."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def collect(self, launch: Launch, arguments: Sequence[Any]) -> None:
        self.compiled.append(launch.compile(arguments))


@needs_compiler
@needs_gluon
@pytest.mark.parametrize(
    ("tokens", "n", "tile"),
    [
        (16, 4096, (16, 64)),
        (16, 12288, (16, 128)),
        (64, 4096, (32, 64)),
        (256, 4096, (64, 128)),
        (256, 12288, (256, 128)),
        (4096, 4096, (256, 128)),
    ],
)
def test_tiles_leave_few_multiprocessors_idle(driver: Any, tokens: int, n: int, tile: tuple[int, int]) -> None:
    """What was fastest on an H200."""
    from omniplat_cuda.kernels.decoded_gluon import tile_of

    chosen = tile_of(tokens, n, torch.device("cpu"))
    assert (chosen.tokens, chosen.rows) == tile


@needs_compiler
@needs_gluon
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "out_dtype", "bias", "wide"),
    [
        (4096, 272, 416, torch.bfloat16, False, False),
        (5, 48, 96, torch.float16, True, True),
        (200, 272, 416, torch.float32, True, False),
    ],
)
def test_it_compiles_for_hopper(
    driver: Any,
    tmp_path: Path,
    tokens: int,
    rows: int,
    columns: int,
    out_dtype: torch.dtype,
    bias: bool,
    wide: bool,
) -> None:
    """Products are the tensor core's, of codes in registers; tiles fit into shared memory, all else into registers."""
    from omniplat_cuda.kernels import decoded_gluon

    x = torch.zeros(tokens, columns, dtype=torch.uint8)
    below, scale = row_binades(to_torch(weight_of(rows, columns, 0, 0)))
    words, shifts = to_words(torch.zeros(rows, columns // 2, dtype=torch.uint8)), to_shifts(below)
    added = torch.zeros(rows, dtype=torch.bfloat16) if bias else None
    kernels = Compiles()
    with collected(kernels):
        tile = decoded_gluon.tile_of(tokens, rows, x.device)
        ones = torch.ones(tokens, 1)
        decoded_gluon.decoded_product(x, words, shifts, ones, scale.t(), added, out_dtype, wide, tile)
    (kernel,) = kernels.compiled
    products = [line for line in kernel.asm["ptx"].splitlines() if "wgmma.mma_async" in line]
    # four groups of columns, for each group of warps
    assert len(products) == 4 * tile.rows // 64
    assert all(f"m64n{tile.tokens}k32.f32.e4m3.e4m3" in line for line in products)
    # the left operand is four registers and no descriptor
    assert all(line.count("{") == 2 for line in products)
    assert kernel.metadata.shared <= 232448
    assert resources(kernel, tmp_path).stack == 0
    # all groups of warps wait for the kernel ahead of theirs
    assert kernel.metadata.launch_pdl
    before, *after = kernel.asm["ptx"].split("griddepcontrol.wait")
    assert len(after) == 1 + tile.rows // 64
    assert not re.search(r"\b(ld|st)\.global|cp\.async\.bulk\.tensor", before)


@needs_compiler
@needs_gluon
def test_it_is_compiled_ahead(driver: Any) -> None:
    """A call finds what was compiled for as many tokens in a last tile, or for whole tiles, and holds it."""
    from omniplat_cuda.kernels import decoded_gluon

    below, scale = row_binades(to_torch(weight_of(272, 416, 0, 0)))
    words, shifts = to_words(torch.zeros(272, 208, dtype=torch.uint8)), to_shifts(below)
    tile = decoded_gluon.Tile(64, 64, 4)

    def call(tokens: int) -> None:
        x, ones = torch.zeros(tokens, 416, dtype=torch.uint8), torch.ones(tokens, 1)
        decoded_gluon.decoded_product(x, words, shifts, ones, scale.t(), None, torch.bfloat16, False, tile)

    calls = [partial(call, tokens) for tokens in (64, 100, 128, 3000)]
    assert compile_calls(calls) == Compilation(compiled=2, cached=0)
    assert not driver.launched
    for each in calls * 2:
        each()
    assert driver.loaded == 2
    # no more programs than tiles of 64 tokens by 64 rows, nor than multiprocessors
    assert [launched.grid for launched in driver.launched] == [(5, 1, 1), (10, 1, 1), (10, 1, 1), (132, 1, 1)] * 2


def test_without_the_interpreter() -> None:
    run_without_interpreter(__file__)
