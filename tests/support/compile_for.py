"""Compiles the weight-only kernels for a device that is not here: `python -m tests.support.compile_for gfx942 ID...`.

Prints a line for each weight id, dtype and number of tokens: how many bytes of code it became. A process of its own,
because the compiler's target is that of the process, and because interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from omniplat.portable import weight_only_triton
from omniplat.portable.launch import Launch, collected
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
    """Compiles what would be launched."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def collect(self, launch: Launch, arguments: Sequence[Any]) -> None:
        self.compiled.append(launch.compile(arguments))


def main(arch: str, weight_ids: list[str]) -> None:
    triton.runtime.driver.set_active(Target(arch))
    kernels = Compiles()
    for weight_id, dtype, tokens in product(weight_ids, DTYPES.values(), TOKENS):
        # on no device at all: neither PTX nor what the interpreter needs is taken
        layer = layer_of(weight_of(weight_id, OUT, IN)).to("meta")
        form = decode_form(layer.config.form)
        x = torch.empty(tokens, IN, dtype=dtype, device="meta")
        words, table, scale, zero, row_scale = (
            dict(layer.named_buffers()).get(role) for role in ("words", "table", "scale", "zero", "row_scale")
        )
        tile = weight_only_triton.tile_of(tokens, form, weight_only_triton.folds(form, dtype))
        y = torch.empty(tokens, OUT, dtype=dtype, device="meta")
        with collected(kernels):
            weight_only_triton.weight_only_product(x, words, table, scale, zero, row_scale, None, y, form, tile)
        code = kernels.compiled[-1].asm["hsaco"]
        print(weight_id, dtype, tokens, len(code), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
