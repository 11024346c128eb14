"""Reading tensors: memory-mapped NumPy views of a checkpoint's shards, opened when first asked for."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from omniplat.checkpoint.tensors import GGUF_PREFIX, TensorInfo
from omniplat.errors import InvalidCheckpointError

#: safetensors dtype -> NumPy dtype. E8M0 scales stay bytes: they are reinterpreted, never converted.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F64": np.dtype(np.float64),
}


class ShardReader:
    """Reads tensors of one checkpoint folder through one read-only memory map per shard."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._maps: dict[str, NDArray[np.uint8]] = {}
        self._lock = Lock()

    def read(self, info: TensorInfo) -> NDArray[Any]:
        """A read-only view of `info`, in its NumPy dtype and shape. Pages are loaded when they are touched.

        Rows of GGUF blocks come as bytes, uint8 [..., bytes of a row].

        Raises InvalidCheckpointError when the shard is unreadable or has shrunk, or for a dtype NumPy lacks.
        """
        is_blocks = info.dtype.startswith(GGUF_PREFIX)
        dtype = np.dtype(np.uint8) if is_blocks else NUMPY_DTYPES.get(info.dtype)
        if dtype is None:
            raise InvalidCheckpointError(
                f"tensors of dtype {info.dtype} cannot be read", file=info.shard, key=info.name
            )
        raw = self._map(info.shard)[info.start : info.end]
        if raw.nbytes != info.nbytes:
            raise InvalidCheckpointError("the file is shorter than its header says", file=info.shard, key=info.name)
        if info.start % dtype.itemsize:
            raw = raw.copy()
        return raw.view(dtype).reshape((*info.shape[:-1], -1) if is_blocks else info.shape)

    def close(self) -> None:
        """Forget the maps; arrays that were handed out keep theirs alive."""
        with self._lock:
            self._maps.clear()

    def _map(self, shard: str) -> NDArray[np.uint8]:
        with self._lock:
            if shard not in self._maps:
                try:
                    self._maps[shard] = np.memmap(self._root / shard, np.uint8, "r")
                except (OSError, ValueError) as exc:
                    raise InvalidCheckpointError(f"cannot be mapped: {exc}", file=shard) from exc
            return self._maps[shard]
