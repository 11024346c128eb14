"""GGUF files: every tensor has a type of its own in the header, which is the only metadata and cannot be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule
from omniplat.formats.markers import GGUF_KEY
from omniplat.formats.matching import Exact
from omniplat.formats.metadata import Fields
from omniplat.scheme import Scheme, TensorQuant


@dataclass(frozen=True, slots=True)
class GgufFormat:
    name: str = "gguf"

    def claims(self, source: Fields) -> bool:
        return source.key == GGUF_KEY

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        types = source.child("tensors")
        rules = [] if types is None else [_rule(name, types.string(name)) for name in types.values]
        return Declaration(
            self.name,
            source.file,
            NOT_QUANTIZED,
            tuple(rules),
            speaks_of_all=False,
            default_key=f"general.architecture={source.string('architecture')}",
        )


def _rule(name: str, element: str) -> Rule:
    module = name.removesuffix(".weight")
    exact = Exact(module)
    declared = Declared(Scheme(TensorQuant(element, "opaque")))
    kind = element.removeprefix("gguf_").upper()
    return Rule(f"{name}: {kind}", "types", module, exact, exact, exact, declared)


FORMAT = GgufFormat()
