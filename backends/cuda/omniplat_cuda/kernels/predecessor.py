"""Products that start before the kernel ahead of them on the stream, the quantizer of their tokens, has ended.

CUDA calls it programmatic dependent launch. With Triton's option `launch_pdl` a kernel starts as soon as every program
of the one ahead of it has called `omniplat.portable.rows_triton.release_next` or ended. `wait` returns when that one is
complete and what it wrote is seen, whether it called that or not.

It changes no result. Every group of warps calls `wait` before it reads or writes a tensor: a product is not complete
before the kernel ahead of it, and its output may lie where that one reads. Quantizers are not launched like this: they
start when all before them is complete. A weight could be fetched before `wait`; for few tokens that was slower.

Quantizers release what follows for these products alone, where they are asked to (`releases`): kernels of libraries
that are launched so, too, may read scales before they wait.

Imports triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait():  # type: ignore[no-untyped-def]  # Triton looks annotations up among its own types
    # an operand that is not used: Triton knows no instructions without a result
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
