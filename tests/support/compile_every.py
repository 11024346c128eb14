"""Compiles every kernel of the portable kernels and of the cuda backend's that is in Triton, for a device that is not
here: `compiled` in a process of its own, because the compiler's target is that of the process, and because interpreted
kernels cannot be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from omniplat.scheme import TensorQuant, parse_activation_id
from tests.support.compile_for import ROOT, Target

OUT, IN, EXPERTS, TOP = 272, 1152, 8, 2
WEIGHTS = ("mxfp4", "nvfp4", "uint4-g64", "nf4-b64", "fp8-block128x128", "mxfp8", "int8-channel")


def compiled() -> list[str]:
    """Modules and names of the kernels, for each form that was compiled for sm90. Raises AssertionError, with what the
    compiler says, where one cannot be."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compile_every"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def quant(activation: str) -> TensorQuant:
    found = parse_activation_id(activation)
    assert found is not None
    return found


def calls() -> Iterator[Callable[[], object]]:
    """What launches a kernel each, or more."""
    from omniplat_cuda.kernels import align_triton

    from omniplat.portable import (
        experts_triton,
        gated,
        int8_gemm_triton,
        mx_grid_triton,
        quantize_blocks_triton,
        quantize_groups_triton,
        quantize_triton,
        routing_triton,
        scaled_product_triton,
    )

    x, one = meta(20, IN), meta(1, 1, dtype=torch.float32)
    pre = meta(IN, dtype=torch.float32)
    for activation in ("fp8-token", "int8-token", "fp8-tensor-static"):
        given = one if activation.endswith("static") else None
        for scale, early in product((None, pre), (False, True)):
            yield lambda a=activation, p=scale, g=given, e=early: quantize_triton.quantize_rows(
                x, quant(a), p, g, releases=e
            )
        if given is None:
            yield lambda a=activation: gated.quantize_gated(meta(20, 2 * IN), quant(a))
    for activation in ("mxfp4", "mxfp8"):
        for early in (False, True):
            yield lambda a=activation, e=early: mx_grid_triton.regroup_rows(x, quant(a), None, releases=e)
    yield lambda: quantize_groups_triton.quantize_groups(x, quant("fp8-g128"), None)
    yield lambda: gated.quantize_gated(meta(20, 2 * IN), quant("fp8-g128"))
    for activation, scale, wide in product(("mxfp8", "mxfp4", "nvfp4"), (None, pre), (False, True)):
        multiplier = one.to(torch.float64 if wide else torch.float32) if activation == "nvfp4" else None
        for rule in ("absmax", "absmax-clamped", "absmax-reciprocal") if activation == "nvfp4" else ("even", "ceil"):
            how = replace(quant(activation), scale_rule=rule)
            yield lambda h=how, p=scale, m=multiplier, g=wide: quantize_blocks_triton.quantize_blocks(
                meta(20, 2 * IN), h, p, m, gated=g
            )
    for tokens in (5, 20, 300):
        eights = meta(tokens, IN, dtype=torch.float8_e4m3fn), meta(OUT, IN, dtype=torch.float8_e4m3fn)
        whole = meta(tokens, IN, dtype=torch.int8), meta(OUT, IN, dtype=torch.int8)
        both, y = scaled_product_triton.tile_of(tokens), meta(tokens, OUT)
        scales = meta(9, tokens, dtype=torch.float32), meta(3, 9, dtype=torch.float32)
        rows = meta(1, tokens, dtype=torch.float32), meta(OUT, dtype=torch.float32)
        yield lambda e=eights, s=scales, y=y, t=both: scaled_product_triton.scaled_product(*e, *s, None, y, 128, t)
        yield lambda w=whole, s=rows, y=y, t=both: scaled_product_triton.scaled_product(*w, *s, None, y, 0, t)
        by_pointers = int8_gemm_triton.tile_of(tokens, IN, torch.device("meta"))
        sides = meta(tokens, 1, dtype=torch.float32), meta(1, OUT, dtype=torch.float32)
        for tile in (by_pointers, replace(by_pointers, descriptors=True)):
            yield lambda w=whole, s=sides, t=tile: int8_gemm_triton.int8_product(*w, *s, None, torch.bfloat16, t)
    for tokens in (5, 2000):
        ids = meta(tokens, TOP, dtype=torch.int32)
        for expert_map in (None, meta(2 * EXPERTS, dtype=torch.int32)):
            yield lambda i=ids, m=expert_map: routing_triton.sort_by_expert(i, m, EXPERTS)
            yield lambda i=ids, m=expert_map: routing_triton.sort_in_tiles(i, m, EXPERTS, 16)
            yield lambda i=ids, m=expert_map: align_triton.align(i, m, EXPERTS, 16)
    yield lambda: experts_triton.silu_and_mul(meta(20, 2 * IN))
    place, held = meta(10, TOP, dtype=torch.int64), meta(1, dtype=torch.int32)
    yield lambda: experts_triton.combine(x, place, meta(10, TOP, dtype=torch.float32), held, torch.bfloat16)
    for weight_id in WEIGHTS:
        yield from weight_only_calls(weight_id)


