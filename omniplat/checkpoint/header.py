"""Reading and checking the header of one shard: safetensors here, GGUF through its library. No payload is read."""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec

from omniplat.checkpoint.gguf import read_gguf_header
from omniplat.checkpoint.source import LocalFolder, Source
from omniplat.checkpoint.tensors import DTYPE_BITS, TensorInfo
from omniplat.errors import InvalidCheckpointError

#: The limit that the safetensors library itself applies to a header.
MAX_HEADER_BYTES = 100_000_000


#: More than any tensor library has.
MAX_DIMENSIONS = 64


class _Entry(msgspec.Struct, gc=False):
    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (-1, -1)


class _Metadata(msgspec.Struct, rename={"metadata": "__metadata__"}):
    metadata: dict[str, str] | None = None


_DECODE_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])
_DECODE_METADATA = msgspec.json.Decoder(_Metadata)


class ShardHeader(msgspec.Struct, frozen=True):
    """Tensors of one shard in file order, and its `__metadata__` strings."""

    shard: str
    tensors: list[TensorInfo]
    metadata: dict[str, str]


def read_header(root: Path, shard: str) -> ShardHeader:
    """Header of the file `root/shard`: see `read_header_of`."""
    return read_header_of(LocalFolder(root), shard)


def read_header_of(source: Source, shard: str) -> ShardHeader:
    """Header of one shard of `source`, checked against the file's size.

    Raises InvalidCheckpointError naming the shard, and the tensor where one is at fault: unreadable or truncated
    file, absurd header length, broken JSON, unknown dtype, sizes that contradict shape and dtype, data that
    overlaps, leaves holes or ends before or after the end of the file.
    """
    if shard.endswith(".gguf"):
        return ShardHeader(shard, *read_gguf_header(source, shard))
    size = source.size(shard)
    prefix = source.read_range(shard, 0, 8)
    if len(prefix) < 8:
        raise InvalidCheckpointError(f"is {size} bytes long, too short for a safetensors file", file=shard)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise InvalidCheckpointError(f"header length {length} is beyond the limit of {MAX_HEADER_BYTES}", file=shard)
    if 8 + length > size:
        raise InvalidCheckpointError(f"truncated: the header needs {8 + length} bytes, the file has {size}", file=shard)
    blob = source.read_range(shard, 8, length)
    try:
        entries = _DECODE_ENTRIES.decode(blob)
        metadata = _DECODE_METADATA.decode(blob).metadata or {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidCheckpointError(f"header is not valid: {exc}", file=shard) from exc
    entries.pop("__metadata__", None)
    return ShardHeader(shard, _check_entries(entries, shard, 8 + length, size), metadata)


def _check_entries(entries: dict[str, _Entry], shard: str, data: int, size: int) -> list[TensorInfo]:
    tensors: list[TensorInfo] = []
    end_of_previous = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        bits = DTYPE_BITS.get(entry.dtype)
        if bits is None:
            raise InvalidCheckpointError(f"dtype {entry.dtype!r} is not a safetensors dtype", file=shard, key=name)
        if len(entry.shape) > MAX_DIMENSIONS:
            raise InvalidCheckpointError(f"has {len(entry.shape)} dimensions", file=shard, key=name)
        if entry.shape and min(entry.shape) < 0:
            raise InvalidCheckpointError(f"shape {entry.shape} is negative", file=shard, key=name)
        needed = prod(entry.shape) * bits
        if start < 0 or end < start or (end - start) * 8 != needed:
            raise InvalidCheckpointError(
                f"offsets {start}..{end} do not hold {entry.dtype} of shape {entry.shape}", file=shard, key=name
            )
        if start != end_of_previous:
            problem = "overlaps the tensor before it" if start < end_of_previous else "leaves a hole before it"
            raise InvalidCheckpointError(f"data at offset {start} {problem}", file=shard, key=name)
        if data + end > size:
            raise InvalidCheckpointError(
                f"truncated: data ends at byte {data + end}, the file has {size}", file=shard, key=name
            )
        end_of_previous = end
        tensors.append(TensorInfo(name, entry.dtype, tuple(entry.shape), shard, data + start, data + end))
    if data + end_of_previous != size:
        raise InvalidCheckpointError(
            f"the file has {size} bytes, but its header describes {data + end_of_previous}", file=shard
        )
    return tensors
