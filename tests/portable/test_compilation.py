"""Kernels compiled ahead: what calls would launch, once, and not again from Triton's cache.

Triton's own compiler runs here, for a device that is not there. The interpreter has none: with it, this file runs in a
process without.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, Thread, get_ident
from time import sleep
from typing import Any

import pytest
import torch

from omniplat.errors import BackendLoadError
from omniplat.layer import LayerSpec
from omniplat.portable.ahead import compile_kernels
from omniplat.portable.quantize import has_triton
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.layers import QuantLinear
from omniplat.scheme import Scheme
from tests.portable.test_weight_only import layer_of, weight_of
from tests.support.triton import needs_compiler, run_without_interpreter

if has_triton():
    import triton
    import triton.language as tl

    from omniplat.portable import compilation
    from omniplat.portable.compilation import Compilation, compile_calls
    from omniplat.portable.launch import Launch
    from tests.support.standin import StandIn, standing_in

    def _copies(x, y, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        k = tl.arange(0, BLOCK)
        tl.store(y + k, tl.load(x + k))

    def _fails(x, y, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.static_assert(BLOCK < 0, "no block is that small")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with standing_in(StandIn()) as standin:
        yield standin


def calls_of(kernel: Any, rows: tuple[int, ...] = (1, 5, 16), blocks: tuple[int, ...] = (16, 32)) -> list[Any]:
    """Calls of a kernel that nobody has called before, in this process."""
    fresh = triton.jit(do_not_specialize=["rows"])(kernel)
    launches = [Launch(fresh, {"BLOCK": block}, num_warps=1) for block in blocks]
    x = torch.zeros(32)
    return [partial(launch, (1, 1, 1), (x, x), (count,)) for launch in launches for count in rows]


@needs_compiler
def test_a_second_start_compiles_nothing(driver: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int]] = []
    calls = calls_of(_copies)
    assert compile_calls(calls, lambda *step: steps.append(step)) == Compilation(compiled=2, cached=0)
    assert steps == [(1, 2), (2, 2)]
    assert (driver.loaded, driver.launched) == (2, [])
    # nor does the first one, again
    assert compile_calls(calls) == Compilation(compiled=0, cached=0)
    assert compile_calls(calls_of(_copies)) == Compilation(compiled=0, cached=2)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    assert compile_calls(calls_of(_copies)) == Compilation(compiled=2, cached=0)


@needs_compiler
def test_calls_find_what_was_compiled_for_them(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the layers' own kernels: one for each tile, whatever number of tokens it was compiled for."""
    from omniplat.portable.weight_only import _on_device

    layer = layer_of(weight_of("mxfp4", 64, 256))
    buffers = dict(layer.named_buffers())

    def call(tokens: int) -> None:
        x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
        _on_device(x, buffers["words"], buffers["scale"], *[None] * 5, layer.config.form, x.dtype)

    made = compile_calls([partial(call, tokens) for tokens in (1, 2, 16)])
    assert made == Compilation(compiled=1, cached=0)
    told: list[object] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: told.append(event))
    for tokens in (1, 2, 3, 7, 8, 15, 16):
        call(tokens)
    assert len(driver.launched) == 7
    assert not told
    assert driver.loaded == 1


