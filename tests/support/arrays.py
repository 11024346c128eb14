"""Small checkpoints with values: written from NumPy arrays, read back as canonical weights, run on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from omniplat import load
from omniplat.api import make_planned
from omniplat.canonical import Array, CanonicalWeight
from omniplat.checkpoint.reader import ShardReader
from omniplat.formats.resolved import ResolvedModule
from omniplat.reading import read_canonical
from omniplat.roworder import AS_IS
from tests.support.checkpoints import write_checkpoint

_NAMES = {
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}


def write_arrays(
    folder: Path,
    arrays: Mapping[str, Array],
    *,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A checkpoint of one shard that holds `arrays` under their names."""
    shapes = {name: (_NAMES[array.dtype], array.shape) for name, array in arrays.items()}
    values = {name: np.ascontiguousarray(array).tobytes() for name, array in arrays.items()}
    return write_checkpoint(folder, config or {}, shapes, values=values, files=files, metadata=metadata)


def modules(folder: Path) -> dict[str, ResolvedModule]:
    planned = make_planned(folder, "cpu")
    return {module.name: module for item in planned.resolutions for module in item.modules}


def canonical(folder: Path, module: str) -> CanonicalWeight:
    """The canonical weight of one module of the checkpoint."""
    root = folder if folder.is_dir() else folder.parent
    return read_canonical(modules(folder)[module], ShardReader(root), AS_IS)


def run(folder: Path, layer: str, x: Array) -> Array:
    """The layer's output in float32 on the cpu backend, for float32 `x`."""
    module = load(folder, "cpu")[layer]
    with torch.no_grad():
        y = module(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)))
    return np.asarray(y.to(torch.float32).numpy())


def relative(found: Array, wanted: Array) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(np.asarray(found, dtype=np.float64) - wanted) / np.linalg.norm(wanted))
