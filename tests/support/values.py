"""The values of one module of a resolved checkpoint, as the load path would unpack them."""

from __future__ import annotations

from omniplat.canonical import Array
from omniplat.checkpoint.reader import ShardReader
from omniplat.formats.resolve import Resolution
from omniplat.formats.unpack import canonicalise
from omniplat.oracle import dequantize


def values_of(found: Resolution, name: str, expert: int | None = None) -> Array:
    """float64 [N, K] of a module, or of one of its stacked experts."""
    (module,) = [m for m in found.modules if m.name == name]
    reader = ShardReader(found.component.root)
    arrays = {role: reader.read(info) for role, info in module.tensors.items()}
    if expert is not None:
        arrays = {role: array[expert] for role, array in arrays.items()}
    weight = canonicalise(arrays, module.storage, module.scheme, module.out_features, module.in_features)
    return dequantize(weight)
