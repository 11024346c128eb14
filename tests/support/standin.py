"""A driver for Triton where no device is: kernels are bound and compiled as for one, and launches are written down.

Triton's launcher for NVIDIA's devices runs as far as it is Python: what is written down is what its C would be given.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia


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

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        launcher = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
        names = ("num_ctas", "launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature")
        sizes = [f"{kind}_scratch_{what}" for kind in ("global", "profile") for what in ("size", "align")]
        vars(launcher).update(dict.fromkeys(names), gsan_enabled=False, **dict.fromkeys(sizes, 0))
        meta = getattr(metadata, "tensordesc_meta", None)
        launcher.launch = nvidia.wrap_handle_tensordesc(self.launch, dict(source.signature), meta)
        return launcher

    def fill_tma_descriptor(self, pointer: int, *description: Any) -> tuple[Any, ...]:
        """A tensor map. 3.7 named it anew."""
        return ("map", pointer, *map(_plain, description))

    fill_tma_descriptor_tiled = fill_tma_descriptor

    def launch(self, x: int, y: int, z: int, stream: int, function: object, *rest: Any) -> None:
        """What takes the place of Triton's C, whose arguments 3.7 put in another order."""
        if triton.__version__.startswith("3.6."):
            _, _, _, _, _, launch_metadata, enter, leave, *arguments = rest
        else:
            _, _, _, launch_metadata, enter, leave, _, _, _, _, arguments = rest
        self.run(x, y, z, stream, function, None, launch_metadata, enter, leave, *arguments)

    def run(self, x: int, y: int, z: int, stream: int, function: object, metadata: object, *rest: Any) -> None:
        launch_metadata, enter, leave, *arguments = rest
        if enter is not None:
            enter(launch_metadata)
        self.launched.append(Launched(function, (x, y, z), stream, tuple(arguments)))
        if leave is not None:
            leave(launch_metadata)


def _plain(value: Any) -> Any:
    """Shapes and strides come as lists, tuples and torch's sizes."""
    return tuple(value) if isinstance(value, list | tuple) else value


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
