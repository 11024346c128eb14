"""Memory: what was freed is given back to the system, and where there is not enough, the layer is named."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from omniplat.errors import LayerMemoryError

#: How torch says that memory of the CPU does not suffice: by the text of a RuntimeError.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


@contextmanager
def layer_memory(name: str, nbytes: int, device: torch.device | None = None) -> Iterator[None]:
    """Raise LayerMemoryError, of the layer `name` with its `nbytes` as stored, where memory does not suffice inside.

    `device` is where the layer is put; the CPU when None, and the CUDA device that its weights may be rounded on.
    """
    try:
        yield
    except LayerMemoryError:
        raise
    except (MemoryError, RuntimeError) as exc:
        of_the_cpu = isinstance(exc, MemoryError) or _CPU_ALLOCATOR in str(exc)
        if not of_the_cpu and not isinstance(exc, torch.OutOfMemoryError):
            raise
        where = torch.device("cpu") if of_the_cpu else device or torch.device("cuda")
        raise LayerMemoryError(name, str(where), nbytes, _free(where)) from exc


def _free(device: torch.device) -> int | None:
    """Bytes that a device has left, those that torch holds for itself not counted."""
    is_known = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.mem_get_info(device)[0] if is_known else None


def release_freed() -> None:
    """Give back what the C library's heap holds but nobody uses; nothing where the library cannot.

    While weights come and go and quantized layers stay, glibc's heap breaks up: small things that stay settle in the
    hole that a weight has left, and the next weight finds no room. Without this, 64 layers of bf16 that are quantized
    as they arrive peak at three times their final size (`benchmarks/quantize_memory.py`).
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
