"""Launches without Triton's binder: always the form of the kernel that Triton itself would take, with its arguments.

Triton's own compiler and binder run here, under a driver that writes launches down. The interpreter has neither: with
it, this file runs in a process without.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniplat.portable.quantize import has_triton
from tests.portable.test_weight_only import layer_of, weight_of
from tests.support.triton import needs_compiler, needs_cuda, run_without_interpreter

if has_triton():
    import triton
    import triton.language as tl

    from omniplat.portable import launch as launching
    from omniplat.portable.launch import Launch
    from tests.support.standin import StandIn, standing_in

    def _kernel(a, b, out, rows, columns, factor, TWICE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        k = tl.arange(0, BLOCK)
        value = tl.load(a + k, mask=k < columns) * factor
        tl.store(out + k + rows, value + value if TWICE else value)


class Compiled:
    """A kernel that took no time to compile. Its function is what Triton compiled it for."""

    def __init__(self, driver: StandIn, source: Any, options: dict[str, Any]) -> None:
        self.function = repr((source.signature, source.constants, source.attrs, options, driver.device))
        self.metadata = SimpleNamespace(target=driver.target)
        self.packed_metadata = ()
        self.run = driver.run

    def launch_metadata(self, *arguments: object) -> None:
        return None


@pytest.fixture
def driver() -> Iterator[StandIn]:
    with standing_in(StandIn()) as standin:
        yield standin


def made(driver: StandIn, **constants: object) -> tuple[Launch, Any]:
    """A launch of a kernel of its own, and that kernel."""
    kernel = triton.jit(do_not_specialize=["rows"])(_kernel)
    for driver.device in (1, 0):
        _ = kernel.device_caches[driver.device]
    kernel.compile = lambda source, target, options, **_: Compiled(driver, source, options)
    return Launch(kernel, {"TWICE": False, "BLOCK": 16, **constants}, num_warps=4), kernel


def tensor(dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Numbers that begin `offset` bytes behind a multiple of 16."""
    return torch.zeros(160, dtype=torch.uint8)[offset : offset + 128].view(dtype)


DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.int32])
OFFSETS = st.sampled_from([0, 4, 8])
NUMBERS = st.sampled_from([1, 2, 16, 17, 48, 2**31 - 1, 2**31, 2**40])
FIELDS = (st.sampled_from([0, 1]), DTYPES, OFFSETS, st.booleans(), OFFSETS, NUMBERS, NUMBERS, st.sampled_from([1, 0.5]))


