"""Tensor maps that are kept: every launch gets what Triton itself would have made for its tensors.

Kernels are compiled by Triton, bound by its binder and launched by its launcher, up to where its C begins. The
interpreter has none of these: with it, this file runs in a process without.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omniplat.portable.quantize import has_triton
from tests.support.triton import needs_compiler, run_without_interpreter

if has_triton():
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.tools.tensor_descriptor import TensorDescriptor

    from omniplat.portable import tensor_maps
    from omniplat.portable.launch import Launch
    from tests.support.standin import StandIn, standing_in

    @triton.jit
    def _kernel(a, b, plain, c, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        total = a.load([0, rows]) + b.load([rows, 0])
        tl.store(plain + tl.arange(0, BLOCK), tl.sum(total, axis=0))
        c.store([0, 0], total)

    def describe(tensor: torch.Tensor) -> Any:
        return TensorDescriptor.from_tensor(tensor, [2, 16])


COLUMNS = 64
PLACES = (0, 1, 3)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Nothing is compiled yet, and nothing that was compiled here is left to a real device."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    _kernel.device_caches.clear()
    with standing_in(StandIn()) as standin:
        yield standin
        _kernel.device_caches.clear()


def launch_of() -> Launch:
    return Launch(_kernel, {"BLOCK": 16}, described=dict.fromkeys(PLACES, describe), num_warps=1)


def matrix(memory: torch.Tensor, dtype: torch.dtype, first: int, rows: int, columns: int, stride: int) -> torch.Tensor:
    """`rows` by `columns` of `memory`, which begin `first` times 16 bytes into it."""
    return memory.view(dtype)[first * 16 // dtype.itemsize :].as_strided((rows, columns), (stride, 1))


MATRICES = st.tuples(
    st.integers(0, 2), st.sampled_from([1, 2, 5]), st.sampled_from([16, 48]), st.sampled_from([48, COLUMNS])
)
CALLS = st.tuples(
    st.sampled_from([0, 1]),
    st.sampled_from([torch.bfloat16, torch.float32] if has_triton() else []),
    st.tuples(MATRICES, MATRICES, MATRICES),
    st.sampled_from([1, 3, 32]),
)


def differing(first: tuple[int, ...], second: tuple[int, ...]) -> list[Any]:
    return [(0, torch.float32, (of, of, of), 1) for of in (first, second)]


@needs_compiler
@example(calls=differing((0, 2, 16, 48), (0, 2, 16, COLUMNS)), kept=4096)
@example(calls=differing((0, 2, 16, 48), (0, 2, 48, 48)), kept=4096)
@example(calls=differing((0, 2, 16, 48), (1, 2, 16, 48)), kept=4096)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(CALLS, max_size=8), kept=st.sampled_from([1, 2, 4096]))
def test_a_launch_gets_what_triton_would_make(driver: StandIn, calls: list[Any], kept: int) -> None:
    """Of tensors that lie where others lay, with other shapes, strides and dtypes; however few maps are kept."""
    memory = [torch.zeros(4096, dtype=torch.uint8) for _ in PLACES]
    plain = torch.zeros(16)
    launch = launch_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_maps, "_KEPT", kept)
        for driver.device, dtype, matrices, rows in calls * 2:
            a, b, c = (matrix(m, dtype, *of) for m, of in zip(memory, matrices, strict=True))
            launch((1, 1, 1), (a, b, plain, c), (rows,))
            found = driver.launched[-1]
            _kernel[(1, 1, 1)](describe(a), describe(b), plain, describe(c), rows, BLOCK=16, num_warps=1)
            assert as_numbers(found) == as_numbers(driver.launched[-1])
            maps = [argument for argument in found.arguments if isinstance(argument, tuple)]
            assert [encoded[1] for encoded in maps] == [tensor.data_ptr() for tensor in (a, b, c)]


def as_numbers(launched: Any) -> tuple[Any, ...]:
    arguments = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in launched.arguments]
    return launched.function, launched.grid, arguments


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by an address with every map that is made."""
    addresses: list[int] = []
    encode = StandIn.fill_tma_descriptor
    for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled"):
        monkeypatch.setattr(StandIn, name, lambda self, *what: (addresses.append(what[0]), encode(self, *what))[1])
    return addresses


@needs_compiler
def test_a_map_is_made_once_and_holds_no_memory(driver: StandIn, made: list[int]) -> None:
    launch, plain = launch_of(), torch.zeros(16)
    tensors = [torch.zeros(4, COLUMNS) for _ in range(3)]
    launch((1, 1, 1), (*tensors[:2], plain, tensors[2]), (1,))
    assert len(made) == 3, "Triton's own, with which it finds out what to compile"
    for rows in (1, 1, 1):
        launch((1, 1, 1), (*tensors[:2], plain, tensors[2]), (rows,))
    assert made[3:] == [tensors[place].data_ptr() for place in (2, 1, 0)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    driver.launched.clear()
    assert [reference() for reference in alive] == [None, None, None]


@needs_compiler
def test_maps_that_are_kept_do_not_pile_up(driver: StandIn, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "_KEPT", 2)
    launch, plain, memory = launch_of(), torch.zeros(16), torch.zeros(4096, dtype=torch.uint8)
    for first in (0, 1, 0, 1, 2, 0):
        of = matrix(memory, torch.float32, first, 2, 16, 48)
        launch((1, 1, 1), (of, of, plain, of), (1,))
    # the third address took the room of both others
    assert [(address - memory.data_ptr()) // 16 for address in made[3::3]] == [1, 0, 2, 0]


@needs_compiler
def test_devices_without_a_copy_engine_are_left_to_triton(driver: StandIn) -> None:
    """There descriptors are pointers, shapes and strides: to keep those would keep the tensors."""
    driver.target = GPUTarget("cuda", 80, 32)
    _kernel.device_caches.clear()
    launch, plain = launch_of(), torch.zeros(16)
    for rows in (2, 4, 2, 4):
        a, b, c = (torch.zeros(rows, COLUMNS) for _ in range(3))
        launch((1, 1, 1), (a, b, plain, c), (1,))
        found = as_numbers(driver.launched[-1])
        _kernel[(1, 1, 1)](describe(a), describe(b), plain, describe(c), 1, BLOCK=16, num_warps=1)
        assert found == as_numbers(driver.launched[-1])


def test_without_the_interpreter() -> None:
    run_without_interpreter(__file__)
