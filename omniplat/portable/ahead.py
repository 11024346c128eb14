"""Kernels of loaded layers, compiled before the first call: `compile_kernels`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TextIO

import torch

from omniplat.portable.quantize import has_triton
from omniplat.runtime.kernel import encode_config
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.tensors import DTYPES

#: Numbers of tokens that layers are compiled for where nobody says which: kernels take larger tiles at powers of two.
TOKENS = tuple(2**power for power in range(13))
Layer = QuantLinear | QuantExperts


def compile_kernels(layers: Iterable[Layer], tokens: Iterable[int] = TOKENS, *, out: TextIO | None = None) -> int:
    """Compile the Triton kernels that `layers` need for calls with these numbers of tokens; how many were compiled.

    Only what their shapes need, each kernel once, in parallel, into Triton's cache on disk: with the cache of an
    earlier start nothing is compiled, and 0 returned. Layers on the CPU have none. A line on `out` (stderr when None)
    says what was done: while it is, where that is a terminal, else once, and only if something was compiled. Numbers of
    tokens for which the device's memory does not suffice are left out, with a line that says so.

    Raises BackendLoadError for a kernel that cannot be compiled, also for want of a tool.
    """
    distinct = {_kind(layer): layer for layer in layers if _device(layer).type != "cpu"}
    if not distinct or not has_triton():
        return 0
    from omniplat.portable.compilation import compile_calls, compiles_ahead

    out = out or sys.stderr
    if not compiles_ahead():
        print("kernels: compiled on first use, this release of Triton cannot compile ahead", file=out)
        return 0
    start = time.perf_counter()
    made = compile_calls(_calls(distinct.values(), tuple(tokens), out), partial(_show, out) if out.isatty() else None)
    if made.compiled or out.isatty():
        seconds = time.perf_counter() - start
        line = f"kernels: {made.compiled} compiled, {made.cached} from the cache, {seconds:.1f} s"
        print(f"\r{line}" if out.isatty() else line, file=out)
    return made.compiled


def _show(out: TextIO, done: int, total: int) -> None:
    print(f"\rkernels: {done} of {total}", end="", file=out, flush=True)


def _kind(layer: Layer) -> tuple[object, ...]:
    """Layers that agree in it need the same kernels."""
    buffers = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in layer.named_buffers())
    out_dtype = layer.out_dtype if isinstance(layer, QuantLinear) else None
    moe = layer.spec.moe
    return (type(layer.kernel), encode_config(layer.config), buffers, layer.spec.dtype, out_dtype, moe, _device(layer))


def _device(layer: Layer) -> torch.device:
    return next((tensor.device for tensor in layer.buffers()), torch.device("cpu"))


def _calls(layers: Iterable[Layer], tokens: tuple[int, ...], out: TextIO) -> Iterator[Callable[[], object]]:
    for layer in layers:
        for count in tokens:
            yield partial(_call, layer, count, out)


def _call(layer: Layer, count: int, out: TextIO) -> None:
    """Call it with any numbers at all."""
    spec, device = layer.spec, _device(layer)
    try:
        x = torch.zeros(count, spec.in_features, dtype=DTYPES[spec.dtype], device=device)
        if isinstance(layer, QuantLinear):
            layer(x)
            return
        assert spec.moe is not None
        slots = max(1, spec.moe.top_k)
        ids = torch.arange(count * slots, device=device).view(count, slots) % spec.moe.experts
        layer(x, ids, torch.ones(count, slots, device=device))
    except torch.OutOfMemoryError:
        print(f"kernels: {spec.name} not compiled for {count} tokens, memory of {device} does not suffice", file=out)
