"""bitsandbytes checkpoints: NF4, FP4 and LLM.int8, with the list of modules that stay in 16 bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.declared import Declaration, Declared
from omniplat.formats.metadata import Fields
from omniplat.formats.skiplists import segment_rules, unlisted_head
from omniplat.scheme import Scheme, TensorQuant

_METHODS = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")
_LOAD_KEYS = ("load_in_4bit", "_load_in_4bit", "load_in_8bit", "_load_in_8bit")
_ELEMENTS = {"nf4": "nf4", "fp4": "fp4_bnb"}
#: Values that share a scale; the library's default, which no config states.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class BitsAndBytesFormat:
    name: str = "bitsandbytes"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if method is None:
            return any(key in source.values for key in _LOAD_KEYS)
        return method in _METHODS

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        rules = segment_rules(source, ("llm_int8_skip_modules", "modules_to_not_convert"), parts_of)
        declared, key = _declared(source)
        return Declaration(self.name, source.file, declared, rules, default_key=key, unlisted=unlisted_head(rules))


def _declared(source: Fields) -> tuple[Declared, str]:
    method = source.string("quant_method")
    four = any(source.boolean(key, False) for key in _LOAD_KEYS[:2]) or method.endswith("_4bit")
    eight = any(source.boolean(key, False) for key in _LOAD_KEYS[2:]) or method.endswith("_8bit")
    if four and eight:
        raise UnsupportedOptionError(
            "4 and 8 bits are both asked for", file=source.file, key=source.path("load_in_8bit")
        )
    if four:
        kind = source.string("bnb_4bit_quant_type", "fp4").lower()
        if kind not in _ELEMENTS:
            raise UnsupportedOptionError(
                f"{kind!r} is neither nf4 nor fp4", file=source.file, key=source.path("bnb_4bit_quant_type")
            )
        quant = TensorQuant(_ELEMENTS[kind], "group", _BLOCK)
        return Declared(Scheme(quant), open_granularity=True), f"load_in_4bit, {kind}"
    if eight:
        return Declared(Scheme.parse("int8-bnb/int8-bnb")), "load_in_8bit"
    raise UnsupportedOptionError(
        "neither 4 nor 8 bits are asked for", file=source.file, key=source.path("load_in_4bit")
    )


FORMAT = BitsAndBytesFormat()
