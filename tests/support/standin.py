"""A driver for Triton where no device is: kernels are bound and compiled as for one, and launches are written down."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Launched:
    """What the device would have been told."""

    function: object
    grid: tuple[int, int, int]
    stream: int
    arguments: tuple[Any, ...]


@dataclass
class StandIn:
    """Devices are numbers; tensors are the CPU's."""

    target: GPUTarget = field(default_factory=lambda: GPUTarget("cuda", 90, 32))
    device: int = 0
    stream: int = 0
    launched: list[Launched] = field(default_factory=list)
    loaded: int = 0
    problem: str = ""

    @property
    def utils(self) -> StandIn:
        return self

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        if self.problem:
            raise RuntimeError(self.problem)
        self.loaded += 1
        return 1, hash(kernel), 64, 0, 1024

    def unload_module(self, module: int) -> None:
        return None

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return self.run

    def run(self, x: int, y: int, z: int, stream: int, function: object, metadata: object, *rest: Any) -> None:
        launch_metadata, enter, leave, *arguments = rest
        if enter is not None:
            enter(launch_metadata)
        self.launched.append(Launched(function, (x, y, z), stream, tuple(arguments)))
        if leave is not None:
            leave(launch_metadata)


@contextmanager
def standing_in(driver: StandIn) -> Iterator[StandIn]:
    """While inside, `driver` is Triton's."""
    config = triton.runtime.driver
    before = config._active
    config.set_active(driver)
    try:
        yield driver
    finally:
        # compiled kernels ask the driver to unload them
        gc.collect()
        config._active = before
