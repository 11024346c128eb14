"""Reading the header of a GGUF file through its own reader library (distribution `gguf`, extra `gguf`).

A GGUF file has a type per tensor and no JSON. Quantized types become dtypes of their own, `GGUF_Q4_K` and so on, whose
shape is that of the values; every row is a whole number of blocks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniplat.checkpoint.source import Source
from omniplat.checkpoint.tensors import GGUF_PREFIX, TensorInfo
from omniplat.errors import BackendNotInstalledError, InvalidCheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

#: The line that brings the reader library.
INSTALL = 'pip install "omniplat[gguf]"'

MAGIC = b"GGUF"
#: Longest array of a header: the vocabularies of today have some hundred thousand entries.
_MAX_ARRAY = 1 << 24
#: What is fetched at first of a header that is far away, then at a time, and in all. Vocabularies are most of it.
_FIRST_BYTES, _STEP_BYTES, _MAX_HEADER_BYTES = 1 << 18, 1 << 22, 100_000_000
#: Types that are no blocks have the names of safetensors' dtypes.
_PLAIN = frozenset({"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"})
#: Fields of the header that say what the file is.
_DESCRIBING = ("general.architecture", "general.name", "general.file_type", "general.quantization_version")


def read_gguf_header(source: Source, shard: str) -> tuple[list[TensorInfo], dict[str, str]]:
    """Tensors of `shard` in file order, and the fields that describe the model. Of a file that is not on disk no more
    is read than its header.

    Raises InvalidCheckpointError naming the file for anything that is no whole GGUF file, BackendNotInstalledError
    where the reader library is missing.
    """
    size = source.size(shard)
    if source.read_range(shard, 0, len(MAGIC)) != MAGIC:
        raise InvalidCheckpointError("is not a GGUF file: its magic is missing", file=shard)
    reader = _read(source.root / shard, size, size, shard) if source.is_local else _read_from_afar(source, shard, size)
    tensors = [_info(tensor, shard, size) for tensor in reader.tensors]
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise InvalidCheckpointError("names a tensor twice", file=shard)
    return tensors, _description(reader)


def _read(path: Path, size: int, known: int, shard: str) -> GGUFReader:
    """The library's reader of a file of `size` bytes, of which the first `known` are there."""
    try:
        reader = _bounded_reader(size, known)(path)
        _description(reader)
    except (BackendNotInstalledError, _Unknown):
        raise
    except Exception as exc:
        # the library trips over cut and forged files in many places, each with an error of its own
        text = " ".join(str(exc).split())[:120]
        raise InvalidCheckpointError(
            f"GGUF header is cut off or broken: {type(exc).__name__}: {text}", file=shard
        ) from exc
    return reader


def _read_from_afar(source: Source, shard: str, size: int) -> GGUFReader:
    """The same of a file that is fetched piece by piece until its header is whole.

    The library reads files only: it is given one with these pieces, and a hole where the tensors are.
    """
    known = 0
    with tempfile.TemporaryDirectory(prefix="omniplat-") as folder:
        path = Path(folder) / "header.gguf"
        with path.open("wb") as file:
            file.truncate(size)
        step = _FIRST_BYTES
        while known < min(size, _MAX_HEADER_BYTES):
            piece = source.read_range(shard, known, min(step, size - known))
            with path.open("r+b") as file:
                file.seek(known)
                file.write(piece)
            known, step = known + len(piece), _STEP_BYTES
            try:
                return _read(path, size, known, shard)
            except _Unknown:
                if not piece:
                    break
    raise InvalidCheckpointError(f"GGUF header is longer than {known} bytes", file=shard)


class _Unknown(Exception):
    """The header goes on behind the bytes that have been fetched."""


def _bounded_reader(size: int, known: int) -> type[GGUFReader]:
    """The library's reader, made to stop where a file of `size` bytes ends and at arrays beyond `_MAX_ARRAY`, and to
    raise _Unknown where the header goes on behind `known` bytes.

    On its own it takes what lies behind the end for empty, and loops as often as a forged length says.
    """
    import numpy as np

    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError as exc:
        raise BackendNotInstalledError("gguf", "the library gguf", INSTALL, kind="format") from exc

    class BoundedReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = offset + np.dtype(dtype).itemsize * int(count)
            if end > size:
                raise ValueError(f"needs bytes behind the end, at {offset}")
            in_header = getattr(self, "data_offset", None) is None
            if in_header and end > known:
                raise _Unknown
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
