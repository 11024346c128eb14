"""The interface of a format module, and the matchers that several dialects share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from omniplat.formats.declared import Declaration
from omniplat.formats.matching import AnyOf, AtOrBelow, Matcher
from omniplat.formats.metadata import Fields


class Format(Protocol):
    """One checkpoint dialect. Modules export an instance through the entry-point group `omniplat.formats`."""

    @property
    def name(self) -> str: ...

    def claims(self, source: Fields) -> bool:
        """True when this metadata is written in the dialect."""
        ...

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        """What the metadata declares.

        `parts_of` maps an engine's fused names to checkpoint names (`to_qkv` -> `to_q`, ...).
        Raises InvalidCheckpointError (file and key) for values of the wrong type, UnsupportedOptionError for
        values that are understood but cannot be honoured.
        """
        ...


def expand_fused(text: str, parts_of: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """`text` and, where its last segment is an engine's fused name, the names of its parts."""
    head, dot, leaf = text.rpartition(".")
    return (text, *(f"{head}{dot}{part}" for part in parts_of.get(leaf, ())))


def literal_matcher(text: str, parts_of: Mapping[str, tuple[str, ...]]) -> Matcher:
    """A literal entry bounded by dots: the module itself, what is below it, or the parts of a fused name."""
    names = tuple(name.removesuffix(".weight") for name in expand_fused(text, parts_of))
    return AtOrBelow(names[0]) if len(names) == 1 else AnyOf(tuple(AtOrBelow(name) for name in names))
