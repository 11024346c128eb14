"""Reading the header of a GGUF file through its own reader library (distribution `gguf`, extra `gguf`).

A GGUF file has a type per tensor and no JSON. Quantized types become dtypes of their own, `GGUF_Q4_K` and so on, whose
shape is that of the values; every row is a whole number of blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omniplat.checkpoint.tensors import GGUF_PREFIX, TensorInfo
from omniplat.errors import BackendNotInstalledError, InvalidCheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

#: The line that brings the reader library.
INSTALL = 'pip install "omniplat[gguf]"'

MAGIC = b"GGUF"
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
    reader = _open(path, shard)
    tensors = [_info(tensor, shard, size) for tensor in reader.tensors]
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise InvalidCheckpointError("names a tensor twice", file=shard)
    return tensors, _description(reader)


def _open(path: Path, shard: str) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as exc:
        raise BackendNotInstalledError("gguf", "the library gguf", INSTALL, kind="format") from exc
    try:
        return GGUFReader(path)
    except Exception as exc:
        # the library reads past the end of a cut or forged file in many ways, each with an error of its own
        text = " ".join(str(exc).split())[:120]
        raise InvalidCheckpointError(
            f"GGUF header is cut off or broken: {type(exc).__name__}: {text}", file=shard
        ) from exc


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