@st.composite
def series_of_calls(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Each call differs from the one before it in one respect."""
    call = [draw(field) for field in FIELDS]
    calls = [tuple(call)]
    for index in draw(st.lists(st.integers(0, len(FIELDS) - 1), max_size=12)):
        call[index] = draw(FIELDS[index])
        calls.append(tuple(call))
    return calls


@needs_compiler
@given(calls=series_of_calls(), twice=st.booleans())
def test_what_is_launched_is_what_triton_would_launch(calls: list[tuple[Any, ...]], twice: bool) -> None:
    """Whatever was launched before: other dtypes, alignments, numbers, devices."""
    with standing_in(StandIn()) as driver:
        launch, kernel = made(driver, TWICE=twice)
        for number, (device, dtype, offset, has_b, b_offset, *numbers) in enumerate(calls):
            driver.device, driver.stream = device, number
            a, out = tensor(dtype, offset), tensor(dtype, b_offset)
            b = tensor(torch.int32, b_offset) if has_b else None
            launch((2, 3, 1), (a, b, out), numbers)
            wanted = kernel.run(a, a if b is None else b, out, *numbers, twice, 16, grid=(1,), warmup=True, num_warps=4)
            found = driver.launched[-1]
            assert (found.function, found.grid, found.stream) == (wanted.function, (2, 3, 1), number)
            assert found.arguments[3:] == (*numbers, twice, 16)
            pointers = [value if isinstance(value, int) else value.data_ptr() for value in found.arguments[:3]]
            assert (pointers[0], pointers[2]) == (a.data_ptr(), out.data_ptr())
            assert b is None or pointers[1] == b.data_ptr()
        assert len(driver.launched) == len(calls)


@needs_compiler
def test_triton_binds_a_specialization_once(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, kernel = made(driver)
    bound = counted(monkeypatch, kernel)
    for rows in (1, 5, 16):
        for _ in range(3):
            launch((1, 1, 1), (tensor(torch.float32), None, tensor(torch.float32)), (rows, 16, 1))
    # the number of rows is one that the kernel is not specialized for, and is looked at all the same
    assert len(bound) == 3
    assert len(driver.launched) == 9


def counted(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> list[object]:
    """Grows by one with every call that Triton binds."""
    bound: list[object] = []
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *given, **named: (bound.append(given), run(*given, **named))[1])
    return bound


@needs_compiler
@pytest.mark.parametrize("why", ["release", "vendor"])
def test_what_was_not_tested_goes_through_triton(driver: StandIn, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "release":
        monkeypatch.setattr(launching, "TESTED", ((3, 2),))
        launching.is_tested.cache_clear()
    elif why == "vendor":
        driver.target = triton.backends.compiler.GPUTarget("hip", "gfx942", 64)
    try:
        launch, kernel = made(driver)
        bound = counted(monkeypatch, kernel)
        for _ in range(3):
            launch((1, 1, 1), (tensor(torch.float32), None, tensor(torch.float32)), (1, 16, 1))
        assert len(bound) == len(driver.launched) == 3
    finally:
        launching.is_tested.cache_clear()


@needs_compiler
def test_a_profiler_hears_of_every_launch(driver: StandIn) -> None:
    launch, _ = made(driver)
    heard: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook
    call = lambda: launch((1, 1, 1), (tensor(torch.float32), None, tensor(torch.float32)), (1, 16, 1))  # noqa: E731
    call()
    hook.add(heard.append)
    try:
        call()
        call()
    finally:
        hook.remove(heard.append)
    call()
    assert len(heard) == 2
    assert len(driver.launched) == 4


@needs_compiler
def test_threads_do_not_take_each_others_kernels(driver: StandIn) -> None:
    launch, kernel = made(driver)

    def run(dtype: torch.dtype) -> None:
        values = tensor(dtype)
        for _ in range(300):
            launch((1, 1, 1), (values, None, values), (1, 16, 1))

    dtypes = (torch.float32, torch.bfloat16, torch.int32)
    threads = [Thread(target=run, args=(dtype,)) for dtype in dtypes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {
        kernel.run(tensor(d), tensor(d), tensor(d), 1, 16, 1, False, 16, grid=(1,), warmup=True, num_warps=4).function
        for d in dtypes
    }
    functions = [launched.function for launched in driver.launched]
    assert {function: functions.count(function) for function in expected} == dict.fromkeys(expected, 300)


@needs_compiler
def test_while_launches_are_collected_nothing_is_launched(driver: StandIn) -> None:
    launch, _ = made(driver)
    collected: list[tuple[Any, ...]] = []
    values = tensor(torch.float32)
    with launching.collected(SimpleNamespace(collect=lambda *taken: collected.append(taken))):
        launch((1, 1, 1), (values, None, values), (1, 16, 1))
    assert not driver.launched
    assert collected[0][0] is launch
    # Triton has no pointer to nothing: one to anything stands for it
    assert [value is values for value in collected[0][1][:3]] == [True, True, True]
    launch((1, 1, 1), (values, None, values), (1, 16, 1))
    assert len(driver.launched) == 1


@needs_compiler
def test_no_descriptor_stands_for_a_tensor_that_is_not_there(driver: StandIn) -> None:
    _, kernel = made(driver)
    launch = Launch(kernel, {"TWICE": False, "BLOCK": 16}, described={0: lambda _: object()}, num_warps=4)
    collected: list[tuple[Any, ...]] = []
    values = tensor(torch.float32)
    with launching.collected(SimpleNamespace(collect=lambda *taken: collected.append(taken))):
        launch((1, 1, 1), (values, None, values), (1, 16, 1))
    assert [value is values for value in collected[0][1][:3]] == [False, True, True]


@needs_cuda
def test_two_streams_run_one_layer() -> None:
    layer = layer_of(weight_of("mxfp4"), "cuda")
    inputs = torch.randn(2, 40, 5, 384, device="cuda").bfloat16()
    wanted = torch.stack([torch.stack([layer(x) for x in row]) for row in inputs])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found: list[list[torch.Tensor]] = [[], []]
    for index in range(inputs.shape[1]):
        for stream, row, results in zip(streams, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(layer(row[index]))
    torch.cuda.synchronize()
    torch.testing.assert_close(torch.stack([torch.stack(results) for results in found]), wanted, rtol=0, atol=0)


def test_without_the_interpreter() -> None:
    run_without_interpreter(__file__)
