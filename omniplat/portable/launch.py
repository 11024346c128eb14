"""Launching Triton's kernels without its binder, which costs the host several times what the launch itself does.

At every call Triton binds up to 45 arguments, describes each of them, and looks for the form of the kernel that was
compiled for that description. A `Launch` has its constants and options settled, so that all that may differ between
two of its calls is looked at directly: the current device; of tensors the device, the dtype and whether they are
aligned to 16 bytes; of numbers the type, and whether they are 1 or a multiple of 16. Calls that differ in none of these
are one specialization to Triton too. The first of each goes through Triton, which finds the compiled form or makes it;
that form is held and launched from then on.

This rests on how Triton launches what it has compiled. On releases that are not in `TESTED`, on devices other than
NVIDIA's, under the interpreter, and while a profiler listens to launches, every call goes through Triton. Knobs of
Triton that change what is compiled are read when a specialization is first met. Imports triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import triton
from packaging.version import Version
from triton.runtime import driver

from omniplat.portable.tensor_maps import Describe, TensorMaps, maps_of, without_descriptors

#: Releases of Triton (major, minor) whose compiled kernels are launched directly: `tests/portable/test_launch.py` and
#: `test_tensor_maps.py` ran with each of them.
TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))

Grid = tuple[int, int, int]


class Collector(Protocol):
    """Takes launches that are asked for while nothing is to be launched."""

    def collect(self, launch: Launch, arguments: Sequence[Any]) -> None:
        """`arguments` are tensors and numbers, as the kernel takes them."""


_collector: ContextVar[Collector | None] = ContextVar("collector of launches", default=None)


@contextmanager
def collected(collector: Collector) -> Iterator[None]:
    """Within the context, and in its thread, launches are handed to `collector` instead of the device.

    What they would have written is not there: nothing that does run may take it for an index.
    """
    token = _collector.set(collector)
    try:
        yield
    finally:
        _collector.reset(token)


def is_collecting() -> bool:
    """True within `collected`: launches of other libraries must not run either, what they would read is not there."""
    return _collector.get() is not None


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled form and what it is launched with; `constants` are the last of the kernel's arguments.

    `owner` is Triton's object, with which the code would be unloaded. `maps` are for the arguments, by their place from
    the last to the first, that are tensor maps.
    """

    owner: Any
    run: Any
    function: int
    metadata: Any
    constants: tuple[object, ...]
    maps: tuple[tuple[int, TensorMaps], ...]


class Launch:
    """A kernel of `triton.jit` with its constants and options; its parameters are tensors, numbers, constants.

    It holds the compiled forms, so it is to be made once for the same constants and kept.
    """

    __slots__ = ("_compiled", "_constants", "_described", "_direct", "_kernel", "_options")

    def __init__(
        self,
        kernel: Any,
        constants: Mapping[str, object],
        *,
        described: Mapping[int, Describe] | None = None,
        **options: int | bool | None,
    ) -> None:
        """`options` are Triton's own.

        `described`: which of the tensors the kernel takes as a descriptor, by their place, and what makes it: of all
        tensors of one dtype descriptors of one type, whatever their shapes.
        """
        self._kernel = kernel
        self._constants = dict(constants)
        self._described = dict(described or {})
        self._options = options
        self._compiled: dict[tuple[object, ...], _Compiled] = {}
        self._direct = is_tested() and isinstance(kernel, triton.JITFunction)

    def __call__(self, grid: Grid, tensors: Sequence[Any], numbers: Sequence[float] = ()) -> None:
        """Launch on the device of `tensors`, on its current stream. Those that are None are pointers never followed."""
        collector = _collector.get()
        if collector is not None:
            collector.collect(self, self._filled(tensors, numbers))
            return
        if not self._direct:
            self._through_triton(grid, tensors, numbers)
            return
        active = driver.active
        device = active.get_current_device()
        if tensors[0].get_device() not in (device, -1):
            with _device_of(tensors):
                self(grid, tensors, numbers)
            return
        pointers: list[Any] = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        key = (
            device,
            *[None if tensor is None else tensor.dtype for tensor in tensors],
            *[tensor.get_device() for tensor in tensors if tensor is not None],
            *[pointer & 15 for pointer in pointers],
            *map(_kind, numbers),
        )
        compiled = self._compiled.get(key)
        if compiled is None or _has_listeners():
            self._hold(key, self._through_triton(grid, tensors, numbers))
            return
        for place, maps in compiled.maps:
            pointers[place : place + 1] = maps.of(tensors[place], pointers[place])
        compiled.run(
            *grid,
            active.get_current_stream(device),
            compiled.function,
            compiled.metadata,
            None,
            None,
            None,
            *pointers,
            *numbers,
            *compiled.constants,
        )

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self._kernel.__name__)

    def compile(self, arguments: Sequence[Any]) -> Any:
        """What a call with these arguments launches: Triton's object, or its future under `triton.AsyncCompileMode`."""
        with _device_of(arguments):
            return self._kernel.warmup(*arguments, grid=(1, 1, 1), **self._constants, **self._options)

    def _filled(self, tensors: Sequence[Any], numbers: Sequence[float]) -> tuple[Any, ...]:
        """The arguments as Triton takes them: it knows no pointer to nothing, so one to anything stands for it."""
        anything = first_tensor(tensors)
        arguments = [anything if tensor is None else tensor for tensor in tensors]
        for place, describe in self._described.items():
            arguments[place] = describe(tensors[place])
        return (*arguments, *numbers)

    def _through_triton(self, grid: Grid, tensors: Sequence[Any], numbers: Sequence[float]) -> Any:
        with _device_of(tensors):
            return self._kernel[grid](*self._filled(tensors, numbers), **self._constants, **self._options)

    def _hold(self, key: tuple[object, ...], compiled: Any) -> None:
        maps = maps_of(compiled, self._described) if compiled.metadata.target.backend == "cuda" else {}
        if compiled.metadata.target.backend != "cuda" or maps.keys() != self._described.keys():
            self._direct = False
            return
        names = (name for name in self._kernel.arg_names if name in self._constants)
        constants = tuple(self._constants[name] for name in names)
        run = without_descriptors(compiled.run) if maps else compiled.run
        self._compiled[key] = _Compiled(
            compiled, run, compiled.function, compiled.packed_metadata, constants, tuple(maps.items())
        )


def first_tensor(arguments: Sequence[Any]) -> torch.Tensor:
    """What is no tensor among them is a descriptor of one, a number, or nothing."""
    return next(value for value in arguments if isinstance(value, torch.Tensor))


def _device_of(arguments: Sequence[Any]) -> AbstractContextManager[None]:
    """Makes the device of the first tensor the current one; nothing for devices that are not torch.cuda's."""
    return torch.cuda.device_of(first_tensor(arguments))  # type: ignore[no-untyped-call]


@lru_cache(maxsize=4096, typed=True)
def _kind(number: float) -> object:
    """What of a number Triton compiles for, or more: an integer's type follows from its size."""
    if isinstance(number, float):
        return float
    return 1 if number == 1 else (number.bit_length() > 31, number % 16 == 0)


def is_nvidia(device: torch.device, least: tuple[int, int]) -> bool:
    """True on NVIDIA's devices of that compute capability and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= least


def _has_listeners() -> bool:
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


@lru_cache(maxsize=1)
def is_tested() -> bool:
    """True for releases of Triton in `TESTED`."""
    return Version(triton.__version__).release[:2] in TESTED
