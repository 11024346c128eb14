"""Where weights come from: a folder in safetensors, a state dict, or somebody who hands them over one by one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from omniplat.api import require_files
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.checkpoint.reader import ShardReader
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import UsageError
from omniplat.modules.experts import expert_key, holds_stacks
from omniplat.modules.places import Names, Place
from omniplat.modules.renames import renames_of
from omniplat.runtime.tensors import to_tensor

Source = str | os.PathLike[str] | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def arriving_tensors(
    source: Source, model: nn.Module, places: Mapping[str, Place], key_mapping: Mapping[str, str] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `source` under the model's names, one at a time and in the source's order.

    Names are matched as in `load_into`; of pairs, whose names nobody knows ahead, only renames apply. Raises UsageError
    for a checkpoint of several components and for a weight that transformers would convert.
    """
    if isinstance(source, (str, os.PathLike)):
        root, tensors = _infos(source)
        names = _names(model, places, tuple(tensors), key_mapping)
        pairs = _read(root, tensors)
    elif isinstance(source, Mapping):
        names = _names(model, places, tuple(source), key_mapping)
        pairs = iter(source.items())
    else:
        names = Names(places, (), renames_of(model, None, key_mapping))
        pairs = iter(source)

    def named(pair: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        name, tensor = pair
        renamed = names.tensor(name)
        key = expert_key(renamed)
        is_expert = key is not None and key.experts in places and holds_stacks(places[key.experts].module)
        owner, _, leaf = name.rpartition(".")
        conversion = names.conversion(owner) if leaf == "weight" and not is_expert else ""
        if conversion:
            raise UsageError(f"{name}: transformers converts it ({conversion}), which is not done here")
        return renamed, tensor

    # no generator: its frame would hold the tensor while it is used, and memory be given back too early
    return map(named, pairs)


def _names(
    model: nn.Module, places: Mapping[str, Place], stored: tuple[str, ...], key_mapping: Mapping[str, str] | None
) -> Names:
    owners = (name.rpartition(".")[0] for name in stored)
    return Names(places, owners, renames_of(model, stored, key_mapping))


def _infos(folder: str | os.PathLike[str]) -> tuple[Path, dict[str, TensorInfo]]:
    """Where a checkpoint's shards are, and its tensors in the order in which they lie on disk."""
    require_files(folder)
    opened = open_checkpoint(folder)
    if len(opened.components) != 1:
        found = ", ".join(item.name for item in opened.components)
        raise UsageError(f"{folder} has several components: name the folder of one of them ({found})")
    (component,) = opened.components
    return component.root, dict(sorted(component.tensors.items(), key=lambda item: (item[1].shard, item[1].start)))


def _read(root: Path, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    reader = ShardReader(root)
    for name, info in tensors.items():
        yield name, _read_one(reader, info)


def _read_one(reader: ShardReader, info: TensorInfo) -> torch.Tensor:
    tensor = to_tensor(reader.read(info))
    reader.close()  # pages of a mapped file count as memory until it is let go of
    return tensor
