"""Shapes of weights that are stated outside their tensors: torchao's metadata in a shard, a model's configuration.

Recognition takes them among the values of small tensors, under a leaf that no module has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec

from omniplat.checkpoint.folder import Component
from omniplat.checkpoint.modules import Module
from omniplat.models.shapes import shapes_of

#: The key under which recognition finds the shapes, as pairs of int64.
STATED_SHAPES = "<shapes>"
#: Leaves of packed weights whose tensors do not have the weight's shape.
FLAT_LEAVES = ("weight._data._data", "_weight_qdata", "weight:qdata")


def stated_shapes(component: Component, module: Module) -> bytes:
    """The shapes that `module` may have; b"" for modules whose own tensors show it."""
    leaf = next((name for name in FLAT_LEAVES if name in module.leaves), "")
    if leaf == FLAT_LEAVES[0]:
        return _encoded(shapes_of(component.config, module.name))
    if leaf and len(module.leaves[leaf].shape) == 4:
        return _encoded(_of_torchao(component.shard_metadata.get(f"{module.name}.weight", "")))
    return b""


def _of_torchao(text: str) -> Iterable[tuple[int, int]]:
    """`_data.shape` of the JSON that describes a tensor subclass; nothing where it is not that."""
    try:
        found = msgspec.json.decode(text.encode(), type=_Subclass)
    except (msgspec.DecodeError, RecursionError):
        return
    shape = found.data.shape
    if len(shape) == 2 and all(0 < size < 1 << 40 for size in shape):
        yield shape[0], shape[1]


class _Data(msgspec.Struct):
    shape: list[int]


class _Subclass(msgspec.Struct, rename={"data": "_data"}):
    data: _Data


def _encoded(shapes: Iterable[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack("<qq", n, k) for n, k in shapes)


def decoded_shapes(blob: bytes) -> tuple[tuple[int, int], ...]:
    """What `stated_shapes` encoded."""
    return tuple(struct.iter_unpack("<qq", blob))
