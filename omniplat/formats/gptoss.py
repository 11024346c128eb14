"""`quant_method: mxfp4` of gpt-oss: routed experts in MXFP4, every other module in 16 bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from omniplat.formats.declared import Declaration, Declared
from omniplat.formats.matching import Pattern
from omniplat.formats.metadata import Fields
from omniplat.formats.skiplists import skip_rules
from omniplat.scheme import Scheme

_EXPERTS = Pattern(re.compile(r"(?:.*\.)?experts\."))


@dataclass(frozen=True, slots=True)
class GptOssFormat:
    name: str = "mxfp4"

    def claims(self, source: Fields) -> bool:
        """Engines' own serialized mxfp4 says so with a flag and is another dialect."""
        own = source.values.get("quant_method") in ("mxfp4", "gpt_oss_mxfp4")
        return own and not any(key.startswith("is_checkpoint") for key in source.values)

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        rules = skip_rules(source, ("modules_to_not_convert", "ignored_layers"), parts_of)
        declared = Declared(Scheme.parse("mxfp4/a16"))
        return Declaration(
            self.name,
            source.file,
            declared,
            rules,
            scope=_EXPERTS,
            scope_key="routed experts",
            default_key="quant_method=mxfp4",
        )


FORMAT = GptOssFormat()
