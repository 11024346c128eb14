"""Compiles the weight-only kernels for a device that is not here: `compiled` in a process of its own, because the
compiler's target is that of the process, and because interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from omniplat.portable.word_weights import decode_form
from tests.portable.test_weight_only import DTYPES, layer_of, weight_of

ROOT = Path(__file__).resolve().parents[2]
OUT, IN = 272, 1152


class Target:
    """What Triton asks a driver for when it compiles for `arch`."""

    def __init__(self, arch: str) -> None:
        self._arch = arch

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        if self._arch.startswith("sm"):
            return GPUTarget("cuda", int(self._arch[2:]), 32)
        return GPUTarget("hip", self._arch, 64 if self._arch.startswith("gfx9") else 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(arch: str, weight_id: str, tokens: Sequence[int]) -> list[str]:
    """For each dtype and number of tokens a line: both, the kernel's name, and how many bytes of code it became."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compile_for", arch, weight_id, *map(str, tokens)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _main(arch: str, weight_id: str, tokens: Sequence[int]) -> None:
    import triton

    from omniplat.portable import weight_only_triton, word_decode_triton
    from omniplat.portable.launch import Launch, collected

    class Compiles:
        """Compiles what would be launched."""

        def __init__(self) -> None:
            self.compiled: list[tuple[str, Any]] = []

        def collect(self, launch: Launch, arguments: Sequence[Any]) -> None:
            self.compiled.append((launch.name, launch.compile(arguments)))

    triton.runtime.driver.set_active(Target(arch))
    kernels = Compiles()
    for dtype, count in product(DTYPES.values(), tokens):
        # on no device at all: neither PTX nor what the interpreter needs is taken, unless it is asked for
        layer = layer_of(weight_of(weight_id, OUT, IN)).to("meta")
        form = decode_form(layer.config.form)
        x = torch.empty(count, IN, dtype=dtype, device="meta")
        words, table, scale, zero, row_scale = (
            dict(layer.named_buffers()).get(role) for role in ("words", "table", "scale", "zero", "row_scale")
        )
        y = torch.empty(count, OUT, dtype=dtype, device="meta")
        with ExitStack() as stack:
            if arch.startswith("sm"):
                for module in (word_decode_triton, weight_only_triton):
                    stack.enter_context(patch.object(module, "computes_in_pairs", lambda device: True))
            stack.enter_context(collected(kernels))
            tile = weight_only_triton.tile_of(count, form, dtype, word_decode_triton.kind_of_zero(zero), x.device)
            weight_only_triton.weight_only_product(x, words, table, scale, zero, row_scale, None, y, form, tile)
        name, kernel = kernels.compiled[-1]
        print(weight_id, dtype, count, name, len(kernel.asm["cubin" if arch.startswith("sm") else "hsaco"]), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], [int(count) for count in sys.argv[3:]])
