"""Compiles the weight-only kernels for a device that is not here: `python -m tests.support.compile_for gfx942 ID...`.

Prints a line for each weight id, dtype and number of tokens: how many bytes of code it became. A process of its own,
because the compiler's target is that of the process, and because interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from omniplat.portable import weight_only_triton
from omniplat.portable.word_weights import decode_form
from tests.portable.test_weight_only import DTYPES, layer_of, weight_of

OUT, IN = 272, 1152
#: Few tokens and many have kernels of their own.
TOKENS = (5, 200)


class Target:
    """What Triton asks a driver for when it compiles."""

    def __init__(self, arch: str) -> None:
        self.target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiles:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.compiled.append(self.kernel.warmup(*args, grid=grid, **options))


def main(arch: str, weight_ids: list[str]) -> None:
    triton.runtime.driver.set_active(Target(arch))
    kernels = {name: Compiles(getattr(weight_only_triton, name)) for name in ("few_tokens", "many_tokens")}
    for name, kernel in kernels.items():
        setattr(weight_only_triton, name, kernel)
    for weight_id, dtype, tokens in product(weight_ids, DTYPES.values(), TOKENS):
        # on no device at all: neither PTX nor what the interpreter needs is taken
        layer = layer_of(weight_of(weight_id, OUT, IN)).to("meta")
        form = decode_form(layer.config.form)
        x = torch.empty(tokens, IN, dtype=dtype, device="meta")
        words, table, scale, zero, row_scale = (
            dict(layer.named_buffers()).get(role) for role in ("words", "table", "scale", "zero", "row_scale")
        )
        tile = weight_only_triton.tile_of(tokens, weight_only_triton.folds(form, dtype))
        y = torch.empty(tokens, OUT, dtype=dtype, device="meta")
        weight_only_triton.weight_only_product(x, words, table, scale, zero, row_scale, None, y, form, tile)
        code = kernels["few_tokens" if tile.slices else "many_tokens"].compiled[-1].asm["hsaco"]
        print(weight_id, dtype, tokens, len(code), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