def weight_only_calls(weight_id: str) -> Iterator[Callable[[], object]]:
    from omniplat.portable import decode_triton, experts_triton, routing_triton, word_decode_triton
    from omniplat.portable.weight_only_triton import tile_of, weight_only_product
    from omniplat.portable.word_weights import decode_form
    from tests.portable.test_weight_only import layer_of, weight_of

    layer = layer_of(weight_of(weight_id, OUT, IN)).to("meta")
    form = decode_form(layer.config.form)
    found = dict(layer.named_buffers())
    words, table, scale, zero, row_scale = (
        found.get(role) for role in ("words", "table", "scale", "zero", "row_scale")
    )
    assert words is not None
    assert scale is not None
    kind = word_decode_triton.kind_of_zero(zero)
    for tokens in (1, 20, 64, 200):
        x, y = meta(tokens, IN), meta(tokens, OUT)
        tile = tile_of(tokens, form, x.dtype, kind, x.device)
        yield lambda x=x, y=y, t=tile: weight_only_product(x, words, table, scale, zero, row_scale, None, y, form, t)
    yield lambda: decode_triton.decoded(words, table, scale, zero, row_scale, form, torch.bfloat16)
    each = [None if b is None else b.expand(EXPERTS, *b.shape) for b in (words, scale, zero, row_scale)]
    for tokens in (1, 40, 400):
        _, tiles = routing_triton.sort_in_tiles(meta(tokens, TOP, dtype=torch.int32), None, EXPERTS, 32)
        x = meta(tokens, IN)
        yield lambda x=x, t=tiles: experts_triton.product(x, [*each, table, None], form, t)


def _main() -> None:
    import triton

    from omniplat.portable import (
        mx_grid_triton,
        quantize_blocks_triton,
        quantize_triton,
        weight_only_triton,
        word_decode_triton,
    )
    from omniplat.portable.launch import Launch, collected

    class Compiles:
        """Compiles what would be launched, once."""

        def __init__(self) -> None:
            self.seen: set[object] = set()

        def collect(self, launch: Launch, arguments: Sequence[Any]) -> None:
            key = (launch, *(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in arguments))
            if key not in self.seen:
                self.seen.add(key)
                kernel = launch.compile(arguments).src.fn
                print(f"{kernel.__module__}.{kernel.__name__}", flush=True)

    triton.runtime.driver.set_active(Target("sm90"))
    with ExitStack() as stack:
        for module in (word_decode_triton, weight_only_triton):
            stack.enter_context(patch.object(module, "computes_in_pairs", lambda device: True))
        for module, name in product((quantize_triton, mx_grid_triton), ("converts_fp8", "launches_early")):
            stack.enter_context(patch.object(module, name, lambda device: True))
        stack.enter_context(patch.object(quantize_blocks_triton, "converts_fp8", lambda device: True))
        stack.enter_context(collected(Compiles()))
        for call in calls():
            call()


if __name__ == "__main__":
    _main()
