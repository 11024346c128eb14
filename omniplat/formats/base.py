"""The interface of a format module, and the matchers that several dialects share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from omniplat.formats.declared import Declaration
from omniplat.formats.matching import AnyOf, AtOrBelow, Matcher
from omniplat.formats.metadata import Fields
from omniplat.scheme import TensorQuant


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


def at_run_time(quant: TensorQuant | None, mx_rule: str) -> TensorQuant | None:
    """An activation's quantization with the rule for its scales: `mx_rule` for powers of two, absmax for the rest."""
    if quant is None:
        return None
    if quant.scale_format == "e8m0":
        return replace(quant, scale_rule=mx_rule, rounding="nearest-even")
    return replace(quant, scale_rule="absmax" if quant.dynamic else "", rounding="nearest-even")


def expand_fused(text: str, parts_of: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """`text` and, where it ends with an engine's own name, the names of the checkpoint modules behind it.

    The longest ending in `parts_of` counts, on a dot boundary and once: `ffn.net_0.proj` before `proj`.
    """
    segments = text.removesuffix(".weight").split(".")
    for start in range(len(segments)):
        parts = parts_of.get(".".join(segments[start:]))
        if parts:
            return (text, *(".".join((*segments[:start], part)) for part in parts))
    return (text,)


def literal_matcher(text: str, parts_of: Mapping[str, tuple[str, ...]]) -> Matcher:
    """A literal entry bounded by dots: the module itself, what is below it, or the parts of a fused name."""
    names = tuple(name.removesuffix(".weight") for name in expand_fused(text, parts_of))
    return AtOrBelow(names[0]) if len(names) == 1 else AnyOf(tuple(AtOrBelow(name) for name in names))
