"""Opening a checkpoint: which folders are components, which configs and shards each one has.

Nothing but JSON files and safetensors headers is read. Every path that a file of the checkpoint names is
confined to the checkpoint's folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from omniplat.checkpoint.header import read_header_of
from omniplat.checkpoint.source import LocalFolder, Source
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import InvalidCheckpointError

#: Files beside config.json that may hold quantization metadata, in the order in which they are consulted.
METADATA_FILES = (
    "hf_quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quant_model_description.json",
    "quant_model_weight_description.json",
    "quanto_qmap.json",
)

#: Small tensors (shapes, scalar scales, quantizer states) may be read while planning, up to this size.
MAX_METADATA_TENSOR_BYTES = 4096
#: Vectors along K by which inputs are smoothed, and matrices that transform them, decide what may be fused; they may be
#: read up to this size.
MAX_SMOOTHING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Component:
    """One model of a checkpoint: its own configs, metadata and tensors.

    `name` is "" for a plain checkpoint and the folder's name in a pipeline; `files` maps the names of
    `METADATA_FILES` that exist to their parsed content; `index_absent` lists (index file, tensor, shard) for
    entries of an index that the named shard does not contain.
    """

    name: str
    root: Path
    config_file: str
    config: Mapping[str, Any]
    files: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    shard_metadata: Mapping[str, str]
    shards: tuple[str, ...] = ()
    index_absent: tuple[tuple[str, str, str], ...] = ()
    source: Source = field(default_factory=lambda: LocalFolder(Path()))

    def path_of(self, file: str) -> str:
        """`file` of this component as a path relative to the checkpoint."""
        return f"{self.name}/{file}" if self.name else file

    def read_small(self, info: TensorInfo, limit: int = MAX_METADATA_TENSOR_BYTES) -> bytes:
        """The bytes of a tensor of at most `limit` bytes; raises ValueError for a larger one."""
        if info.nbytes > limit:
            raise ValueError(f"{info.name} has {info.nbytes} bytes and is no metadata tensor")
        return self.source.read_tensor(info, self.tensors)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder, one file or a repository of the Hub, and its components.

    `path` is the id of a repository and `revision` its commit, "" for files on disk. `absent_components` are listed
    as null in model_index.json, `missing_components` with a class but have no folder. `unread_files` hold quantization
    metadata beside the components' folders, and of no component.
    """

    path: Path
    components: tuple[Component, ...]
    absent_components: tuple[str, ...] = field(default=())
    missing_components: tuple[str, ...] = field(default=())
    revision: str = ""
    unread_files: tuple[str, ...] = field(default=())


def read_json(root: Path, file: str) -> Any:
    """Parsed `root/file`; raises InvalidCheckpointError naming the file and, for broken JSON, the place."""
    return _read_json(LocalFolder(root), file)


def _read_json(source: Source, file: str) -> Any:
    blob = source.read_file(file)
    try:
        return msgspec.json.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidCheckpointError(f"is not valid JSON: {exc}", file=file) from exc


def _read_config(source: Source, file: str) -> Mapping[str, Any]:
    config = _read_json(source, file)
    if not isinstance(config, dict):
        raise InvalidCheckpointError(f"must be a JSON object, found {type(config).__name__}", file=file)
    return config


def _check_shard(source: Source, prefix: str, shard: str, index: str, tensor: str) -> None:
    """Refuse a shard outside the checkpoint, or one that is not there. Hub caches link shards: links may leave."""
    key = f"weight_map.{tensor}"
    pure = PurePosixPath(shard)
    if pure.is_absolute() or ".." in pure.parts or "\0" in shard or not shard:
        raise InvalidCheckpointError(f"names the file {shard!r}, which is outside the checkpoint", file=index, key=key)
    if not source.is_file(prefix + shard):
        raise InvalidCheckpointError(f"names the file {shard!r}, which does not exist", file=index, key=key)


