"""Weights in bitsandbytes' four bits, packed by hand."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np

from omniplat.canonical import Array
from omniplat.oracle import element_values


class FourBit:
    """A weight as bitsandbytes stores it, packed by hand from random codes."""

    def __init__(
        self, n: int, k: int, kind: str = "nf4", *, block: int = 64, nested: bool = False, seed: int = 0
    ) -> None:
        random = np.random.default_rng((seed, n, k))
        self.kind, self.shape = kind, (n, k)
        self.code = random.integers(0, 16, n * k, dtype=np.uint8)
        blocks = -(-n * k // block)
        self.state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
        self.arrays: dict[str, Array] = {"weight": ((self.code[0::2] << 4) | self.code[1::2]).reshape(-1, 1)}
        table = element_values("nf4" if kind == "nf4" else "fp4_bnb")
        self.arrays["weight.quant_map"] = table.astype(np.float32)
        if nested:
            self.state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.25}
            absmax = random.integers(0, 256, blocks, dtype=np.uint8)
            outer = random.uniform(0.5, 2, -(-blocks // 4)).astype(np.float32)
            values = np.linspace(-1, 1, 256, dtype=np.float32)
            self.scale = values[absmax] * outer[np.arange(blocks) // 4] + np.float32(0.25)
            self.arrays |= {"weight.nested_absmax": outer, "weight.nested_quant_map": values}
        else:
            absmax = self.scale = random.uniform(0.5, 2, blocks).astype(np.float32)
        self.arrays["weight.absmax"] = absmax
        self.values = (table[self.code] * np.repeat(self.scale.astype(np.float64), block)[: n * k]).reshape(n, k)

    def tensors(self, module: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        dtypes = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
        shapes: dict[str, Any] = {f"{module}.{k}": (dtypes[v.dtype], v.shape) for k, v in self.arrays.items()}
        state = json.dumps(self.state).encode()
        leaf = f"{module}.weight.quant_state.bitsandbytes__{self.kind}"
        shapes[leaf] = ("U8", (len(state),))
        return shapes, {leaf: state} | {f"{module}.{k}": v.tobytes() for k, v in self.arrays.items()}
