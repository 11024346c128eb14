"""Tensors as NVIDIA's copy engine takes them ("tensor maps"), kept from one launch of a kernel to the next.

Of every descriptor, Triton's launcher has the driver make a map, at every launch. A map says where a tensor lies and
how it is cut into blocks, and holds none of its memory: it follows from the address, the shape and the strides,
whatever lay there before. What is here makes maps as Triton does, once for each of these. Imports Triton's backend for
NVIDIA's devices, which not every Triton has, when it is asked for the first.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Makes of a tensor what a kernel takes for it: Triton's descriptor, with the block that the copy engine moves.
Describe = Callable[[torch.Tensor], Any]
#: Maps that are kept for one argument: weights of all layers share a kernel, and numbers of tokens return.
_KEPT = 4096


class TensorMaps:
    """Maps for one argument of one compiled kernel, which takes tensors of one dtype there."""

    __slots__ = ("_describe", "_encode", "_kept")

    def __init__(self, describe: Describe, encode: Callable[[Any], list[Any]]) -> None:
        self._describe = describe
        self._encode = encode
        self._kept: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[Any]] = {}

    def of(self, tensor: torch.Tensor, pointer: int) -> list[Any]:
        """What the kernel is launched with in the place of `tensor`, which lies at `pointer`."""
        key = (pointer, tensor.shape, tensor.stride())
        found = self._kept.get(key)
        if found is None:
            found = self._encode(self._describe(tensor))
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found


def maps_of(compiled: Any, described: Mapping[int, Describe]) -> dict[int, TensorMaps]:
    """For each described argument of Triton's compiled kernel, by its place; empty where it takes no maps.

    The last place comes first: an argument becomes several.
    """
    # one for each argument that is a descriptor, in their order
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or []
    if len(metas) != len(described):
        return {}
    encoders = (_encoder(meta) for meta in metas)
    return {
        place: TensorMaps(describe, encode)
        for (place, describe), encode in reversed(list(zip(sorted(described.items()), encoders, strict=True)))
    }


def without_descriptors(run: Any) -> Any:
    """Triton's launcher `run` (its `CudaLauncher`), which is to be called with what stands for descriptors already."""
    bare = copy.copy(run)
    bare.launch = inspect.getclosurevars(run.launch).nonlocals["launcher"]
    return bare


def _encoder(meta: Any) -> Callable[[Any], list[Any]]:
    from triton.backends.nvidia import driver

    # releases from 3.8 on hand the launch's other arguments over, which NVIDIA's devices do not look at
    others = [()] * (len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2)
    return lambda descriptor: driver.make_tensordesc_arg(descriptor, meta, *others)