def _index_entries(source: Source, index: str) -> dict[str, str]:
    content = _read_json(source, index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InvalidCheckpointError("must hold an object that maps tensors to files", file=index, key="weight_map")
    return weight_map


def _metadata_files(names: Sequence[str]) -> list[str]:
    """Those of `names` that hold metadata.

    msModelSlim's other exporter appends the type to the file's name: `quant_model_description_w8a8.json`.
    """
    described = [n for n in names if n.startswith("quant_model_description_") and n.endswith(".json")]
    return [f for f in METADATA_FILES if f in names] + described


def _open_component(source: Source, name: str, *, only_shard: str = "", gguf: tuple[str, ...] = ()) -> Component:
    """`only_shard`: that file alone, without configs. `gguf`: these files are the shards."""
    names = source.names(name)
    prefix = f"{name}/" if name else ""
    config_file = f"{prefix}config.json"
    config = _read_config(source, config_file) if "config.json" in names and not only_shard else {}
    files = {f: _read_json(source, prefix + f) for f in ([] if only_shard else _metadata_files(names))}

    listed: dict[str, tuple[str, str]] = {}  # tensor -> (index file, shard)
    indexes = [] if only_shard else [n for n in names if n.endswith(".safetensors.index.json")]
    for index in indexes:
        checked: set[str] = set()
        for tensor, shard in _index_entries(source, prefix + index).items():
            if shard not in checked:
                _check_shard(source, prefix, shard, prefix + index, tensor)
                checked.add(shard)
            listed.setdefault(tensor, (prefix + index, prefix + shard))
    shards = sorted({shard for _, shard in listed.values()})
    if only_shard:
        shards = [only_shard]
    elif gguf:
        shards = [prefix + n for n in gguf]
    elif not indexes:
        shards = [prefix + n for n in names if n.endswith(".safetensors")]

    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    source.prepare(shards)
    for shard in shards:
        header = read_header_of(source, shard)
        metadata.update(header.metadata)
        for info in header.tensors:
            first = tensors.setdefault(info.name, info)
            if first is not info:
                if listed.get(info.name, ("", ""))[1] == shard:
                    tensors[info.name] = info
                elif info.name not in listed:
                    raise InvalidCheckpointError(f"is also in {first.shard}", file=shard, key=info.name)
    absent = tuple((index, tensor, shard) for tensor, (index, shard) in listed.items() if tensor not in tensors)
    return Component(name, source.root, config_file, config, files, tensors, metadata, tuple(shards), absent, source)


def _pipeline_components(source: Source, names: Iterable[str]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Component folders that hold safetensors, components that model_index.json lists as null, those without a folder,
    and model_index.json itself where it says how something is quantized."""
    index = _read_config(source, "model_index.json")
    present: list[str] = []
    absent: list[str] = []
    missing: list[str] = []
    for key, value in index.items():
        if key.startswith("_") or not isinstance(value, list):
            continue
        if PurePosixPath(key).name != key or key in (".", ".."):
            raise InvalidCheckpointError("is not a folder name", file="model_index.json", key=key)
        if all(item is None for item in value):
            absent.append(key)
        elif key in names and _has_shards(source, key):
            present.append(key)
        elif key not in names:
            missing.append(key)
    return present, absent, missing, ["model_index.json"] if index.get("quantization_config") else []


def _has_shards(source: Source, folder: str = "") -> bool:
    return source.is_folder(folder) and any(
        n.endswith((".safetensors", ".safetensors.index.json")) for n in source.names(folder)
    )


#: Files of weights that Python would have to unpickle.
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_GGUF_SPLIT = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")


def _gguf_shards(names: Iterable[str]) -> tuple[str, ...]:
    """The GGUF files of a folder: one, or all parts of a split one. Several files are several checkpoints."""
    files = tuple(n for n in names if n.endswith(".gguf"))
    if len(files) < 2:
        return files
    parts = [_GGUF_SPLIT.fullmatch(n) for n in files]
    first = parts[0]
    if first is None or any(p is None or p["stem"] != first["stem"] or p["count"] != first["count"] for p in parts):
        raise InvalidCheckpointError(
            f"is one of {len(files)} GGUF files; name the one that is meant (a path, or org/name/FILE.gguf)",
            file=files[0],
        )
    if len(files) != int(first["count"]):
        raise InvalidCheckpointError(f"is one of {len(files)} parts of {int(first['count'])}", file=files[0])
    return files


def _parts_of(source: Source, file: str) -> tuple[str, ...]:
    """All parts of the split GGUF file that `file` is one of; itself where it is whole."""
    folder, _, name = file.rpartition("/")
    part = _GGUF_SPLIT.fullmatch(name)
    if part is None:
        return (file,)
    beside = (n for n in source.names(folder) if (m := _GGUF_SPLIT.fullmatch(n)) and m["stem"] == part["stem"])
    return tuple(f"{folder}/{n}" if folder else n for n in _gguf_shards(tuple(beside)))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder, a pipeline folder, or one .safetensors or .gguf file.

    Raises InvalidCheckpointError when nothing readable is there or a config or shard is broken.
    """
    root = Path(path)
    if root.is_file():
        if root.suffix not in (".safetensors", ".gguf"):
            raise InvalidCheckpointError("is neither a folder nor a .safetensors or .gguf file", file=str(root))
        return Checkpoint(root, (_open_component(LocalFolder(root.parent), "", only_shard=root.name),))
    if not root.is_dir():
        raise InvalidCheckpointError("no such file or folder", file=str(root))
    return open_source(LocalFolder(root))


def open_source(source: Source, revision: str = "", file: str = "") -> Checkpoint:
    """Open the checkpoint whose files `source` has; raises InvalidCheckpointError as `open_checkpoint` does.

    `file` names one of several GGUF files, or a part of one that is split.
    """
    if file:
        if not source.is_file(file):
            raise InvalidCheckpointError("there is no such file", file=file)
        return Checkpoint(source.root, (_open_component(source, "", gguf=_parts_of(source, file)),), revision=revision)
    names = source.names()
    where = str(source.root)
    absent: list[str] = []
    missing: list[str] = []
    unread: list[str] = []
    if "model_index.json" in names:
        present, absent, missing, unread = _pipeline_components(source, names)
        if not present:
            raise InvalidCheckpointError("no listed component holds safetensors", file="model_index.json")
        unread += _metadata_files(names)
        components = tuple(_open_component(source, name) for name in present)
    elif not _has_shards(source):
        components = _without_shards(source, names, where)
    else:
        component = _open_component(source, "")
        if "config.json" not in names and not component.files and not describes_itself(component):
            raise InvalidCheckpointError(
                "not found, and no file or tensor describes the quantization", file="config.json"
            )
        components = (component,)
    return Checkpoint(source.root, components, tuple(absent), tuple(missing), revision, tuple(unread))


def _without_shards(source: Source, names: Sequence[str], where: str) -> tuple[Component, ...]:
    """A folder that holds no safetensors itself: models below it, or a GGUF file."""
    nested = [n for n in names if source.is_folder(n) and "config.json" in source.names(n) and _has_shards(source, n)]
    if nested and "config.json" not in names:
        return tuple(_open_component(source, name) for name in nested)
    gguf = _gguf_shards(names)
    if gguf:
        return (_open_component(source, "", gguf=gguf),)
    if "config.json" in names:
        _read_config(source, "config.json")
    pickles = [name for name in names if name.endswith(_PICKLED)]
    unread = f", and pickled weights are not read: {', '.join(pickles[:3])}" if pickles else ""
    raise InvalidCheckpointError(f"holds no safetensors file{unread}", file=where)


def describes_itself(component: Component) -> bool:
    """True where shard metadata or marker tensors carry the quantization metadata (single-file exports)."""
    keys = component.shard_metadata
    if "quantization_config" in keys or "_quantization_metadata" in keys:
        return True
    return "scaled_fp8" in component.tensors or any(n.endswith(".comfy_quant") for n in component.tensors)
