"""Writing small checkpoints: real headers, data that is zero unless given, so that size costs nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from omniplat.checkpoint.tensors import DTYPE_BITS

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def write_shard(
    path: Path, tensors: Shapes, values: Mapping[str, bytes] | None = None, metadata: Mapping[str, str] | None = None
) -> None:
    """One safetensors file; the payload is sparse but for `values`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(blob).to_bytes(8, "little") + blob)
        file.truncate(8 + len(blob) + offset)
        for name, value in (values or {}).items():
            file.seek(8 + len(blob) + header[name]["data_offsets"][0])
            file.write(value)


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Shapes,
    *,
    shards: int = 1,
    values: Mapping[str, bytes] | None = None,
    files: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A folder with config.json, `shards` safetensors files and, for more than one, an index. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in (files or {}).items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    names = list(tensors)
    weight_map = {}
    for index in range(shards):
        shard = "model.safetensors" if shards == 1 else f"model-{index + 1:05}-of-{shards:05}.safetensors"
        own = {name: tensors[name] for name in names[index::shards]}
        own_values = {name: value for name, value in (values or {}).items() if name in own}
        write_shard(folder / shard, own, own_values, metadata)
        weight_map |= dict.fromkeys(own, shard)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def bf16(*shape: int) -> tuple[str, tuple[int, ...]]:
    return "BF16", shape


def mxfp4(module: str, n: int, k: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """MXFP4 under compressed-tensors' names."""
    return {f"{module}.weight_packed": ("U8", (n, k // 2)), f"{module}.weight_scale": ("U8", (n, k // 32))}


def mxfp8(module: str, n: int, k: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f"{module}.weight": ("F8_E4M3", (n, k)), f"{module}.weight_scale": ("U8", (n, k // 32))}


def fp8_tensor(module: str, n: int, k: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """FP8 with per-tensor scales, static input."""
    return {
        f"{module}.weight": ("F8_E4M3", (n, k)),
        f"{module}.weight_scale": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }


def fp8_channel(module: str, n: int, k: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f"{module}.weight": ("F8_E4M3", (n, k)), f"{module}.weight_scale": ("BF16", (n, 1))}


def int4_packed(module: str, n: int, k: int, group: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """compressed-tensors pack-quantized, symmetric."""
    return {
        f"{module}.weight_packed": ("I32", (n, k // 8)),
        f"{module}.weight_scale": ("BF16", (n, k // group)),
        f"{module}.weight_shape": ("I64", (2,)),
    }


def gptq(module: str, n: int, k: int, bits: int, group: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        f"{module}.qweight": ("I32", (k * bits // 32, n)),
        f"{module}.qzeros": ("I32", (k // group, n * bits // 32)),
        f"{module}.scales": ("F16", (k // group, n)),
    }
