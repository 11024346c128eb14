"""SVDQuant checkpoints: vllm-omni's (flat fields in config.json) and nunchaku's (JSON in the safetensors metadata).

Both use the same tensor names and shapes. vllm-omni's lie in rows; nunchaku's in the order in which a warp loads
them. The metadata tells whose they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.base import at_run_time
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule
from omniplat.formats.matching import AnyOf, AtOrBelow, Contains, Segments
from omniplat.formats.metadata import Fields
from omniplat.formats.omni_native import checkpoint_names
from omniplat.formats.recognise.svdquant import ROWS, WARP_TILES
from omniplat.scheme import Scheme, parse_activation_id, parse_weight_id

#: precision -> (weight id, activation id).
_PRECISIONS = {"nvfp4": ("svdq-nvfp4", "svdq-nvfp4"), "int4": ("svdq-int4-g64", "svdq-int4")}


@dataclass(frozen=True, slots=True)
class SvdQuantFormat:
    name: str = "svdquant"

    def claims(self, source: Fields) -> bool:
        return source.values.get("quant_method", source.values.get("method")) in ("svdquant", "svdq", "nunchaku")

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        is_nunchaku = source.has("weight") or source.string("quant_method") == "nunchaku"
        precision = _precision_of_weight(source) if is_nunchaku else source.string("precision", "nvfp4")
        if precision not in _PRECISIONS:
            raise UnsupportedOptionError(
                f"{precision!r} is none of {', '.join(_PRECISIONS)}", file=source.file, key=source.path("precision")
            )
        if source.boolean("act_unsigned", False):
            raise UnsupportedOptionError(
                "unsigned activations need a shift that the checkpoint does not state",
                file=source.file,
                key=source.path("act_unsigned"),
            )
        weight, activation = _PRECISIONS[precision]
        scheme = Scheme(parse_weight_id(weight), at_run_time(parse_activation_id(activation), "floor"))
        rules = [_skip(entry, parts_of) for entry in source.strings("modules_to_not_convert")]
        # Only layers with a low-rank pair are quantized, and no list names the others.
        return Declaration(
            self.name,
            source.file,
            Declared(scheme, WARP_TILES if is_nunchaku else ROWS),
            tuple(rules),
            speaks_of_all=False,
            default_key=f"precision={precision}",
        )


def _precision_of_weight(source: Fields) -> str:
    """nunchaku's `weight.dtype`: fp4_e2m1_all is nvfp4, int4 int4."""
    weight = source.child("weight")
    dtype = weight.string("dtype") if weight is not None else source.string("precision")
    return "nvfp4" if dtype.startswith("fp4") else dtype


def _skip(entry: str, parts_of: Mapping[str, tuple[str, ...]]) -> Rule:
    names = checkpoint_names(entry, parts_of)
    literal = AnyOf(tuple(matcher for name in names for matcher in (AtOrBelow(name), Segments(name))))
    consumer = AnyOf(tuple(Contains(name) for name in names))
    return Rule(f"modules_to_not_convert[{entry!r}]", "ignore", entry, literal, literal, consumer, NOT_QUANTIZED, -1)


FORMAT = SvdQuantFormat()
