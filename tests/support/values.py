"""The values of one module of a resolved checkpoint, as the load path would unpack them."""

from __future__ import annotations

from omniplat.canonical import Array
from omniplat.checkpoint.reader import ShardReader
from omniplat.formats.resolve import Resolution
from omniplat.formats.unpack import canonicalise
from omniplat.oracle import dequantize
from omniplat.reading import read_roles


def values_of(found: Resolution, name: str, expert: int | None = None) -> Array:
    """float64 [N, K] of a module, or of one of its stacked experts."""
    (module,) = [m for m in found.modules if m.name == name]
    arrays = read_roles(module, ShardReader(found.component.root), expert)
    weight = canonicalise(arrays, module.storage, module.scheme, module.out_features, module.in_features)
    return dequantize(weight)
