"""Names that the modules of a checkpoint have elsewhere: in engines, which fuse, and where other tools put a model.

Rules are matched in the checkpoint's own names. One that hits nothing there may be written in an engine's names
(`qkv_proj` for q, k and v, by the family's table), or in another spelling of either. `rule_hits.py` asks in these
names then, in the same way for literal entries, globs and expressions of every dialect. Where every rule hits something
they are not even collected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from omniplat.formats.matching import Matcher, ModuleIndex
from omniplat.models.spellings import spellings_of

_Names = dict[str, set[str]]


class Aliases:
    """The other names of a component's modules. Built when a rule first needs them."""

    def __init__(self, index: ModuleIndex, parts_of: Mapping[str, tuple[str, ...]]) -> None:
        """`parts_of` maps an engine's names to those of the checkpoint modules behind them, as dotted suffixes."""
        self._index = index
        self._names = index.names
        self._parts_of = parts_of

    @cached_property
    def engine(self) -> AliasIndex:
        """What engines call modules; names that a checkpoint module has are not among them."""
        fused: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for engine, parts in self._parts_of.items():
            for part in parts:
                fused[part.rpartition(".")[2]].append((part, engine))
        own = set(self._names)
        found: _Names = defaultdict(set)
        for name in self._names:
            for part, engine in fused.get(name.rpartition(".")[2], ()):
                head = name.removesuffix(part)
                if head != name and (not head or head.endswith(".")) and head + engine not in own:
                    found[head + engine].add(name)
        return AliasIndex(found, self._index)

    @cached_property
    def spelled(self) -> AliasIndex:
        """The other spellings of the checkpoint's names and of the engines'."""
        found: _Names = defaultdict(set)
        for name in self._names:
            for spelled in spellings_of(name):
                found[spelled].add(name)
        for name, modules in self.engine.modules.items():
            for spelled in spellings_of(name):
                found[spelled] |= modules
        own = set(self._names) | self.engine.modules.keys()
        return AliasIndex({name: modules for name, modules in found.items() if name not in own}, self._index)


@dataclass(frozen=True)
class AliasIndex:
    """Other names and the modules of `own` behind each."""

    modules: Mapping[str, set[str]]
    own: ModuleIndex

    @cached_property
    def index(self) -> ModuleIndex:
        return ModuleIndex(self.modules, beside=self.own)

    def hits(self, matcher: Matcher) -> list[str]:
        """The checkpoint modules behind the names that `matcher` hits, sorted."""
        found = [self.modules[name] for name in matcher.hits(self.index)] if self.modules else []
        return sorted(set().union(*found))
