"""Reading the header of a GGUF file through its own reader library (distribution `gguf`, extra `gguf`).

A GGUF file has a type per tensor and no JSON. Quantized types become dtypes of their own, `GGUF_Q4_K` and so on, whose
shape is that of the values; every row is a whole number of blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniplat.checkpoint.tensors import GGUF_PREFIX, TensorInfo
from omniplat.errors import BackendNotInstalledError, InvalidCheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

#: The line that brings the reader library.
INSTALL = 'pip install "omniplat[gguf]"'

MAGIC = b"GGUF"
#: Longest array of a header: the vocabularies of today have some hundred thousand entries.
_MAX_ARRAY = 1 << 24
#: Types that are no blocks have the names of safetensors' dtypes.
_PLAIN = frozenset({"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"})
#: Fields of the header that say what the file is.
_DESCRIBING = ("general.architecture", "general.name", "general.file_type", "general.quantization_version")


def read_gguf_header(root: Path, shard: str) -> tuple[list[TensorInfo], dict[str, str]]:
    """Tensors of `root/shard` in file order, and the fields that describe the model.

    Raises InvalidCheckpointError naming the file for anything that is no whole GGUF file, BackendNotInstalledError
    where the reader library is missing.
    """
    path = root / shard
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as exc:
        raise InvalidCheckpointError(f"cannot be read: {exc.strerror or exc}", file=shard) from exc
    if magic != MAGIC:
        raise InvalidCheckpointError("is not a GGUF file: its magic is missing", file=shard)
    try:
        reader = _bounded_reader(size)(path)
        described = _description(reader)
    except BackendNotInstalledError:
        raise
    except Exception as exc:
        # the library trips over cut and forged files in many places, each with an error of its own
        text = " ".join(str(exc).split())[:120]
        raise InvalidCheckpointError(
            f"GGUF header is cut off or broken: {type(exc).__name__}: {text}", file=shard
        ) from exc
    tensors = [_info(tensor, shard, size) for tensor in reader.tensors]
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise InvalidCheckpointError("names a tensor twice", file=shard)
    return tensors, described


def _bounded_reader(size: int) -> type[GGUFReader]:
    """The library's reader, made to stop where a file of `size` bytes ends and at arrays beyond `_MAX_ARRAY`.

    On its own it takes what lies behind the end for empty, and loops as often as a forged length says.
    """
    import numpy as np

    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError as exc:
        raise BackendNotInstalledError("gguf", "the library gguf", INSTALL, kind="format") from exc

    class BoundedReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > size:
                raise ValueError(f"needs bytes behind the end, at {offset}")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY:
                length = int(self._get(orig_offs + 4, np.uint64)[0])
                if length > _MAX_ARRAY:
                    raise ValueError(f"an array of {length} values")
            return super()._get_field_parts(orig_offs, raw_type)

    return BoundedReader


def _info(tensor: object, shard: str, size: int) -> TensorInfo:
    name = str(getattr(tensor, "name", ""))
    kind = str(getattr(getattr(tensor, "tensor_type", None), "name", ""))
    start, length = int(getattr(tensor, "data_offset", -1)), int(getattr(tensor, "n_bytes", -1))
    if start < 0 or length < 0 or start + length > size:
        raise InvalidCheckpointError(
            f"GGUF file is cut off: data ends at byte {start + length}, the file has {size}", file=shard, key=name
        )
    # the fastest dimension comes first in the file
    shape = tuple(int(dim) for dim in reversed(list(getattr(tensor, "shape", ()))))
    return TensorInfo(name, kind if kind in _PLAIN else GGUF_PREFIX + kind, shape, shard, start, start + length)


def _description(reader: GGUFReader) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in _DESCRIBING:
        field = reader.get_field(key)
        if field is not None:
            found[key] = str(field.contents())
    return found