@needs_compiler
@pytest.mark.parametrize("together", [False, True])
def test_nothing_is_parsed_at_once_where_that_fails(
    driver: StandIn, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Neither by two workers, nor by one while calls are made. What a call compiles in its own thread is no other."""
    monkeypatch.setattr(compilation, "_parses_in_threads", lambda: together)
    monkeypatch.setattr(compilation.os, "cpu_count", lambda: 2)
    running, most = Counter[int](), 0
    lock = Lock()

    @contextmanager
    def counted() -> Iterator[None]:
        nonlocal most
        with lock:
            running[get_ident()] += 1
            most = max(most, len(+running))
        # long enough for another, were there one
        sleep(0.05)
        try:
            yield
        finally:
            with lock:
                running[get_ident()] -= 1

    fresh = triton.jit(_copies)
    _ = fresh.device_caches[0]
    compiled = fresh.compile

    def compile_one(*given: Any, **named: Any) -> Any:
        with counted():
            return compiled(*given, **named)

    fresh.compile = compile_one
    launches = [Launch(fresh, {"BLOCK": block}, num_warps=1) for block in (16, 32, 64)]
    x = torch.zeros(64)

    def call(launch: Launch) -> None:
        with counted():
            launch((1, 1, 1), (x, x), (5,))

    calls = [partial(call, launch) for launch in launches]
    assert compile_calls(calls) == Compilation(compiled=3, cached=0)
    assert (most > 1) == together


@needs_compiler
@pytest.mark.parametrize("together", [False, True])
def test_kernels_that_others_launch_meanwhile_are_waited_for(
    driver: StandIn, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """As an operator of another library does: what it launches is compiled, and runs."""
    monkeypatch.setattr(compilation, "_parses_in_threads", lambda: together)
    fresh = triton.jit(_copies)
    x = torch.zeros(64)
    found: list[Compilation] = []

    def compile_them() -> None:
        found.append(compile_calls([lambda: fresh[(1,)](x, x, 5, BLOCK=128, num_warps=1)]))

    waiting = Thread(target=compile_them, daemon=True)
    waiting.start()
    waiting.join(60)
    assert found == [Compilation(compiled=1, cached=0)]
    assert len(driver.launched) == 1


@needs_compiler
@pytest.mark.parametrize(
    ("release", "together"),
    [((3, 10, 13), True), ((3, 11, 0), False), ((3, 11, 7), False), ((3, 11, 8), True), ((3, 12, 0), True)],
)
def test_which_releases_of_python_parse_in_threads(
    monkeypatch: pytest.MonkeyPatch, release: tuple[int, ...], together: bool
) -> None:
    monkeypatch.setattr(sys, "version_info", (*release, "final", 0))
    assert compilation._parses_in_threads() == together


@needs_compiler
@pytest.mark.parametrize("together", [False, True])
def test_a_call_that_fails_is_told(driver: StandIn, monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """Whoever waits for the calls to be made goes on."""

    def fails() -> None:
        raise RuntimeError("no such layer")

    monkeypatch.setattr(compilation, "_parses_in_threads", lambda: together)
    with pytest.raises(RuntimeError, match="no such layer"):
        compile_calls([*calls_of(_copies), fails])


@needs_compiler
def test_a_kernel_that_does_not_compile_is_named(driver: StandIn) -> None:
    with pytest.raises(
        BackendLoadError, match=r"kernel _fails cannot be compiled for cpu(.|\n)*no block is that small"
    ):
        compile_calls([*calls_of(_copies), *calls_of(_fails)])
    # the others are, and the next time works
    assert compile_calls(calls_of(_copies)) == Compilation(compiled=0, cached=2)


@needs_compiler
def test_a_tool_that_is_missing_is_named(driver: StandIn) -> None:
    driver.problem = "Failed to find C compiler."
    with pytest.raises(BackendLoadError, match=r"_copies was compiled and cannot be loaded.*Failed to find C compiler"):
        compile_calls(calls_of(_copies))


@needs_compiler
def test_another_listener_is_told_too(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    listener = lambda **event: told.append(event["cache_hit"])  # noqa: E731
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    compile_calls(calls_of(_copies))
    assert told == [False, False]
    assert triton.knobs.compilation.listener is listener


@dataclass(frozen=True, slots=True)
class Nothing:
    size: int


class Heard(LinearKernel[Nothing]):
    """Writes down what it is called with; for 64 tokens there is no memory."""

    name = "heard"
    config_type = Nothing
    calls: list[tuple[int, int, torch.dtype]]

    def __init__(self, calls: list[tuple[int, int, torch.dtype]]) -> None:
        self.calls = calls

    def prepare(self, weight: object, spec: LayerSpec) -> Prepared[Nothing]:
        raise NotImplementedError

    def apply(self, config: Nothing, tensors: object, x: torch.Tensor, *rest: object) -> torch.Tensor:
        if len(x) == 64:
            raise torch.OutOfMemoryError("64 tokens are too many")
        self.calls.append((config.size, len(x), x.dtype))
        return x


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def heard(size: int, calls: list[Any], device: str = "meta", dtype: str = "bf16") -> QuantLinear:
    spec = LayerSpec(f"layer of {size}", "linear", size, size, Scheme.parse("mxfp4/a16"), dtype)
    return QuantLinear(spec, Heard(calls), Prepared({"codes": torch.zeros(size, device=device)}, Nothing(size)))


@needs_compiler
def test_layers_of_one_kind_are_called_once(driver: StandIn) -> None:
    calls: list[Any] = []
    out = Terminal()
    layers = [heard(32, calls), heard(48, calls, dtype="f16"), heard(32, calls), heard(32, calls, "cpu")]
    assert compile_kernels(layers, (1, 8, 64), out=out) == 0
    assert calls == [(32, 1, torch.bfloat16), (32, 8, torch.bfloat16), (48, 1, torch.float16), (48, 8, torch.float16)]
    assert "layer of 32 not compiled for 64 tokens, memory of meta does not suffice" in out.getvalue()
    assert "kernels: 0 compiled, 0 from the cache" in out.getvalue()


@needs_compiler
@pytest.mark.parametrize("out", [io.StringIO, Terminal])
def test_one_line_says_what_was_compiled(
    driver: StandIn, monkeypatch: pytest.MonkeyPatch, out: type[io.StringIO]
) -> None:
    def apply(self: Heard, config: Nothing, tensors: object, x: torch.Tensor, *rest: object) -> torch.Tensor:
        for call in calls:
            call()
        return x

    calls = calls_of(_copies)
    monkeypatch.setattr(Heard, "apply", apply)
    written = out()
    assert compile_kernels([heard(32, [])], (1,), out=written) == 2
    assert written.getvalue().rpartition("\r")[2].startswith("kernels: 2 compiled, 0 from the cache, ")
    assert ("kernels: 1 of 2" in written.getvalue()) == written.isatty()
    calls = calls_of(_copies)
    again = out()
    assert compile_kernels([heard(32, [])], (1,), out=again) == 0
    assert ("0 compiled, 2 from the cache" in again.getvalue()) == again.isatty()


@needs_compiler
def test_a_release_that_cannot_compile_ahead_says_so(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton, "AsyncCompileMode")
    calls: list[Any] = []
    out = io.StringIO()
    assert compile_kernels([heard(32, calls)], (1,), out=out) == 0
    assert out.getvalue() == "kernels: compiled on first use, this release of Triton cannot compile ahead\n"
    assert not calls


def test_layers_on_the_cpu_need_nothing() -> None:
    calls: list[Any] = []
    out = Terminal()
    assert compile_kernels([heard(32, calls, "cpu")], out=out) == 0
    assert (calls, out.getvalue()) == ([], "")


def test_without_the_interpreter() -> None:
    run_without_interpreter(__file__)
