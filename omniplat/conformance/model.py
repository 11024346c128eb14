"""The small model whose checkpoints the suite writes: one decoder layer with attention and a gated MLP, or experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omniplat.canonical import Array, CanonicalWeight
from omniplat.checkpoint.reader import NUMPY_DTYPES

#: NumPy dtype -> name in the header of a safetensors file; bytes are U8, whatever they mean.
DTYPE_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name != "F8_E8M0"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the written model. `inner` is the MLP's and the experts' intermediate size; no experts where 0."""

    hidden: int
    inner: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint on disk and the canonical weight of each of its modules."""

    folder: Path
    weights: Mapping[str, CanonicalWeight]
    sizes: Sizes


def modules_of(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """Name -> (N, K) of every module."""
    layer = "model.layers.0"
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    found = {
        f"{layer}.self_attn.q_proj": (q, sizes.hidden),
        f"{layer}.self_attn.k_proj": (kv, sizes.hidden),
        f"{layer}.self_attn.v_proj": (kv, sizes.hidden),
        f"{layer}.self_attn.o_proj": (sizes.hidden, q),
    }
    mlps = [f"{layer}.mlp"] if not sizes.experts else [f"{layer}.mlp.experts.{e}" for e in range(sizes.experts)]
    for mlp in mlps:
        found |= {f"{mlp}.gate_proj": (sizes.inner, sizes.hidden), f"{mlp}.up_proj": (sizes.inner, sizes.hidden)}
        found[f"{mlp}.down_proj"] = (sizes.hidden, sizes.inner)
    return found


def dense_modules(sizes: Sizes) -> list[str]:
    """Names of the modules that belong to no expert."""
    return [name for name in modules_of(sizes) if ".experts." not in name]


def model_config(sizes: Sizes, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of the model, without anything about quantization."""
    config: dict[str, Any] = {
        "model_type": "qwen3_moe" if sizes.experts else "qwen3",
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "num_hidden_layers": 1,
    }
    if sizes.experts:
        config |= {"num_experts": sizes.experts, "num_experts_per_tok": 2, "moe_intermediate_size": sizes.inner}
    return config


def write_files(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
    """config.json and one safetensors file: eight bytes of length, the header, the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(blob).to_bytes(8, "little") + blob)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
