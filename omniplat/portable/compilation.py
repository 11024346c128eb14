"""Compiling Triton's kernels before their first call, in parallel, and each of them once.

Calls are made while nothing is launched (`omniplat.portable.launch.collected`): what they would launch is compiled
instead, under the very key by which the launch will look for it. Compiled code lies in Triton's cache on disk
(TRITON_CACHE_DIR), by the content of source, arguments, options and compiler: a second start reads it. Imports triton.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import torch
import triton

from omniplat.errors import BackendLoadError
from omniplat.portable.launch import Launch, collected, first_tensor

Progress = Callable[[int, int], None]
_P = ParamSpec("_P")
_T = TypeVar("_T")
#: The front end of Triton's compiler is Python's and takes its lock: more threads than this would wait for it.
_MOST_WORKERS = 32


@dataclass(frozen=True, slots=True)
class Compilation:
    """Numbers of kernels: compiled now, and found in the cache on disk."""

    compiled: int
    cached: int


def compiles_ahead() -> bool:
    """True for releases of Triton that can compile in other threads (3.6 and later), unless they interpret."""
    return hasattr(triton, "AsyncCompileMode") and not triton.knobs.runtime.interpret


def _parses_in_threads() -> bool:
    """False for Python 3.11 before 3.11.8: its parser, which Triton's front end calls, fails now and then while another
    thread parses ("AST constructor recursion depth mismatch", python/cpython#106905)."""
    return not (3, 11) <= tuple(sys.version_info[:3]) < (3, 11, 8)


def compile_calls(calls: Iterable[Callable[[], object]], progress: Progress | None = None) -> Compilation:
    """Compile what `calls` would launch, and load it; to be asked for where `compiles_ahead`.

    `progress` is told how many kernels are compiled or read, of how many. Raises BackendLoadError for a kernel that
    cannot be, also because a tool for it is missing: it names kernel and tool.
    """
    needed, counts = _Needed(), _Counts()
    with _workers() as pool, counts.listening():
        # Errors are raised here, with the kernel's name: Triton's mode only waits for what is left.
        with triton.AsyncCompileMode(pool, ignore_errors=True) as mode:
            with collected(needed), torch.inference_mode():
                for call in calls:
                    call()
            if progress is not None:
                _report(mode.raw_futures, progress)
            kernels = needed.compiled()
        _load(kernels, pool)
    return Compilation(counts.compiled, counts.cached)


def _workers() -> Executor:
    if not _parses_in_threads():
        return _InTurn()
    return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_WORKERS))


class _InTurn(Executor):
    """Runs what is submitted at once, in the thread that asks for it: calls are made there, and parse, too."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        done: Future[_T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as exc:
            done.set_exception(exc)
        return done


@dataclass(frozen=True, slots=True)
class _Kernel:
    """`found` is Triton's compiled kernel, or the future of one."""

    name: str
    device: torch.device
    found: Any

    def compiled(self) -> _Kernel:
        if not hasattr(self.found, "result"):
            return self
        try:
            return replace(self, found=self.found.result())
        except Exception as exc:
            raise self._failed("cannot be compiled", exc) from exc

    @property
    def signature(self) -> tuple[str, ...]:
        return tuple(self.found.src.signature.values())

    def load(self) -> None:
        """Load it onto its device; this also compiles the C function that launches kernels of its signature."""
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                _ = self.found.run
        except Exception as exc:
            raise self._failed("was compiled and cannot be loaded", exc) from exc

    def _failed(self, how: str, exc: Exception) -> BackendLoadError:
        problem = f"kernel {self.name} {how} for {self.device}: {type(exc).__name__}: {exc}"
        return BackendLoadError("triton", problem, kind="library")


class _Needed:
    """The kernels that calls would launch, each once."""

    def __init__(self) -> None:
        self._kernels: dict[int, _Kernel] = {}

    def collect(self, launch: Launch, arguments: Sequence[Any]) -> None:
        found = launch.compile(arguments)
        self._kernels[id(found)] = _Kernel(launch.name, first_tensor(arguments).device, found)

    def compiled(self) -> list[_Kernel]:
        return [kernel.compiled() for kernel in self._kernels.values()]


def _load(kernels: Sequence[_Kernel], pool: Executor) -> None:
    # one of each signature first: others then find its C function
    first = {kernel.signature: kernel for kernel in kernels}
    for group in (first.values(), kernels):
        list(pool.map(_Kernel.load, group))


@dataclass(slots=True)
class _Counts:
    """What Triton's compiler tells its listener."""

    compiled: int = 0
    cached: int = 0
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A listener that is there already is told as before."""
        compilation = triton.knobs.compilation
        before = compilation.listener

        def listener(**told: Any) -> None:
            with self._lock:
                if told["cache_hit"]:
                    self.cached += 1
                else:
                    self.compiled += 1
            if before is not None:
                before(**told)

        compilation.listener = listener
        try:
            yield
        finally:
            compilation.listener = before


def _report(futures: Sequence[Future[Any]], progress: Progress) -> None:
    for done, _ in enumerate(as_completed(futures), 1):
        progress(done, len(futures))
